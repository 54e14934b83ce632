"""Prove that the new state goes back into the pool, at the slots of the requests and nowhere else.

    new = history[length : length + S]                                  the last S columns of each request
    pool[slot] = where(update, new, pool[slot])                         functional: index_put, then copy_

With a pool wider than S the first S columns of the old row are replaced by a ``slice_scatter`` first. The
functional graph ends in ``copy_`` into the graph input; the in-place operator takes its place at the end of
the graph, so nothing else may read the new pool.

Dimension key: N requests, C channels, S state columns, W columns of a state row, p slots of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ple_inductor.passes.axes import Axes, backward, broadcast, forward, is_layout, is_zero, varies
from ple_inductor.passes.graph_facts import (
    argument,
    aten,
    describe,
    iota_length,
    is_op,
    prims,
    same,
    same_sizes,
    shape,
    tensor,
    without_int_cast,
)
from ple_inductor.passes.initial_state import InitialState, StateRows, indexed_slots, pool_behind, state_rows
from ple_inductor.passes.packed_history import History
from ple_inductor.passes.ragged_index import is_lengths
from ple_inductor.passes.refusal import Refuse
from ple_inductor.passes.request_mask import Conjunct, request_conjuncts


@dataclass(frozen=True)
class WriteBack:
    """Evidence for the new state.

    Args:
        rows: The pool and the slots that are written.
        update: Conjunction of [N] that says which requests are written; all where it is empty.
        copy: The ``copy_`` into the graph input.
        state_length: S, a number or the node that holds it.
    """

    rows: StateRows
    update: tuple[Conjunct, ...]
    copy: Node
    state_length: object


def prove_write_back(gather: Node, axes: Axes, history: History, initial: InitialState) -> WriteBack:
    """The evidence that ``gather``, over history with ``axes``, ends in the pool of ``initial``."""
    read = initial.rows
    state_length = _prove_last_columns(gather, axes, history)
    node: Node = gather
    axes = tuple("s" if axis == "j" else axis for axis in axes)
    update: tuple[Conjunct, ...] = ()
    while not is_op(node, aten.index_put.default):
        node, axes, found = _step(node, axes, history, read)
        update += found
    pool, source = node.args[0], node.args[2]
    assert isinstance(pool, Node)
    assert isinstance(source, Node)
    if "n" not in axes and same(history.packing.requests, 1):
        axes = ("n", *axes)  # a single row may come without its unit axis
    slots = indexed_slots(node)
    if read is None or argument(node, "accumulate") or slots is not read.slots or axes[0] != "n":
        raise Refuse("state_write_form", node, "index_put at the slots that were read", describe(node))
    if pool_behind(pool, axes) != (read.pool, read.pool_axes):
        raise Refuse("state_mutated", node, f"the pool that was read, {describe(read.pool)}", describe(pool))
    if len(shape(source)) < 2 or not all(map(same, shape(node)[1:], shape(source)[-2:])):
        raise Refuse("state_write_form", node, "rows as wide as the pool's", describe(source))
    _prove_empty_requests_keep_state(node, update, history, read, initial)
    return WriteBack(read, update, _prove_copy(node, read, axes), state_length)


def _prove_empty_requests_keep_state(
    put: Node, update: tuple[Conjunct, ...], history: History, read: StateRows, initial: InitialState
) -> None:
    """A request without tokens is not updated, or with its own state, unmasked and unrounded."""
    x, pool = tensor(history.packing.x), tensor(read.pool)
    assert x is not None
    assert pool is not None
    own_state = not initial.has_initial_state and x.dtype is pool.dtype
    if not own_state and not any(_needs_tokens(node, history) for node, negated in update if not negated):
        raise Refuse("state_of_empty", put, "where(length > 0 and ..., new state, old state)", "no such mask")


def _needs_tokens(mask: object, history: History) -> bool:
    """Whether ``mask`` is only True where a request's length is above 0."""
    if not isinstance(mask, Node):
        return False
    if is_op(mask, aten.bitwise_and, aten.logical_and) or is_layout(mask):
        return any(_needs_tokens(operand, history) for operand in mask.all_input_nodes)
    for compared, least in ((aten.gt, 0), (aten.ge, 1), (aten.ne, 0)):
        if is_op(mask, compared):
            length, bound = mask.args[:2]
            if not isinstance(length, Node) or not isinstance(bound, int) or bound != least:
                return False
            return is_lengths(length, history.packing.index)
    return False


def _prove_last_columns(gather: Node, axes: Axes, history: History) -> object:
    """S, where ``gather`` reads column ``length[n] + s`` of history for s = 0 ... S - 1."""
    expected = "gather(history, length axis, length[request] + arange(S))"
    dim = argument(gather, "dim") % len(axes)
    index_node = argument(gather, "index")
    if axes[dim] != "j" or argument(gather, "sparse_grad"):
        raise Refuse("state_gather", gather, expected, describe(gather))
    sizes = dict(zip(axes, shape(gather), strict=True))
    whole = dict(zip(axes, shape(history.node), strict=True))
    if not same(sizes["j"], history.state_length) or not all(same(sizes[a], whole[a]) for a in "nc"):
        raise Refuse(
            "state_gather", gather, f"S = {history.state_length} columns of every channel", str(sizes)
        )
    node, index_axes = backward(index_node, broadcast(index_node, axes))
    node = without_int_cast(node)
    if is_op(node, aten.add) and node.kwargs.get("alpha", 1) == 1:
        terms = list(node.args[:2])
    elif same(history.state_length, 1):
        terms = [node]
    else:
        raise Refuse("state_gather", node, "length[request] + arange(S)", describe(node))
    lengths, offsets = [], []
    for term in terms:
        if not isinstance(term, Node):
            raise Refuse("state_gather", node, "length[request] + arange(S)", describe(term))
        origin, origin_axes = backward(term, broadcast(term, index_axes))
        origin = without_int_cast(origin)
        extent = iota_length(origin)
        if varies(origin_axes) <= {"n"} and is_lengths(origin, history.packing.index):
            lengths.append(origin)
        elif varies(origin_axes) <= {"j"} and extent is not None and same(extent, history.state_length):
            offsets.append(extent)
        elif not (is_zero(origin) and same(history.state_length, 1)):
            raise Refuse("state_gather", origin, "length[request] or arange(S)", describe(origin))
    if len(lengths) != 1 or (len(offsets) != 1 and not same(history.state_length, 1)):
        raise Refuse("state_gather", node, "length[request] + arange(S)", describe(node))
    return offsets[0] if offsets else 1


def _step(
    node: Node, axes: Axes, history: History, read: StateRows | None
) -> tuple[Node, Axes, tuple[Conjunct, ...]]:
    """The one user of ``node`` on the way into the pool, its axes, and the mask it puts on."""
    expected = "one reader on the way into the pool"
    if len(node.users) != 1 or read is None:
        found = ", ".join(describe(user) for user in node.users) or "none"
        raise Refuse("state_write_form", node, expected, found if read else "a history without a state pool")
    (user,) = node.users
    pool_dtype = tensor(read.pool).dtype  # type: ignore[union-attr]
    if is_layout(user):
        after = forward(user, axes)
        if after is not None:
            return user, after, ()
    elif is_op(user, prims.convert_element_type):
        if tensor(user).dtype is pool_dtype:  # type: ignore[union-attr]
            return user, axes, ()
        raise Refuse("dtype_chain", user, f"the new state rounded to {pool_dtype}", describe(user))
    elif is_op(user, aten.copy) and user.args[1] is node and tensor(user).dtype is pool_dtype:  # type: ignore[union-attr]
        if same_sizes(user, node):
            return user, axes, ()
    elif is_op(user, aten.where.self):
        return user, axes, _update(user, node, axes, history, read)
    elif is_op(user, aten.slice_scatter) and user.args[1] is node:
        dim = argument(user, "dim") % len(axes)
        whole = user.args[0]
        assert isinstance(whole, Node)
        starts = (argument(user, "start") or 0) == 0 and argument(user, "step") == 1
        if axes[dim] == "s" and starts:
            _prove_old_rows(whole, axes, read)
            return user, axes, ()
    elif is_op(user, aten.index_put.default) and user.args[2] is node and tensor(node).dtype is pool_dtype:  # type: ignore[union-attr]
        return user, axes, ()
    raise Refuse(
        "state_write_form", user, "where, cast, slice_scatter or index_put into the pool", describe(user)
    )


def _update(node: Node, new: Node, axes: Axes, history: History, read: StateRows) -> tuple[Conjunct, ...]:
    """The requests that ``where(mask, new, old)`` updates, where ``old`` is the pool's own rows."""
    mask, kept, other = node.args
    assert isinstance(mask, Node)
    keeps = kept is new
    old = other if keeps else kept
    if not isinstance(old, Node) or mask is new or not same_sizes(node, new) or not same_sizes(old, new):
        raise Refuse("state_write_form", node, "where(update, new state, old state)", describe(node))
    _prove_old_rows(old, axes, read)
    packing = history.packing
    return request_conjuncts(mask, axes, packing.index, packing.columns, keeps=keeps, code="state_write_form")


def _prove_old_rows(node: Node, axes: Axes, read: StateRows) -> None:
    """``node`` is the rows that were read, or their first columns."""
    found = state_rows(node, axes, "state_write_form")
    if found.slots is read.slots and found != read:
        raise Refuse(
            "state_mutated", node, f"the pool that was read, {describe(read.pool)}", describe(found.pool)
        )
    if found != read:
        raise Refuse("state_write_form", node, "the pool's own rows where nothing is updated", describe(node))


def _prove_copy(put: Node, read: StateRows, row_axes: Axes) -> Node:
    """The ``copy_`` of ``put`` into the graph input that was read."""
    node, axes = put, tuple({"n": "p", "s": "w"}.get(axis, axis) for axis in row_axes)
    while True:
        others = [user for user in node.users if not is_layout(user) and not is_op(user, aten.copy_)]
        if others or len(node.users) != 1:
            found = ", ".join(describe(user) for user in others or node.users) or "no reader at all"
            raise Refuse("new_state_read", node, "no reader but copy_ into the pool", found)
        (user,) = node.users
        if is_op(user, aten.copy_):
            break
        after = forward(user, axes)
        if after is None:
            raise Refuse("new_state_read", user, "no reader but copy_ into the pool", describe(user))
        node, axes = user, after
    target = user.args[0]
    if target is not read.pool or read.pool.op != "placeholder" or axes != read.pool_axes or user.users:
        raise Refuse("state_pool", user, f"copy_ into the graph input {read.pool.name}", describe(target))
    return user
