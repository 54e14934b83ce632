"""Read a mask over a padded value as a condition on the request alone.

A mask says which elements of a padded value are kept. At the packed (request, column) of a token the column
lies inside its request, so a conjunct ``column < length[request]`` always holds there and falls away. What is
left must not depend on the column or the channel: a conjunction of vectors [N].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from ple_inductor.passes.axes import Axes, backward, broadcast, varies
from ple_inductor.passes.graph_edit import GraphEdit
from ple_inductor.passes.graph_facts import aten, describe, iota_length, is_op, same, shape, tensor
from ple_inductor.passes.ragged_index import RaggedIndex, is_lengths
from ple_inductor.passes.refusal import Refuse

# A vector [N] in some layout, and whether it is to be negated.
Conjunct = tuple[Node, bool]

_AND = (aten.bitwise_and, aten.logical_and)
_OR = (aten.bitwise_or, aten.logical_or)
_NOT = (aten.bitwise_not, aten.logical_not)


def request_conjuncts(
    mask: Node, axes: Axes, index: RaggedIndex, columns: object, *, keeps: bool, code: str
) -> tuple[Conjunct, ...]:
    """The vectors [N] whose conjunction says which requests ``mask`` keeps.

    Args:
        mask: Boolean node that broadcasts to a value with ``axes``.
        axes: Axes of the masked value.
        index: Evidence for the packed (request, column).
        columns: L, the length of the axis "l".
        keeps: Whether True in ``mask`` keeps the value; where False it is the opposite.
        code: The refusal's code.
    """
    origin, axes = backward(mask, broadcast(mask, axes))
    found = tensor(origin)
    if found is None or found.dtype is not torch.bool:
        raise Refuse(code, mask, "a boolean mask", describe(origin))
    if is_op(origin, *_NOT):
        return _operand(origin, 0, axes, index, columns, not keeps, code)
    requests = shape(index.query_start_loc)[0] - 1
    if varies(axes) <= {"n"} and same(found.numel(), requests):
        return ((origin, not keeps),)
    if is_op(origin, *(_AND if keeps else _OR)):
        return _operand(origin, 0, axes, index, columns, keeps, code) + _operand(
            origin, 1, axes, index, columns, keeps, code
        )
    if _cuts_request_end(origin, axes, index, columns, keeps):
        return ()
    raise Refuse(code, origin, "a condition on the request, or column < length[request]", describe(origin))


def emit_conjunction(edit: GraphEdit, conjuncts: Sequence[Conjunct]) -> Node | None:
    """A node [N] for the conjunction, at the graph's insertion point; None where it is always true."""
    result: Node | None = None
    for node, negated in dict.fromkeys(conjuncts):
        vector = node if len(shape(node)) == 1 else edit.call(aten.reshape.default, node, [-1])
        if negated:
            vector = edit.call(aten.bitwise_not.default, vector)
        result = vector if result is None else edit.call(aten.bitwise_and.Tensor, result, vector)
    return result


def _operand(
    node: Node, position: int, axes: Axes, index: RaggedIndex, columns: object, keeps: bool, code: str
) -> tuple[Conjunct, ...]:
    operand = node.args[position]
    if not isinstance(operand, Node):
        raise Refuse(code, node, "a mask made of tensors", describe(operand))
    return request_conjuncts(operand, axes, index, columns, keeps=keeps, code=code)


def _cuts_request_end(node: Node, axes: Axes, index: RaggedIndex, columns: object, keeps: bool) -> bool:
    """Whether ``node`` is ``arange(L) < lengths``, in either order and polarity."""
    if is_op(node, aten.lt if keeps else aten.ge):
        column, length = node.args[:2]
    elif is_op(node, aten.gt if keeps else aten.le):
        length, column = node.args[:2]
    else:
        return False
    if not isinstance(column, Node) or not isinstance(length, Node):
        return False
    column, column_axes = backward(column, broadcast(column, axes))
    length, length_axes = backward(length, broadcast(length, axes))
    extent = iota_length(column)
    return (
        varies(column_axes) <= {"l"}
        and extent is not None
        and same(extent, columns)
        and varies(length_axes) <= {"n"}
        and is_lengths(length, index)
    )
