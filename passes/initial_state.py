"""Prove where the initial state comes from: rows of a state pool, masked by request, or zeros.

    state = pool[slot][..., :S], rounded to the tokens' dtype          initial = where(has_initial, state, 0)

in any order of the slice, the rounding, the mask and changes of layout.

Dimension key: N requests, C channels, W columns of a state row, S of which are state, p slots of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ple_inductor.passes.axes import Axes, backward, behind_transpositions, is_zero
from ple_inductor.passes.graph_facts import (
    argument,
    aten,
    describe,
    is_op,
    prims,
    same_sizes,
    shape,
    tensor,
)
from ple_inductor.passes.packed_history import History
from ple_inductor.passes.refusal import Refuse
from ple_inductor.passes.request_mask import Conjunct, request_conjuncts


@dataclass(frozen=True)
class StateRows:
    """Evidence that a node is ``pool[slots]``, the state of each request.

    Args:
        pool: The pool, [slots, C, W] in the order of ``pool_axes``, behind any transposition in the graph.
        pool_axes: Its axes: "p", "c" and "w".
        slots: Index tensor [N].
    """

    pool: Node
    pool_axes: Axes
    slots: Node


@dataclass(frozen=True)
class InitialState:
    """Evidence for the first S columns of history.

    Args:
        rows: Where they are read; None where they are zeros.
        has_initial_state: Conjunction of [N] that says for which requests; zeros for the others.
    """

    rows: StateRows | None
    has_initial_state: tuple[Conjunct, ...] = ()


def prove_initial_state(history: History, dtype: torch.dtype) -> InitialState:
    """The evidence for ``history``'s initial state in the tokens' ``dtype``; or a refusal."""
    if history.initial_state is None:
        return InitialState(None)
    node, axes = history.initial_state, history.state_axes
    conjuncts: tuple[Conjunct, ...] = ()
    while True:
        node, axes = backward(node, axes)
        if is_zero(node):
            return InitialState(None)
        if is_op(node, aten.where.self):
            node, found = _masked(node, axes, history)
            conjuncts += found
        elif is_op(node, prims.convert_element_type):
            origin = node.args[0]
            pool_dtype = tensor(origin).dtype  # type: ignore[union-attr]
            if tensor(node).dtype is not dtype or not pool_dtype.is_floating_point:  # type: ignore[union-attr]
                raise Refuse("dtype_chain", node, f"the state rounded once, to {dtype}", describe(node))
            node, dtype = origin, pool_dtype  # type: ignore[assignment]
        else:
            break
    if tensor(node).dtype is not dtype:  # type: ignore[union-attr]
        raise Refuse("dtype_chain", node, f"state in {dtype}", describe(node))
    return InitialState(state_rows(node, axes, "initial_state_form"), conjuncts)


def state_rows(node: Node, axes: Axes, code: str) -> StateRows:
    """The evidence that ``node``, with ``axes`` "n", "c" and "s", is pool rows, or their first columns."""
    expected = "pool[slots], perhaps sliced to the first S columns"
    node, axes = backward(node, axes)
    if is_op(node, aten.slice):
        dim = argument(node, "dim") % len(axes)
        if axes[dim] != "s" or (argument(node, "start") or 0) != 0 or argument(node, "step") != 1:
            raise Refuse(code, node, expected, describe(node))
        assert isinstance(node.args[0], Node)
        node, axes = backward(node.args[0], axes)
    if not is_op(node, aten.index.Tensor, aten.index_select):
        raise Refuse(code, node, expected, describe(node))
    pool = node.args[0]
    assert isinstance(pool, Node)
    slots = indexed_slots(node)
    if slots is None or axes[0] != "n" or len(shape(slots)) != 1:
        raise Refuse(code, node, "one slot index [N] over the pool's first axis", describe(node))
    if sorted(axes) != ["c", "n", "s"]:
        raise Refuse(code, node, "a pool of slots, channels and columns", describe(pool))
    return StateRows(*pool_behind(pool, axes), slots)


def pool_behind(pool: Node, row_axes: Axes) -> tuple[Node, Axes]:
    """The pool behind transpositions, and its axes, given the axes of rows indexed out of it."""
    return behind_transpositions(pool, tuple({"n": "p", "s": "w"}.get(axis, axis) for axis in row_axes))


def indexed_slots(node: Node) -> Node | None:
    """The slot index of ``pool[slots]`` or of ``index_put`` into the pool; None for another index."""
    if is_op(node, aten.index_select):
        return node.args[2] if argument(node, "dim") == 0 else None  # type: ignore[return-value]
    indices = node.args[1]
    if not isinstance(indices, list | tuple) or len(indices) != 1:
        return None
    found = indices[0]
    return found if isinstance(found, Node) and tensor(found).dtype in (torch.int32, torch.int64) else None  # type: ignore[union-attr]


def _masked(node: Node, axes: Axes, history: History) -> tuple[Node, tuple[Conjunct, ...]]:
    """The value under ``where(mask, state, 0)``, and the requests that keep it."""
    mask, kept, other = node.args
    assert isinstance(mask, Node)
    keeps = is_zero(other)
    if not keeps and not is_zero(kept):
        raise Refuse("initial_state_form", node, "where(mask, state, 0)", describe(node))
    state = kept if keeps else other
    if not isinstance(state, Node) or not same_sizes(state, node):
        raise Refuse("initial_state_form", node, "a state as wide as the result", describe(state))
    conjuncts = request_conjuncts(
        mask,
        axes,
        history.packing.index,
        history.packing.columns,
        keeps=keeps,
        code="initial_state_form",
    )
    return state, conjuncts
