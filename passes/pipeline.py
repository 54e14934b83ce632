"""Run every rewrite over a graph and say what became of each candidate.

The one place that catches: a refusal becomes a miss, and anything else a pass raises becomes a miss with the
code ``pass_raised`` after the graph was given back as it was. A compile that worked without these passes
works with them.
"""

from __future__ import annotations

import logging

from torch.fx import Graph, Node

from ple_inductor.passes import padded_short_conv
from ple_inductor.passes.graph_edit import GraphEdit
from ple_inductor.passes.outcome import Miss, Rewrite
from ple_inductor.passes.refusal import OBLIGATIONS, Refuse, source_line

log = logging.getLogger(__name__)


def run(graph: Graph, *, is_inference: bool) -> tuple[list[Rewrite], list[Miss]]:
    """Rewrite ``graph`` in place.

    Args:
        graph: A functional ATen graph with fake values in ``meta["val"]``, as Inductor's
            ``post_grad_custom_pre_pass`` and ``post_grad_custom_post_pass`` receive it.
        is_inference: False for a graph that has a backward pass.

    Returns:
        What was rewritten, and the candidates that were left as they were.
    """
    rewrites: list[Rewrite] = []
    misses: list[Miss] = []
    for anchor in list(padded_short_conv.anchors(graph)):
        outcome = _attempt(graph, anchor, is_inference)
        if isinstance(outcome, Rewrite):
            rewrites.append(outcome)
        else:
            misses.append(outcome)
    return rewrites, misses


def _attempt(graph: Graph, anchor: Node, is_inference: bool) -> Rewrite | Miss:
    edit: GraphEdit | None = None
    try:
        proof = padded_short_conv.prove(graph, anchor, is_inference=is_inference)
        edit = GraphEdit(graph, anchor)
        rewrite = padded_short_conv.rewrite(edit, proof)
        edit.commit()
    except Refuse as refusal:
        return refusal.miss(padded_short_conv.NAME)
    except Exception as error:  # a user's compile must not fail for a rewrite's sake
        log.debug("%s raised", padded_short_conv.NAME, exc_info=True)
        if edit is not None:
            edit.undo()
        return Miss(
            name=padded_short_conv.NAME,
            code="pass_raised",
            obligation=OBLIGATIONS["pass_raised"],
            node=anchor.name,
            source=source_line(anchor),
            expected="no exception",
            found=f"{type(error).__name__}: {error}",
        )
    return rewrite
