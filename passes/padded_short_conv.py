"""Replace a padded short convolution by one on the ragged rows.

Before::

    packed  [N, L, C] = index_put(zeros, (request, column), x)          request, column from query_start_loc
    history [N, C, S+L] = cat([where(has_initial, pool[slots], 0), packed.transpose], -1)
    result  [N, C, L] = silu(convolution(history, weight, groups=C, dilation=d))
    out     [T, C] = where(keep, result.transpose, 0)[request, column]
    pool[slots] = where(update, history[length : length + S], pool[slots])

After::

    out [T, C] = ple_inductor.varlen_short_conv(x, weight, query_start_loc, pool, slots, has_initial, valid)
    ple_inductor.update_conv_state(pool, x, query_start_loc, slots, has_initial, update)

Refused when any obligation in `ple_inductor.passes.refusal` does not hold; the graph is then left untouched.

Dimension key: N requests, L the longest, T tokens, C channels, K taps, d dilation, S = (K - 1) * d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ple_inductor.passes.activation import prove_activation
from ple_inductor.passes.axes import filled_with
from ple_inductor.passes.graph_edit import GraphEdit
from ple_inductor.passes.graph_facts import (
    argument,
    aten,
    describe,
    is_op,
    same,
    same_or_guarded,
    shape,
    tensor,
    value,
)
from ple_inductor.passes.initial_state import InitialState, StateRows, prove_initial_state
from ple_inductor.passes.outcome import MemoryCertificate, Rewrite
from ple_inductor.passes.packed_history import History, prove_history
from ple_inductor.passes.padded_uses import Unpack, prove_uses
from ple_inductor.passes.refusal import Refuse, source_line
from ple_inductor.passes.request_mask import Conjunct, emit_conjunction
from ple_inductor.passes.state_write_back import WriteBack, prove_write_back
from ple_inductor.passes.unmutated import prove_unmutated

NAME = "padded_short_conv"

# How far back from a convolution a packing is looked for, in nodes. The affected bodies need 9.
_NEARBY = 64


@dataclass(frozen=True)
class Proof:
    """Everything the rewrite needs, each part proven."""

    conv: Node
    history: History
    initial: InitialState
    unpacks: tuple[tuple[Unpack, str], ...]
    write_back: WriteBack | None
    dilation: object


def anchors(graph: Graph) -> Iterator[Node]:
    """The convolutions whose input was packed nearby: the only nodes for which a refusal is of interest."""
    for node in graph.nodes:
        if is_op(node, aten.convolution) and _packs_nearby(node):
            yield node


def prove(graph: Graph, conv: Node, *, is_inference: bool) -> Proof:
    """Discharge every obligation for the convolution ``conv``; raises `Refuse` at the first that fails."""
    if not is_inference:
        raise Refuse("training", conv, "a graph for inference", "a graph with a backward pass")
    dilation = prove_convolution(conv)
    taps = shape(_weight(conv))[2]
    history = prove_history(conv, (taps - 1) * value(dilation))
    dtype = prove_dtypes(conv, history)
    initial = prove_initial_state(history, dtype)
    uses = prove_uses(graph, conv, history)
    unpacks = tuple(
        (unpack, prove_activation(unpack.value.term, dtype, unpack.node)) for unpack in uses.unpacks
    )
    if len(uses.state_gathers) > 1:
        raise Refuse("state_gather", uses.state_gathers[1][0], "one gather of the new state", "a second one")
    write_back = None
    for gather, axes in uses.state_gathers:
        write_back = prove_write_back(gather, axes, history, initial)
    proof = Proof(conv, history, initial, unpacks, write_back, dilation)
    prove_unmutated(graph, _operands(proof), write_back.copy if write_back else None)
    return proof


def prove_convolution(conv: Node) -> object:
    """The dilation of a depthwise 1-D convolution without bias, padding or stride."""
    weight = shape(_weight(conv))
    if len(weight) != 3:
        raise Refuse("conv_not_1d", conv, "a weight [C, 1, K]", describe(_weight(conv)))
    if argument(conv, "transposed"):
        raise Refuse("conv_transposed", conv, "transposed=False", "transposed=True")
    if argument(conv, "bias") is not None:
        raise Refuse("conv_has_bias", conv, "no bias", describe(argument(conv, "bias")))
    for code, name, needed in (("conv_padded", "padding", 0), ("conv_strided", "stride", 1)):
        found = argument(conv, name)
        if not all(same(size, needed) for size in found):
            raise Refuse(code, conv, f"{name}={needed}", f"{name}={found}")
    channels = shape(conv.args[0])[1]  # type: ignore[arg-type]
    groups = argument(conv, "groups")
    if not same(groups, channels):
        raise Refuse("conv_groups", conv, f"groups={channels}", f"groups={value(groups)}")
    # A weight whose sizes are static says nothing of symbolic channels; a layer's channels never change.
    if not same_or_guarded(weight[0], channels) or not same(weight[1], 1):
        raise Refuse("conv_weight", conv, f"a weight [{channels}, 1, K]", describe(_weight(conv)))
    return argument(conv, "dilation")[0]


def prove_dtypes(conv: Node, history: History) -> torch.dtype:
    """The one dtype of tokens, weight and convolution."""
    x, result = tensor(history.packing.x), tensor(conv)
    assert x is not None
    assert result is not None
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Refuse("dtype_unsupported", conv, "bfloat16, float16 or float32", str(x.dtype))
    weight = tensor(_weight(conv))
    if result.dtype is not x.dtype or weight is None or weight.dtype is not x.dtype:
        raise Refuse("dtype_chain", conv, f"a convolution in {x.dtype}", describe(conv))
    return x.dtype


def rewrite(edit: GraphEdit, proof: Proof) -> Rewrite:
    """Put the operators in place of what ``proof`` covers."""
    from ple_inductor.lowerings.inductor import register

    register()
    report = _report(proof)
    graph = edit.graph
    packing, rows = proof.history.packing, proof.initial.rows
    bounds = packing.index.query_start_loc
    results: dict[tuple[str, tuple[Conjunct, ...]], Node] = {}
    shared: _Shared | None = None
    for unpack, activation in proof.unpacks:
        with graph.inserting_before(unpack.node):
            if shared is None:
                shared = _emit_shared(edit, proof)
            key = (activation, unpack.value.masks)
            if key not in results:
                results[key] = edit.call(
                    torch.ops.ple_inductor.varlen_short_conv.default,
                    shared.x,
                    shared.weight,
                    bounds,
                    shared.pool,
                    rows.slots if rows else None,
                    shared.has_initial_state,
                    emit_conjunction(edit, unpack.value.masks),
                    proof.dilation,
                    activation,
                )
            channels_first = unpack.axes == ("c", "t")
            rows_TC = results[key]
            edit.replace(
                unpack.node,
                edit.call(aten.permute.default, rows_TC, [1, 0]) if channels_first else rows_TC,
            )
    if proof.write_back is not None and shared is not None:
        _emit_write_back(edit, proof, proof.write_back, shared)
    return report


@dataclass(frozen=True)
class _Shared:
    x: Node
    weight: Node
    pool: Node | None
    has_initial_state: Node | None


def _emit_shared(edit: GraphEdit, proof: Proof) -> _Shared:
    """Operands that several calls read."""
    weight, rows, x = _weight(proof.conv), proof.initial.rows, proof.history.packing.x
    flat = is_op(weight, aten.unsqueeze) and argument(weight, "dim") in (1, -2)
    return _Shared(
        x if len(shape(x)) == 2 else edit.call(aten.unsqueeze.default, x, 0),
        weight.args[0] if flat else edit.call(aten.squeeze.dim, weight, 1),  # type: ignore[arg-type]
        _emit_pool(edit, rows) if rows else None,
        emit_conjunction(edit, proof.initial.has_initial_state),
    )


def _emit_pool(edit: GraphEdit, rows: StateRows) -> Node:
    """The pool as [slots, C, W]."""
    order = [rows.pool_axes.index(axis) for axis in ("p", "c", "w")]
    return rows.pool if order == [0, 1, 2] else edit.call(aten.permute.default, rows.pool, order)


def _emit_write_back(edit: GraphEdit, proof: Proof, write_back: WriteBack, shared: _Shared) -> None:
    """The in-place operator, after everything that may still read the old state."""
    graph = edit.graph
    packing = proof.history.packing
    with graph.inserting_before(graph.output_node()):
        edit.call(
            torch.ops.ple_inductor.update_conv_state.default,
            shared.pool,
            shared.x,
            packing.index.query_start_loc,
            write_back.rows.slots,
            shared.has_initial_state,
            _emit_update(edit, write_back),
            write_back.state_length,
        )
    edit.erase(write_back.copy)


def _emit_update(edit: GraphEdit, write_back: WriteBack) -> Node:
    """The requests that are written; all of them, empty ones too, where the graph has no mask."""
    update = emit_conjunction(edit, write_back.update)
    if update is not None:
        return update
    return edit.call(aten.full_like.default, write_back.rows.slots, True, dtype=torch.bool)


def _weight(conv: Node) -> Node:
    weight = conv.args[1]
    assert isinstance(weight, Node)
    return weight


def _operands(proof: Proof) -> list[Node]:
    packing, rows = proof.history.packing, proof.initial.rows
    nodes = [packing.x, _weight(proof.conv), packing.index.query_start_loc]
    if rows is not None:
        nodes += [rows.pool, rows.slots]
    conjuncts = [
        *proof.initial.has_initial_state,
        *(c for unpack, _ in proof.unpacks for c in unpack.value.masks),
    ]
    if proof.write_back is not None:
        conjuncts += proof.write_back.update
    return nodes + [node for node, _ in conjuncts]


def _packs_nearby(conv: Node) -> bool:
    """Whether an ``index_put`` or scatter into a filled buffer lies close behind ``conv``'s input."""
    queue: list[object] = [conv.args[0]]
    seen: set[Node] = set()
    while queue and len(seen) < _NEARBY:
        node = queue.pop(0)
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if (
            is_op(node, aten.index_put, aten.scatter, aten.index_copy)
            and filled_with(node.args[0]) is not None
        ):
            return True
        queue += node.all_input_nodes
    return False


def _report(proof: Proof) -> Rewrite:
    """The rewrite's record; the stock form is what Inductor keeps: packed, history and the convolution."""
    packing = proof.history.packing
    x = tensor(packing.x)
    assert x is not None
    sizes = {
        "N": packing.requests,
        "L": packing.columns,
        "T": shape(packing.request)[0],
        "C": x.shape[-1],
        "K": shape(_weight(proof.conv))[2],
        "d": value(proof.dilation),
        "b": x.dtype.itemsize,
    }
    return Rewrite(
        name=NAME,
        node=proof.conv.name,
        source=source_line(proof.conv),
        memory=MemoryCertificate(
            before="N*C*(3*L + (K - 1)*d)*b + T*C*b",
            after="T*C*b",
            symbols={
                "N": "requests",
                "L": "tokens of the longest request",
                "T": "tokens in all",
                "C": "channels",
                "K": "taps",
                "d": "dilation",
                "b": "bytes an element",
            },
            known={name: size for name, size in sizes.items() if isinstance(size, int)},
        ),
    )
