"""Triton kernels of the ragged short convolution and of its state write-back, CUDA and ROCm.

Imported only when a GPU tensor reaches an operator. Importing it resolves no driver: the tile is a fixed
choice, so there is nothing to autotune. The contracts, and the checks of what is passed here, are in
``varlen_short_conv.py`` and ``update_conv_state.py``; ``conv`` and ``update`` check nothing.

May be changed: tile sizes, warps, how a tile finds its requests. Must hold: taps oldest first in fp32,
rounding before the activation, selection instead of multiplication by a mask, 64-bit offsets, no store
outside the listed slots, and the write-back as a launch of its own (tiles of the same launch still read).

Dimension key: T tokens, N requests, C channels, K taps, D dilation, S = (K - 1) * D state length, W >= S
state width. ``i_*`` program ids, ``o_*`` offsets (int64), ``m_*`` masks, ``b_*`` loaded blocks.
"""

# Kernel arguments are of the compiler's types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A tile gives each of 128 threads 16 fp32 sums: with K = 4 under 120 registers on every target, where 32 sums
# take 200. Its rows are whole 128-byte lines in bf16. Its taps reach S tokens back, so it reads TILE + S rows
# for TILE: from the cache, because neighbouring programs hold neighbouring tokens.
TOKENS_PER_TILE = 32
CHANNELS_PER_TILE = 64
CHANNELS_PER_UPDATE = 256
WARPS = 4
# ROCm limits a grid axis to 2**32 threads, not blocks: the token tiles continue on the third axis.
TILES_PER_AXIS = 1 << 22

# A kernel compiled for the alignment of these would serve no access better, and be compiled twice.
_REQUESTS = ("query_start_loc", "state_indices", "has_initial_state")


def conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    query_start_loc: Tensor,
    conv_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    valid: Tensor | None,
    dilation: int,
    activation: str,
) -> Tensor:
    """The GPU implementation of ``ple_inductor::varlen_short_conv``; one launch.

    Index vectors other than ``state_indices`` are copied where they are strided. Tensors share one device.
    """
    T, C = x_TC.shape
    K = weight_CK.shape[1]
    N = query_start_loc.shape[0] - 1
    if N == 0:
        return x_TC.new_zeros(T, C)
    out_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    if out_TC.numel() == 0:
        return out_TC
    state = None if conv_state is None or state_indices is None or K == 1 else conv_state
    channels = min(CHANNELS_PER_TILE, triton.next_power_of_2(C))
    tiles = triton.cdiv(T, TOKENS_PER_TILE)
    grid = (min(tiles, TILES_PER_AXIS), triton.cdiv(C, channels), triton.cdiv(tiles, TILES_PER_AXIS))
    with torch.cuda.device_of(x_TC):
        varlen_short_conv_kernel[grid](
            out_TC,
            x_TC,
            weight_CK,
            query_start_loc.contiguous(),
            state,
            state_indices if state is not None else None,
            has_initial_state.contiguous() if state is not None and has_initial_state is not None else None,
            valid.contiguous() if valid is not None else None,
            T,
            N,
            C,
            N.bit_length(),
            *x_TC.stride(),
            *weight_CK.stride(),
            *((state.shape[0], *state.stride()) if state is not None else (0, 0, 0, 0)),
            state_indices.stride(0) if state is not None and state_indices is not None else 0,
            K=K,
            D=dilation,
            HAS_STATE=state is not None,
            HAS_INITIAL=state is not None and has_initial_state is not None,
            HAS_VALID=valid is not None,
            SILU=activation == "silu",
            BLOCK_T=TOKENS_PER_TILE,
            BLOCK_C=channels,
            BLOCK_K=triton.next_power_of_2(K),
            num_warps=WARPS,
            num_stages=1,
        )
    return out_TC


def update(
    conv_state: Tensor,
    x_TC: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor | None,
    update: Tensor | None,
    state_len: int,
) -> None:
    """The GPU implementation of ``ple_inductor::update_conv_state``; one launch, in place.

    Index vectors other than ``state_indices`` are copied where they are strided. Tensors share one device.
    """
    T, C = x_TC.shape
    N = query_start_loc.shape[0] - 1
    if 0 in (N, T, C, state_len, conv_state.shape[0]):
        return
    channels = min(CHANNELS_PER_UPDATE, triton.next_power_of_2(C))
    with torch.cuda.device_of(conv_state):
        update_conv_state_kernel[(N, triton.cdiv(C, channels))](
            conv_state,
            x_TC,
            query_start_loc.contiguous(),
            state_indices,
            has_initial_state.contiguous() if has_initial_state is not None else None,
            update.contiguous() if update is not None else None,
            C,
            conv_state.shape[0],
            state_len,
            *conv_state.stride(),
            *x_TC.stride(),
            state_indices.stride(0),
            HAS_INITIAL=has_initial_state is not None,
            HAS_UPDATE=update is not None,
            BLOCK_C=channels,
            num_warps=WARPS,
            num_stages=1,
        )


@triton.jit(do_not_specialize=["T", "N", "search_steps", "slots", "valid", *_REQUESTS])
def varlen_short_conv_kernel(
    out,  # [T, C] contiguous
    x,  # [T, C]
    weight,  # [C, K]
    query_start_loc,  # [N + 1]
    conv_state,  # [slots, C, W] or None
    state_indices,  # [N] or None
    has_initial_state,  # [N] or None
    valid,  # [N] or None
    T,
    N,
    C,
    search_steps,
    stride_x_t,
    stride_x_c,
    stride_w_c: tl.constexpr,
    stride_w_k: tl.constexpr,
    slots,
    stride_s_slot,
    stride_s_c,
    stride_s_col,
    stride_i,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (token tile, channel block)."""
    i_tile = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    o_c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    b_w = tl.load(
        weight + o_c[:, None] * stride_w_c + o_k[None, :] * stride_w_k,
        mask=m_c[:, None] & (o_k < K)[None, :],
        other=0,
    ).to(tl.float32)
    o_t = i_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = _request_of(o_t, query_start_loc, N, search_steps)
    m_live = (o_n < N) & (o_t < T)
    start = tl.load(query_start_loc + o_n, mask=m_live, other=0)
    if HAS_VALID:
        m_live = m_live & tl.load(valid + o_n, mask=m_live, other=0)
    o_col = tl.where(m_live, o_t - start, -1)

    if HAS_STATE:
        m_early = (o_col >= 0) & (o_col < (K - 1) * D)
        if tl.max(m_early.to(tl.int32), axis=0) > 0:
            b_slot = tl.load(state_indices + o_n * stride_i, mask=m_early, other=-1).to(tl.int64)
            m_state = m_early & (b_slot >= 0) & (b_slot < slots)
            if HAS_INITIAL:
                m_state = m_state & tl.load(has_initial_state + o_n, mask=m_early, other=0)
            state_row = conv_state + b_slot * stride_s_slot
            acc = _sum_taps(
                x, b_w, o_k, o_t, o_c, o_col, m_c, stride_x_t, stride_x_c,
                state_row, m_state, stride_s_c, stride_s_col, True, K, D,
            )  # fmt: skip
        else:
            acc = _sum_taps(
                x, b_w, o_k, o_t, o_c, o_col, m_c, stride_x_t, stride_x_c,
                None, None, None, None, False, K, D,
            )  # fmt: skip
    else:
        acc = _sum_taps(
            x, b_w, o_k, o_t, o_c, o_col, m_c, stride_x_t, stride_x_c,
            None, None, None, None, False, K, D,
        )  # fmt: skip

    b_y = acc.to(out.dtype.element_ty)
    if SILU:
        b_f = b_y.to(tl.float32)
        b_y = (b_f / (1.0 + tl.exp(-b_f))).to(out.dtype.element_ty)
    # Rows that no request owns loaded nothing, but 0 * inf in a weight would still show.
    b_y = tl.where((o_col >= 0)[:, None], b_y, 0.0)
    tl.store(out + o_t[:, None] * C + o_c[None, :], b_y, mask=(o_t < T)[:, None] & m_c[None, :])


@triton.jit
def _request_of(o_t, query_start_loc, N, search_steps):
    """The request of each token, N where there is none: the first whose end lies after the token.

    One binary search for the whole tile, its lanes in step; ``search_steps`` = bits of N always suffice.
    Looking for the end rather than the start passes over requests without tokens.
    """
    low = tl.zeros_like(o_t)
    high = low + N
    for _ in range(search_steps):
        middle = (low + high) >> 1
        m_open = low < high
        b_end = tl.load(query_start_loc + (middle + 1), mask=m_open, other=0)
        m_after = m_open & (b_end <= o_t)
        low = tl.where(m_after, middle + 1, low)
        high = tl.where(m_after, high, middle)
    return low


@triton.jit
def _sum_taps(
    x,
    b_w,
    o_k,
    o_t,
    o_c,
    o_col,
    m_c,
    stride_x_t,
    stride_x_c,
    state_row,
    m_state,
    stride_s_c,
    stride_s_col,
    READ_STATE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
):
    """fp32 sums of one tile, [BLOCK_T, BLOCK_C].

    A request's rows are consecutive, so the tap ``back`` tokens ago is row ``t - back`` if that is still the
    same request (``col >= back``), and state column ``col + S - back`` if not. ``col`` is -1 in dead rows.
    """
    acc = tl.zeros((o_t.shape[0], o_c.shape[0]), dtype=tl.float32)
    for k in tl.static_range(K):
        back = (K - 1 - k) * D
        m_x = o_col >= back
        b_h = tl.load(
            x + (o_t - back)[:, None] * stride_x_t + o_c[None, :] * stride_x_c,
            mask=m_x[:, None] & m_c[None, :],
            other=0,
        )
        if READ_STATE and k < K - 1:
            m_old = m_state & (o_col < back)
            b_old = tl.load(
                (state_row + (o_col + k * D) * stride_s_col)[:, None] + o_c[None, :] * stride_s_c,
                mask=m_old[:, None] & m_c[None, :],
                other=0,
            )
            b_h = tl.where(m_old[:, None], b_old.to(b_h.dtype), b_h)
        b_tap = tl.sum(tl.where((o_k == k)[None, :], b_w, 0.0), axis=1)
        acc += b_tap[None, :] * b_h.to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["slots", "state_len", "update", *_REQUESTS])
def update_conv_state_kernel(
    conv_state,  # [slots, C, W]
    x,  # [T, C]
    query_start_loc,  # [N + 1]
    state_indices,  # [N]
    has_initial_state,  # [N] or None
    update,  # [N] or None
    C,
    slots,
    state_len,
    stride_s_slot,
    stride_s_c,
    stride_s_col,
    stride_x_t,
    stride_x_c,
    stride_i,
    HAS_INITIAL: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per (request, channel block)."""
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    start = tl.load(query_start_loc + i_n).to(tl.int64)
    end = tl.load(query_start_loc + (i_n + 1)).to(tl.int64)
    slot = tl.load(state_indices + i_n * stride_i).to(tl.int64)
    m_write = (end > start) & (slot >= 0) & (slot < slots)
    if HAS_UPDATE:
        m_write = m_write & tl.load(update + i_n)
    m_initial = m_write
    if HAS_INITIAL:
        m_initial = m_initial & tl.load(has_initial_state + i_n)

    if m_write:
        length = end - start
        state_c = conv_state + slot * stride_s_slot + o_c * stride_s_c
        # In place without a race: column q is read in step q - length and written in step q, which is later
        # because length > 0. There is one store statement, so one thread writes channel c in every step, and
        # in step q - length it stored what had just been read from q: the read is over, even where another
        # thread did it. This needs the steps in order: unroll neither loop nor store, and do not pipeline.
        for p in tl.range(0, state_len, num_stages=1, loop_unroll_factor=1):
            o_source = length + p
            m_old = o_source < state_len
            b_old = tl.load(state_c + o_source * stride_s_col, mask=m_c & (m_old & m_initial), other=0)
            b_x = tl.load(
                x + (start + o_source - state_len) * stride_x_t + o_c * stride_x_c,
                mask=m_c & (o_source >= state_len),
                other=0,
            )
            b_h = tl.where(m_old, b_old.to(x.dtype.element_ty), b_x)
            # The difference is p, in 64 bits.
            tl.store(
                state_c + (o_source - length) * stride_s_col, b_h.to(conv_state.dtype.element_ty), mask=m_c
            )
