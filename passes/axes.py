"""Follow a tensor through changes of layout, with a name on each of its axes.

An axis name is one letter: n request, l column of the padded buffer, c channel, j column of history, s column
of state, w column of a state row, p slot of the pool. ``UNIT`` names an axis of size 1 that carries no index.
Changes of layout are clones, permutations, views that add or drop unit axes, and expansions that change
nothing. They move values and never change them.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from ple_inductor.passes.graph_facts import argument, aten, is_op, same, shape, tensor

UNIT = "1"
Axes = tuple[str, ...]

_COPIES = (aten.clone, aten.alias, aten.contiguous, aten.lift_fresh_copy)
# ``view`` also has an overload that reads the same bytes as another dtype: that one changes values.
_RESHAPES = (aten.reshape, aten.view.default, aten._unsafe_view, aten.unsqueeze, aten.squeeze)


def is_layout(node: object) -> bool:
    """Whether ``node`` only changes the layout of its first operand."""
    return is_op(node, *_COPIES, *_RESHAPES, aten.permute, aten.transpose, aten.t, aten.expand)


def forward(node: Node, axes: Axes) -> Axes | None:
    """The axes of ``node``'s result, given those of its operand; None where they mix."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    if is_op(node, *_COPIES):
        return axes
    order = permutation(node)
    if order is not None:
        return tuple(axes[dim] for dim in order)
    if is_op(node, aten.expand):
        return (UNIT,) * (len(shape(node)) - len(axes)) + axes
    if is_op(node, *_RESHAPES):
        return _align(shape(operand), shape(node), axes)
    return None


def backward(node: Node, axes: Axes) -> tuple[Node, Axes]:
    """The origin of ``node`` behind every change of layout, and the origin's axes.

    Stops, with what was reached, at the first operator that is not a change of layout or whose axes mix.
    """
    while is_layout(node) and (before := _step_back(node, axes)) is not None:
        node, axes = before
    return node, axes


def behind_transpositions(node: Node, axes: Axes) -> tuple[Node, Axes]:
    """What ``node`` is a transposed view of: the same memory, unlike behind a clone."""
    while permutation(node) is not None and (before := _step_back(node, axes)) is not None:
        node, axes = before
    return node, axes


def _step_back(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    operand = node.args[0]
    assert isinstance(operand, Node)
    if is_op(node, *_COPIES):
        return operand, axes
    if (order := permutation(node)) is not None:
        return operand, tuple(axes[order.index(dim)] for dim in range(len(order)))
    if is_op(node, aten.expand):
        return operand, broadcast(operand, axes)
    before = _align(shape(node), shape(operand), axes)
    return None if before is None else (operand, before)


def permutation(node: Node) -> list[int] | None:
    """For each axis of the result the operand's axis, or None where ``node`` is no permutation."""
    if node.op != "call_function" or not node.args or tensor(node.args[0]) is None:
        return None
    operand = node.args[0]
    assert isinstance(operand, Node)
    rank = len(shape(operand))
    if is_op(node, aten.permute):
        return [dim % rank for dim in argument(node, "dims")]
    if is_op(node, aten.t):
        return list(reversed(range(rank)))
    if is_op(node, aten.transpose):
        first, second = (argument(node, name) % rank for name in ("dim0", "dim1"))
        order = list(range(rank))
        order[first], order[second] = order[second], order[first]
        return order
    return None


def filled_with(node: object) -> object | None:
    """The number that fills ``node`` everywhere, behind changes of layout; None where it varies."""
    while is_layout(node):
        assert isinstance(node, Node)
        node = node.args[0]
    if isinstance(node, int | float):
        return node
    if is_op(node, aten.full, aten.full_like):
        return argument(node, "fill_value")  # type: ignore[arg-type]
    return 0 if is_op(node, aten.zeros, aten.zeros_like, aten.new_zeros) else None


def is_zero(node: object) -> bool:
    """Whether ``node`` is +0 everywhere."""
    filling = filled_with(node)
    return isinstance(filling, int | float) and filling == 0 and math.copysign(1, filling) > 0


def broadcast(node: Node, axes: Axes) -> Axes:
    """The axes of an operand that broadcasts to a result with ``axes``: unit where it does not vary."""
    sizes = shape(node)
    tail = axes[len(axes) - len(sizes) :]
    return tuple(UNIT if same(size, 1) else axis for size, axis in zip(sizes, tail, strict=True))


def varies(axes: Axes) -> set[str]:
    """The named axes among ``axes``."""
    return set(axes) - {UNIT}


def _align(old: tuple[Any, ...], new: tuple[Any, ...], axes: Axes) -> Axes | None:
    """Axes of ``new`` when it differs from ``old`` by unit axes only."""
    result: list[str] = []
    position = 0
    for size in new:
        while position < len(old) and not same(size, old[position]) and same(old[position], 1):
            position += 1
        if position < len(old) and same(size, old[position]):
            result.append(axes[position])
            position += 1
        elif same(size, 1):
            result.append(UNIT)
        else:
            return None
    rest = old[position:]
    return tuple(result) if all(same(size, 1) for size in rest) else None
