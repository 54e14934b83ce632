"""The pass that Inductor calls, and the hook it stands in.

`PlePass` is plain data: the configuration that holds it is pickled and deep-copied, and its ``uuid`` is
part of the key of every compile cache. So nothing may be stored in it but what changes its effect, and each
such field is in the ``uuid``. What the pass does to a graph is in `ple_inductor.passes`; what it says is in
`examine`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import (
    CustomGraphPassCallable,
    CustomGraphPassType,
    CustomInferenceAwareGraphPass,
    get_custom_graph_passes,
)
from torch.fx import Graph

import ple_inductor
import ple_inductor.lowerings
import ple_inductor.passes
from ple_inductor import report_store
from ple_inductor.passes import pipeline
from ple_inductor.passes.outcome import Miss
from ple_inductor.passes.refusal import OBLIGATIONS, source_line
from ple_inductor.report import OpaqueOperator, Report
from ple_inductor.settings import is_off

log = logging.getLogger(__name__)

# Part of the names of the operators, in other libraries, that are known to hold the padded code.
_HOLDS_CANDIDATE = "ple_short_conv"


class StrictError(RuntimeError):
    """A candidate was left as it is, and ``strict`` was asked for; the text is the report's."""


@dataclass(frozen=True)
class PlePass(CustomInferenceAwareGraphPass):
    """Runs the rewrites on a graph; for ``post_grad_custom_pre_pass`` or ``post_grad_custom_post_pass``.

    Args:
        strict: Raise `StrictError` when a candidate is left as it is, or hidden in an operator.
    """

    strict: bool = False

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        """Rewrite ``graph`` in place and keep the report.

        Args:
            graph: A functional ATen graph.
            is_inference: False for a graph that has a backward pass. A caller that does not say compiles for
                inference: Inductor itself always says.
        """
        if is_off():
            return
        report = examine(graph, is_inference=is_inference)
        if report.has_candidates:
            report_store.publish(report)
        if self.strict and (report.misses or report.opaque):
            raise StrictError(f"not everything was rewritten, and strict is set\n{report}")

    def uuid(self) -> str | None:
        """Changes with the package's sources, with torch, Triton and all that changes the pass's effect.

        None, which turns torch's compile caches off, where the sources cannot be read.
        """
        try:
            sources = _sources_digest()
        except OSError as error:
            log.warning("no compile cache is used, for the sources of this package cannot be read: %s", error)
            return None
        return f"ple_inductor {sources} strict={self.strict} off={is_off()}"


def with_ours(current: CustomGraphPassType, *, strict: bool | None) -> CustomGraphPassType:
    """The hook's value with our pass last and only once.

    Args:
        current: The hook's value.
        strict: Of our pass; None to keep that of the one in ``current``.
    """
    ours = [each for each in get_custom_graph_passes(current) if isinstance(each, PlePass)]
    if strict is None:
        strict = any(each.strict for each in ours)
    theirs = without_ours(current)
    return (*theirs, PlePass(strict)) if theirs else PlePass(strict)


def without_ours(current: CustomGraphPassType) -> tuple[CustomGraphPassCallable, ...]:
    """The passes of the hook that are not ours."""
    return tuple(each for each in get_custom_graph_passes(current) if not isinstance(each, PlePass))


def examine(graph: Graph, *, is_inference: bool) -> Report:
    """Rewrite ``graph`` in place and say what became of its candidates; never raises."""
    opaque = tuple(_opaque_operators(graph))
    try:
        rewrites, misses = pipeline.run(graph, is_inference=is_inference)
    except Exception as error:  # a user's compile must not fail for a rewrite's sake
        log.debug("the rewrites raised", exc_info=True)
        rewrites, misses = [], [_raised(error)]
    function, _ = report_store.current_compile()
    return Report(tuple(rewrites), tuple(misses), opaque, function)


def _raised(error: Exception) -> Miss:
    return Miss(
        name="ple_inductor",
        code="pass_raised",
        obligation=OBLIGATIONS["pass_raised"],
        node="",
        source="",
        expected="no exception",
        found=f"{type(error).__name__}: {error}",
    )


def _opaque_operators(graph: Graph) -> Iterator[OpaqueOperator]:
    for node in graph.nodes:
        # An operator that writes into its arguments is itself the argument of a wrapper.
        for target in (node.target, *node.args[:1]):
            if isinstance(target, torch._ops.OpOverload) and _holds_candidate(target):
                yield OpaqueOperator(target._schema.name, source_line(node))


def _holds_candidate(target: torch._ops.OpOverload) -> bool:
    namespace, _, name = target._schema.name.partition("::")
    return namespace != "ple_inductor" and _HOLDS_CANDIDATE in name


@functools.cache
def _sources_digest() -> str:
    """Of every file of the three packages, which lie in folders of their own, and of torch and Triton."""
    digest = hashlib.sha256(torch.__version__.encode())
    files = list(_triton_version_file())
    for package in (ple_inductor, ple_inductor.passes, ple_inductor.lowerings):
        found = sorted(file for folder in package.__path__ for file in _files(folder))
        if not found:
            raise OSError(f"no files in {package.__name__}")
        files += found
    for file in files:
        digest.update(f"\0{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _triton_version_file() -> Iterator[Path]:
    """Found without importing it: that may raise, or look for a driver."""
    with suppress(ValueError):  # something put a module without a spec in its place
        spec = importlib.util.find_spec("triton")
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin)


def _files(folder: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        yield from (Path(parent, name) for name in names)
