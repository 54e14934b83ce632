"""Prove what a depthwise convolution reads: ``cat([initial state, packed tokens], dim=length)``.

The walk goes back from the convolution's input through changes of layout only. Packed tokens are zeros with
the row of token t put at ``(request[t], column[t])``.

Dimension key: N requests, L columns of the padded buffer, T tokens, C channels, S = (K - 1) * d state length.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ple_inductor.passes.axes import Axes, backward, filled_with, is_zero
from ple_inductor.passes.graph_facts import (
    argument,
    aten,
    describe,
    is_op,
    prims,
    same,
    shape,
)
from ple_inductor.passes.ragged_index import RaggedIndex, prove_index
from ple_inductor.passes.refusal import Refuse

_WRITES = (
    aten.index_put,
    aten.index_copy,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.slice_scatter,
    aten.select_scatter,
    aten.diagonal_scatter,
    aten.as_strided_scatter,
    aten.masked_scatter,
    aten.copy,
)


@dataclass(frozen=True)
class Packing:
    """Evidence for the packed tokens.

    Args:
        node: The ``index_put``, [N, L, C] in some order.
        axes: Its axes: "n", "l" and "c".
        x: The ragged rows, [T, C]; [C] where T is 1.
        request: Index tensor [T].
        column: Index tensor [T].
        index: What the two stand for.
        requests: N.
        columns: L.
    """

    node: Node
    axes: Axes
    x: Node
    request: Node
    column: Node
    index: RaggedIndex
    requests: object
    columns: object


@dataclass(frozen=True)
class History:
    """Evidence for the convolution's input.

    Args:
        node: The ``cat``, or the packed tokens themselves where S is 0.
        axes: Its axes; "j" is the column of history.
        initial_state: The first S columns, with ``state_axes``; None where S is 0.
        state_axes: Axes of ``initial_state``: "n", "c" and "s".
        state_length: S.
        packing: The rest.
    """

    node: Node
    axes: Axes
    initial_state: Node | None
    state_axes: Axes
    state_length: object
    packing: Packing


def prove_history(conv: Node, state_length: object) -> History:
    """The evidence for ``conv``'s input, where ``state_length`` is (K - 1) * dilation; or a refusal."""
    conv_input = conv.args[0]
    assert isinstance(conv_input, Node)
    node, axes = backward(conv_input, ("n", "c", "j"))
    if not is_op(node, aten.cat):
        if not same(state_length, 0):
            _refuse_what_stands_before(node)
            raise Refuse("history_form", node, "cat([initial state, packed tokens])", describe(node))
        packed_axes = tuple("l" if axis == "j" else axis for axis in axes)
        return History(node, axes, None, (), 0, prove_packing(node, packed_axes))
    parts = argument(node, "tensors")
    dim = argument(node, "dim") % len(axes)
    if axes[dim] != "j":
        raise Refuse(
            "history_dim",
            node,
            f"cat along the convolution's length, dim {axes.index('j')}",
            f"cat along dim {dim}",
        )
    if len(parts) != 2:
        raise Refuse("history_form", node, "two parts, state and tokens", f"{len(parts)} parts")
    state, tokens = parts
    if _reaches_packing(state) and not _reaches_packing(tokens):
        raise Refuse("history_order", node, "state before tokens", "tokens before state")
    state_axes = tuple("s" if axis == "j" else axis for axis in axes)
    packed_axes = tuple("l" if axis == "j" else axis for axis in axes)
    found = shape(state)[dim]
    if not same(found, state_length):
        raise Refuse("state_length", node, f"(K - 1) * dilation = {state_length} columns", f"{found} columns")
    packing = prove_packing(tokens, packed_axes)
    return History(node, axes, state, state_axes, state_length, packing)


def prove_packing(node: Node, axes: Axes) -> Packing:
    """The evidence that ``node`` is tokens packed into zeros; or a refusal."""
    node, axes = backward(node, axes)
    _refuse_what_stands_before(node)
    if not is_op(node, aten.index_put.default):
        raise Refuse("pack_form", node, "index_put into zeros", describe(node))
    if argument(node, "accumulate"):
        raise Refuse("pack_form", node, "index_put without accumulation", "accumulate=True")
    base, x = node.args[0], node.args[2]
    assert isinstance(base, Node)
    assert isinstance(x, Node)
    if _is_packing(base):
        raise Refuse("packed_written", node, "one index_put into zeros", f"a second one, on {describe(base)}")
    if not is_zero(base):
        raise Refuse("pack_fill", node, "zeros", _fill(base))
    request, column, other = _put_indices(node, axes)
    channel = axes.index("c")
    tokens = shape(request)[0]
    # A single token may come as a vector [C].
    rows = (1, *shape(x)) if len(shape(x)) == 1 else shape(x)
    if len(rows) != 2 or not same(rows[0], tokens) or not same(rows[1], shape(node)[channel]):
        raise Refuse("pack_form", node, f"one row [C] a token, [{tokens}, C]", describe(x))
    if other not in (channel, None):
        raise Refuse("pack_form", node, "an index over requests and columns only", describe(node))
    index = prove_index(request, column, tokens, node, "pack_index")
    sizes = dict(zip(axes, shape(node), strict=True))
    bounds = shape(index.query_start_loc)[0]
    if not same(sizes["n"] + 1, bounds):
        raise Refuse("pack_index", node, f"one row a request, {bounds} - 1", f"{sizes['n']} rows")
    return Packing(node, axes, x, request, column, index, sizes["n"], sizes["l"])


def _put_indices(node: Node, axes: Axes) -> tuple[Node, Node, int | None]:
    """(request, column, the axis without an index) of an ``index_put`` or ``index`` over ``axes``."""
    given = list(node.args[1])  # type: ignore[arg-type]
    given += [None] * (len(axes) - len(given))
    at = {axis: index for axis, index in zip(axes, given, strict=True) if index is not None}
    if set(at) != {"n", "l"}:
        raise Refuse(
            "pack_axes",
            node,
            "indices over the requests and over the axis along which the convolution runs",
            "indices over " + (" and ".join(_AXIS_NAMES[axis] for axis in at) or "nothing"),
        )
    free = [dim for dim, index in enumerate(given) if index is None]
    return at["n"], at["l"], free[0] if len(free) == 1 else None


_AXIS_NAMES = {"n": "requests", "l": "columns", "c": "channels"}


def _is_packing(node: object) -> bool:
    return is_op(node, aten.index_put) and isinstance(node, Node) and filled_with(node.args[0]) is not None


def _reaches_packing(node: object) -> bool:
    """Whether ``node`` is packed tokens behind changes of layout."""
    return isinstance(node, Node) and _is_packing(backward(node, ("",) * len(shape(node)))[0])


def _refuse_what_stands_before(node: Node) -> None:
    """Refuse, with a code of its own, an operator that changes packed tokens before the convolution."""
    if is_op(node, *_WRITES) and not is_op(node, aten.index_put):
        raise Refuse("packed_written", node, "packed tokens as index_put left them", describe(node))
    if node.op == "call_function" and not is_op(node, aten.index_put, aten.cat, aten.full, aten.index):
        if is_op(node, prims.convert_element_type) and _reaches_packing(node.args[0]):
            raise Refuse("dtype_chain", node, "packed tokens in their own dtype", describe(node))
        raise Refuse("op_before_conv", node, "packed tokens as index_put left them", describe(node))


def _fill(base: Node) -> str:
    filling = filled_with(base)
    return describe(base) if filling is None else f"a buffer filled with {filling}"
