"""Inductor IR of ``varlen_short_conv`` for CPU: a *main* kernel over all rows, and a *patch* into its output.

The main kernel knows neither states nor where a request starts: it takes the tap ``back`` tokens ago from row
``t - back``. That is wrong only in the first S rows of a request. The patch computes those anew, in place,
with every condition. States and conditions of each tap in the main kernel would double its time.

May be changed: how the rows to patch are found, how dead rows are told. Must hold: x is read where it is,
never copied; the sum is rounded to x's dtype before the activation; sizes stay symbolic (K alone is
specialised), and T or N may turn out to be 0 in the compiled code.

Dimension key: T tokens, N requests, C channels, K taps, S = (K - 1) * dilation state length, W >= S state
width, R = min(N * S, T) patched rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import fallback_handler, full
from torch._inductor.virtualized import V, ops
from torch.utils._sympy import functions

Index = Sequence[Any]
Loader = Callable[[Index], Any]

Min: Any = functions.Min  # torch leaves these without annotations
Max: Any = functions.Max
search_sorted: Any = fallback_handler(torch.ops.aten.searchsorted.Tensor, False)  # type: ignore[no-untyped-call]


def lower(
    x_TC: TensorBox,
    weight_CK: TensorBox,
    query_start_loc: TensorBox,
    conv_state: TensorBox | None,
    state_indices: TensorBox | None,
    has_initial_state: TensorBox | None,
    valid: TensorBox | None,
    dilation: Any,
    activation: str,
) -> TensorBox:
    """The arguments of the operator, as Inductor hands them to a lowering."""
    device = x_TC.get_device_or_error()
    T, C = x_TC.get_size()
    N = query_start_loc.get_size()[0] - 1
    if _known_zero(N) or _known_zero(T):
        return full([T, C], 0, dtype=x_TC.get_dtype(), device=device)
    if conv_state is not None and _known_zero(conv_state.get_size()[0]):
        conv_state = None
    for operand in (x_TC, query_start_loc, state_indices, has_initial_state, valid):
        # Each is read many times: a lazy one would be computed as often.
        if operand is not None:
            operand.realize()

    K = V.graph.sizevars.guard_int(weight_CK.get_size()[1])
    load_weight = weight_CK.make_loader()
    # Strided reads of the weight in the inner loop would cost ten times the convolution.
    weight_KC = _buffer(device, torch.float32, [K, C], lambda at: _float(load_weight([at[1], at[0]])))
    load_bound = _as_int64(query_start_loc)
    conv = _Conv(
        device=device,
        dtype=x_TC.get_dtype(),
        T=T,
        N=N,
        C=C,
        K=K,
        dilation=sympy.sympify(dilation),
        silu=activation == "silu",
        load_x=x_TC.make_loader(),
        load_weight_KC=weight_KC.make_loader(),
        load_bound=load_bound,
        ends_N=_buffer(device, torch.int64, [N], lambda at: load_bound([at[0] + 1])),
        load_valid=None if valid is None else valid.make_loader(),
    )
    out_TC = _main(conv)
    if K > 1:
        _patch(conv, out_TC, _States.of(conv_state, state_indices, has_initial_state))
    return out_TC


@dataclass(frozen=True)
class _Conv:
    """What both kernels need: sizes, options, and loaders of the operands."""

    device: torch.device
    dtype: torch.dtype
    T: Any
    N: Any
    C: Any
    K: int
    dilation: Any
    silu: bool
    load_x: Loader
    load_weight_KC: Loader
    load_bound: Loader
    ends_N: TensorBox
    load_valid: Loader | None

    @property
    def S(self) -> Any:
        return (self.K - 1) * self.dilation

    def value(self, tap: Callable[[int, Any], Any], c: Any) -> Any:
        """The activated sum at channel ``c``; ``tap(k, back)``: the history ``back`` tokens ago, fp32."""
        total = None
        for k in range(self.K):
            term = ops.mul(tap(k, (self.K - 1 - k) * self.dilation), self.load_weight_KC([k, c]))
            total = term if total is None else ops.add(total, term)
        y = _rounded(total, self.dtype)
        if self.silu:
            y = ops.truediv(y, ops.add(ops.constant(1.0, torch.float32), ops.exp(ops.neg(y))))
        return y

    def requests_of(self, rows: TensorBox) -> Loader:
        """The request of each of ``rows``, an int64 vector; N for a row that no request owns."""
        return _as_int64(search_sorted(self.ends_N, rows, right=True, out_int32=True))

    def owned(self, request: Any) -> tuple[Any, Any]:
        """Whether there is such a request, and its number as an index that is legal in any case."""
        return ops.lt(request, ops.index_expr(self.N, torch.int64)), _clamped(request, self.N)


@dataclass(frozen=True)
class _States:
    """Loaders of the pool and of what says which slot counts."""

    slots: Any
    dtype: torch.dtype
    load: Loader
    load_slot: Loader
    load_has_initial: Loader | None

    @staticmethod
    def of(
        conv_state: TensorBox | None,
        state_indices: TensorBox | None,
        has_initial_state: TensorBox | None,
    ) -> _States | None:
        if conv_state is None or state_indices is None:
            return None
        return _States(
            slots=conv_state.get_size()[0],
            dtype=conv_state.get_dtype(),
            load=conv_state.make_loader(),
            load_slot=_as_int64(state_indices),
            load_has_initial=None if has_initial_state is None else has_initial_state.make_loader(),
        )

    def column(self, n: Any, c: Any, j: Any, dtype: torch.dtype) -> Any:
        """Column ``j`` of request ``n``'s initial state, rounded to ``dtype``, in fp32; 0 if it has none."""
        slot = self.load_slot([n])
        initial = ops.logical_and(
            ops.ge(slot, ops.constant(0, torch.int64)),
            ops.lt(slot, ops.index_expr(self.slots, torch.int64)),
        )
        if self.load_has_initial is not None:
            initial = ops.logical_and(initial, self.load_has_initial([n]))
        legal_slot = _clamped(slot, self.slots)

        def load() -> Any:
            return _rounded(_float(self.load([legal_slot, c, j])), dtype)

        # A masked load is slow, but a pool without slots has not one that could be read in vain.
        if V.graph.sizevars.statically_known_gt(self.slots, 0):
            return ops.where(initial, load(), ops.constant(0.0, torch.float32))
        return ops.masked(initial, load, 0.0)


def _main(conv: _Conv) -> TensorBox:
    """All rows [T, C], right but for the first S rows of each request."""
    load_live = _live_rows(conv)

    def inner(at: Index) -> Any:
        t, c = at
        y = conv.value(lambda _, back: _float(conv.load_x([Max(sympy.S.Zero, t - back), c])), c)
        return ops.where(load_live(t), y, ops.constant(0.0, torch.float32))

    return _buffer(conv.device, conv.dtype, [conv.T, conv.C], inner)


def _live_rows(conv: _Conv) -> Callable[[Any], Any]:
    """Tells for row ``t`` whether a valid request owns it."""
    if conv.load_valid is None:
        return lambda t: ops.lt(ops.index_expr(t, torch.int64), conv.load_bound([conv.N]))
    load_valid = conv.load_valid
    rows_T = _buffer(conv.device, torch.int64, [conv.T], lambda at: ops.index_expr(at[0], torch.int64))
    load_request = conv.requests_of(rows_T)

    def inner(at: Index) -> Any:
        owned, n = conv.owned(load_request(at))
        return ops.masked(owned, lambda: load_valid([n]), False)

    # A buffer of T bytes: the search would keep the main kernel from being vectorized.
    load_live = _buffer(conv.device, torch.bool, [conv.T], inner).make_loader()
    return lambda t: load_live([t])


def _patch(conv: _Conv, out_TC: TensorBox, states: _States | None) -> None:
    """Compute the first S rows of each request once more, in place.

    A place in the list that has no row of its own (a request shorter than S) holds some other row: that is
    computed as completely, so whichever of two equal values is stored last is the right one.
    """
    rows_R = _patched_rows(conv)
    load_row = rows_R.make_loader()
    load_request = conv.requests_of(rows_R)

    def inner(at: Index) -> Any:
        i, c = at
        row = load_row([i])
        live, n = conv.owned(load_request([i]))
        if conv.load_valid is not None:
            live = ops.logical_and(live, conv.load_valid([n]))
        col = ops.sub(row, conv.load_bound([n]))

        def tap(k: int, back: Any) -> Any:
            steps = ops.index_expr(back, torch.int64)
            token = _float(conv.load_x([_clamped(ops.sub(row, steps), conv.T), c]))
            if back == 0:
                return token
            old = ops.constant(0.0, torch.float32)
            if states is not None:
                j = ops.add(col, ops.index_expr(k * conv.dilation, torch.int64))
                old = states.column(n, c, _clamped(j, conv.S), conv.dtype)
            return ops.where(ops.ge(col, steps), token, old)

        return ops.where(live, conv.value(tap, c), ops.constant(0.0, torch.float32))

    scatter = ir.Scatter(
        device=conv.device,
        dtype=conv.dtype,
        inner_fn=inner,
        ranges=[Min(conv.N * conv.S, conv.T), conv.C],
        output_indexer=lambda at: [_index(load_row([at[0]]), conv.T), at[1]],
        scatter_mode=None,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(out_TC), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)


def _patched_rows(conv: _Conv) -> TensorBox:
    """The rows to patch, int64 [R]: S for each request, or simply all T where those are fewer."""

    def inner(at: Index) -> Any:
        (i,) = at
        start = conv.load_bound([functions.FloorDiv(i, conv.S)])
        row = ops.add(start, ops.index_expr(functions.Mod(i, conv.S), torch.int64))
        inside = ops.minimum(row, ops.index_expr(conv.T - 1, torch.int64))
        all_rows = ops.ge(ops.index_expr(conv.N * conv.S, torch.int64), ops.index_expr(conv.T, torch.int64))
        return ops.where(all_rows, ops.index_expr(i, torch.int64), inside)

    return _buffer(conv.device, torch.int64, [Min(conv.N * conv.S, conv.T)], inner)


def _buffer(device: torch.device, dtype: torch.dtype, sizes: Index, inner_fn: Loader) -> TensorBox:
    """A contiguous buffer of its own."""
    ranges = [sympy.sympify(size) for size in sizes]
    result = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner_fn, ranges=ranges)
    result.realize()
    # Left flexible, the layout would follow the operands' strides.
    result.freeze_layout()
    return result


def _index(value: Any, size: Any) -> Any:
    return ops.indirect_indexing(value, size, check=False, wrap_neg=False)


def _clamped(value: Any, size: Any) -> Any:
    """A computed index made legal; what is loaded with a changed one is not used."""
    last = ops.index_expr(size - 1, torch.int64)
    return _index(ops.minimum(ops.maximum(value, ops.constant(0, torch.int64)), last), size)


def _as_int64(vector: TensorBox) -> Loader:
    load = vector.make_loader()
    return lambda at: ops.to_dtype(load(at), torch.int64)


def _float(value: Any) -> Any:
    return ops.to_dtype(value, torch.float32)


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """An fp32 value rounded to ``dtype``, in fp32 again; plain conversions there and back would be elided."""
    if dtype == torch.float32:
        return value
    low = ops.to_dtype(value, dtype, src_dtype=torch.float32, use_compute_types=False)
    return ops.to_dtype(low, torch.float32, src_dtype=dtype)


def _known_zero(size: Any) -> bool:
    return V.graph.sizevars.statically_known_equals(size, 0)
