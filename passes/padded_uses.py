"""Prove that every use of a padded value ends where the ragged rows are taken back.

One walk over the graph, in order. A padded value is the packed tokens, the history the convolution reads, or
a result computed from the convolution; each carries its axes, a result also its term and the masks met on the
way. A value may go through changes of layout; a result also through elementwise operators and masks; history
also into the gather of the new state. Anything else reads padded memory, and the proof stops there.

Dimension key: N requests ("n"), L columns ("l", of history "j"), C channels ("c"), T tokens ("t").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Graph, Node

from ple_inductor.passes.activation import CONV, Term, elementwise
from ple_inductor.passes.axes import Axes, forward, is_layout, is_zero
from ple_inductor.passes.graph_facts import aten, describe, is_op, same_sizes, shape, tensor
from ple_inductor.passes.packed_history import History, Packing
from ple_inductor.passes.ragged_index import prove_index
from ple_inductor.passes.refusal import Refuse
from ple_inductor.passes.request_mask import Conjunct, request_conjuncts


@dataclass(frozen=True)
class Padded:
    """What is known of one padded value."""

    kind: Literal["packed", "history", "result"]
    axes: Axes
    term: Term = CONV
    masks: tuple[Conjunct, ...] = ()


@dataclass(frozen=True)
class Unpack:
    """One gather of ragged rows out of a result.

    Args:
        node: The ``index``.
        axes: Axes of its result: "t" and "c".
        value: What is gathered.
    """

    node: Node
    axes: Axes
    value: Padded


@dataclass
class Uses:
    """All uses of the padded values of one convolution."""

    unpacks: list[Unpack] = field(default_factory=list)
    state_gathers: list[tuple[Node, Axes]] = field(default_factory=list)


def prove_uses(graph: Graph, conv: Node, history: History) -> Uses:
    """The uses of ``history`` and of ``conv``'s result, all of them accounted for; or a refusal."""
    packing = history.packing
    padded: dict[Node, Padded] = {packing.node: Padded("packed", packing.axes)}
    uses = Uses()
    for node in graph.nodes:
        if node is conv:
            padded[node] = Padded("result", ("n", "c", "l"))
        elif node is history.node and history.initial_state is not None:
            padded[node] = Padded("history", history.axes)
        else:
            operands = [operand for operand in node.all_input_nodes if operand in padded]
            if operands:
                _follow(node, operands, padded, uses, packing)
    if not uses.unpacks:
        raise Refuse("padded_escapes", conv, "a gather of the result at (request, column)", "none")
    return uses


def _follow(
    node: Node, operands: list[Node], padded: dict[Node, Padded], uses: Uses, packing: Packing
) -> None:
    """Account for ``node``, which reads the padded ``operands``."""
    value = padded[operands[0]]
    if is_layout(node):
        axes = forward(node, value.axes)
        if axes is None:
            raise Refuse("padded_escapes", node, "a change of layout that keeps the axes", describe(node))
        padded[node] = Padded(value.kind, axes, value.term, value.masks)
    elif value.kind == "history" and is_op(node, aten.gather) and node.args[0] is operands[0]:
        uses.state_gathers.append((node, value.axes))
    elif value.kind != "result" or node.op == "output":
        what = "returned or saved" if node.op == "output" else describe(node)
        raise Refuse("padded_escapes", operands[0] if node.op == "output" else node, "no other reader", what)
    elif is_op(node, aten.index.Tensor):
        uses.unpacks.append(_unpack(node, value, packing))
    elif is_op(node, aten.where.self):
        padded[node] = _masked(node, padded, packing)
    else:
        padded[node] = _computed(node, padded)


def _computed(node: Node, padded: dict[Node, Padded]) -> Padded:
    """An elementwise operator over results and numbers."""
    found = tensor(node)
    values = [padded[operand] for operand in node.all_input_nodes if operand in padded]
    first = values[0]
    plain = all(operand in padded for operand in node.all_input_nodes)
    if found is None or not plain or any(v.kind != "result" or v.axes != first.axes for v in values):
        raise Refuse("activation", node, "an elementwise operator over the result alone", describe(node))
    if any(value.masks != first.masks for value in values):
        raise Refuse("mask_form", node, "one mask on all operands", describe(node))
    if not same_sizes(node, node.all_input_nodes[0]):
        raise Refuse("padded_escapes", node, "an operator that keeps the sizes", describe(node))
    operands = tuple(
        padded[arg].term if isinstance(arg, Node) and arg in padded else arg for arg in node.args
    )
    return Padded("result", first.axes, elementwise(node, operands), first.masks)


def _masked(node: Node, padded: dict[Node, Padded], packing: Packing) -> Padded:
    """``where(mask, result, 0)`` or ``where(mask, 0, result)``; SiLU keeps the 0, before it or after."""
    mask, kept, other = node.args
    assert isinstance(mask, Node)
    keeps = is_zero(other)
    source = kept if keeps else other
    if mask in padded or not isinstance(source, Node) or not (keeps or is_zero(kept)):
        raise Refuse("mask_form", node, "where(mask, result, 0)", describe(node))
    if source not in padded or not same_sizes(node, source):
        raise Refuse("mask_form", node, "a mask no larger than the result", describe(node))
    if node.meta["val"].dtype is not source.meta["val"].dtype:
        raise Refuse("dtype_chain", node, f"zeros of the result's dtype, {describe(source)}", describe(node))
    value = padded[source]
    masks = request_conjuncts(mask, value.axes, packing.index, packing.columns, keeps=keeps, code="mask_form")
    return Padded("result", value.axes, value.term, value.masks + masks)


def _unpack(node: Node, value: Padded, packing: Packing) -> Unpack:
    """``result[request, column]``."""
    given = list(node.args[1])  # type: ignore[arg-type]
    given += [None] * (len(value.axes) - len(given))
    at = {axis: index for axis, index in zip(value.axes, given, strict=True) if index is not None}
    if set(at) != {"n", "l"} or set(value.axes) != {"n", "l", "c"}:
        raise Refuse("unpack_axes", node, "indices over requests and columns", describe(node))
    request, column = at["n"], at["l"]
    if request is not packing.request or column is not packing.column:
        tokens = shape(packing.request)[0]
        index = prove_index(request, column, tokens, node, "unpack_index")
        if index != packing.index:
            raise Refuse(
                "unpack_index",
                node,
                f"query_start_loc of the packing, {describe(packing.index.query_start_loc)}",
                describe(index.query_start_loc),
            )
    dims = [dim for dim, index in enumerate(given) if index is not None]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    channels_first = adjacent and dims[0] == 1
    return Unpack(node, ("c", "t") if channels_first else ("t", "c"), value)
