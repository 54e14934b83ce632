"""Prove which rows of the ragged tensor the index tensors ``(request, column)`` stand for.

Two tensors of T integers say where token t is put in the padded buffer, and from where it is taken back. The
proven kind is built from one vector of request bounds, ``query_start_loc`` q [N + 1]:

    request = searchsorted(q[1:], arange(T), right=True)        column = arange(T) - q[request]

so that the token ``i`` columns before token t in the same request is token ``t - i``. Index tensors that are
inputs of the graph would be another kind: one more function beside `query_start_loc_index`, and one more
alternative in `prove_index`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ple_inductor.passes.axes import backward
from ple_inductor.passes.graph_facts import (
    argument,
    aten,
    describe,
    iota_length,
    is_op,
    same,
    shape,
    tensor,
    without_int_cast,
)
from ple_inductor.passes.refusal import Refuse


@dataclass(frozen=True)
class RaggedIndex:
    """Evidence that ``(request, column)`` walk the ragged rows in order.

    Args:
        query_start_loc: The node of the request bounds, [N + 1].
    """

    query_start_loc: Node


def prove_index(request: object, column: object, tokens: object, user: Node, code: str) -> RaggedIndex:
    """The evidence for the pair of index tensors that ``user`` indexes with, or a refusal with ``code``."""
    if not isinstance(request, Node) or not isinstance(column, Node):
        raise Refuse(code, user, "two index tensors [T]", f"{request!r}, {column!r}")
    return query_start_loc_index(request, column, tokens, user, code)


def query_start_loc_index(request: Node, column: Node, tokens: object, user: Node, code: str) -> RaggedIndex:
    """The proven kind: both come from one ``query_start_loc``."""
    request, column = without_int_cast(request), without_int_cast(column)
    bounds = _searched_bounds(request, tokens)
    if bounds is None:
        raise Refuse(
            code,
            user,
            "request = searchsorted(query_start_loc[1:], arange(T), right=True)",
            describe(request),
        )
    starts = _subtracted_starts(column, request, tokens)
    if starts is None:
        raise Refuse(code, user, "column = arange(T) - query_start_loc[request]", describe(column))
    if starts is not bounds:
        raise Refuse(
            code, user, f"request and column of one query_start_loc, {describe(bounds)}", describe(starts)
        )
    return RaggedIndex(bounds)


def is_lengths(node: Node, index: RaggedIndex) -> bool:
    """Whether ``node`` is the request lengths, ``q[1:] - q[:-1]``, of the same ``query_start_loc``."""
    node = without_int_cast(node)
    if not is_op(node, aten.sub) or node.kwargs.get("alpha", 1) != 1:
        return False
    ends, starts = (part(operand) for operand in node.args[:2])
    return ends == (index.query_start_loc, "ends") and starts == (index.query_start_loc, "starts")


def part(node: object) -> tuple[Node, str] | None:
    """The vector that ``node`` is taken from, and which part: all, starts ``[:-1]`` or ends ``[1:]``."""
    if not isinstance(node, Node) or tensor(node) is None or len(shape(node)) != 1:
        return None
    node = without_int_cast(node)
    if not is_op(node, aten.slice):
        return node, "all"
    whole = node.args[0]
    assert isinstance(whole, Node)
    start, step = argument(node, "start") or 0, argument(node, "step")
    if step != 1 or not same(shape(node)[0], shape(whole)[0] - 1) or start not in (0, 1):
        return node, "all"
    return without_int_cast(whole), "ends" if start == 1 else "starts"


def _searched_bounds(request: Node, tokens: object) -> Node | None:
    """``query_start_loc`` when ``request`` is searchsorted over its ends for every token."""
    if is_op(request, aten.searchsorted.Tensor):
        sorted_sequence, values = request.args[0], request.args[1]
        right = argument(request, "right") or argument(request, "side") == "right"
        if argument(request, "sorter") is not None or argument(request, "side") == "left":
            return None
    elif is_op(request, aten.bucketize.Tensor):
        values, sorted_sequence = request.args[0], request.args[1]
        right = argument(request, "right")
    else:
        return None
    found = part(sorted_sequence)
    if not right or found is None or found[1] != "ends" or not _is_positions(values, tokens):
        return None
    return found[0]


def _subtracted_starts(column: Node, request: Node, tokens: object) -> Node | None:
    """``query_start_loc`` when ``column`` is the token's number less its request's start."""
    if not is_op(column, aten.sub) or column.kwargs.get("alpha", 1) != 1:
        return None
    positions, starts = column.args[:2]
    if not _is_positions(positions, tokens) or not isinstance(starts, Node):
        return None
    starts = without_int_cast(starts)
    if is_op(starts, aten.index.Tensor):
        indices = starts.args[1]
        at = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    elif is_op(starts, aten.index_select):
        at = starts.args[2]
    else:
        return None
    if not isinstance(at, Node) or without_int_cast(at) is not request:
        return None
    found = part(starts.args[0])
    return found[0] if found is not None and found[1] in ("all", "starts") else None


def _is_positions(node: object, tokens: object) -> bool:
    """Whether ``node`` is 0, 1, ..., T - 1."""
    if not isinstance(node, Node):
        return False
    origin, _ = backward(without_int_cast(node), ("t",))
    length = iota_length(without_int_cast(origin))
    return length is not None and same(length, tokens)
