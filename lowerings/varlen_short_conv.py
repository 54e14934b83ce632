"""``ple_inductor::varlen_short_conv``: a dilated depthwise convolution over ragged rows, with its activation.

Here are the contract (schema, checks, fake implementation) and the implementation in plain torch, which
serves every device without one of its own. CUDA and ROCm import their Triton kernel when a tensor first
reaches it; under Inductor on a CPU the lowering in ``inductor.py`` generates C++ instead.

May be changed: the block size, how a block is computed. Must hold: the contract in the docstring, scratch
memory that follows the block alone, and only torch imported.

Dimension key: T tokens, N requests, C channels, K taps, d dilation, S = (K - 1) * d state length, W >= S
state width, B rows of one block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ple_inductor.lowerings.ragged_arguments import (
    FLOATS,
    require,
    require_pool,
    require_requests,
    require_tensor,
)

ACTIVATIONS = ("none", "silu")

# Rows are computed in blocks of about this many elements, so that fp32 sums of all rows never exist at once.
BLOCK_ELEMENTS = 1 << 21


@torch.library.custom_op(
    "ple_inductor::varlen_short_conv",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, Tensor query_start_loc, Tensor? conv_state, Tensor? state_indices, "
        "Tensor? has_initial_state, Tensor? valid, SymInt dilation, str activation) -> Tensor"
    ),
    tags=(torch.Tag.flexible_layout,),
)
def varlen_short_conv(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    conv_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    valid: Tensor | None,
    dilation: int,
    activation: str,
) -> Tensor:
    """``out[t, c] = act(sum over k, weight[c, k] * h(col + k * d))``, row ``t = query_start_loc[n] + col``.

    ``h(j)`` is the history of request ``n`` at channel ``c``: state column ``j`` where ``j < S``, else token
    ``j - S`` of the request. The sum runs over the taps oldest first in fp32 and is rounded to x's dtype;
    then ``silu(y) = y / (1 + exp(-y))`` in fp32, rounded again.

    Args:
        x: Packed tokens [T, C], bf16, fp16 or fp32, any strides. T may be 0.
        weight: Taps [C, K], oldest first, x's dtype, any strides, K >= 1.
        query_start_loc: Request bounds [N + 1], int32 or int64; starts at 0, never decreases (equal
            neighbours are a request without tokens), ends at or before T. N may be 0.
        conv_state: State pool [slots, C, W], W >= S, any float dtype of the three and any strides, rounded
            to x's dtype when read; or None for zeros.
        state_indices: Slot of each request [N], int32 or int64, any stride; needed with ``conv_state``. A
            slot outside the pool stands for no initial state.
        has_initial_state: bool [N], False reads zeros for the state; None for all True.
        valid: bool [N], False makes the request's rows 0, whatever its state; None for all True.
        dilation: Tokens between two taps, >= 1.
        activation: "none" or "silu".

    Returns:
        [T, C] in x's dtype, contiguous. Rows of requests that are not valid, and rows at or after
        ``query_start_loc[N]``, are 0 whatever x holds there.

    Raises:
        ValueError: ranks, sizes, dtypes or devices disagree. Values of the index vectors are not checked.
    """
    _check(
        x, weight, query_start_loc, conv_state, state_indices, has_initial_state, valid, dilation, activation
    )
    (T, C), N = x.shape, query_start_loc.shape[0] - 1
    if N == 0:
        return x.new_zeros(T, C)
    bounds_N1 = query_start_loc.to(torch.int64)
    weight_KC = weight.t().to(torch.float32)
    K = weight_KC.shape[0]
    initial_N = None
    if conv_state is not None and state_indices is not None:
        initial_N = (state_indices >= 0) & (state_indices < conv_state.shape[0])
        if has_initial_state is not None:
            initial_N &= has_initial_state

    out_TC = x.new_empty(T, C)
    rows = max(1, BLOCK_ELEMENTS // max(1, C))
    for first in range(0, T, rows):
        last = min(T, first + rows)
        sum_BC = torch.zeros(last - first, C, dtype=torch.float32, device=x.device)
        for k in range(K):
            back = (K - 1 - k) * dilation
            begin = min(last, max(first, back))
            sum_BC[begin - first :] += x[begin - back : last - back] * weight_KC[k]

        t_B = torch.arange(first, last, device=x.device)
        request_B = torch.searchsorted(bounds_N1[1:], t_B, right=True)
        live_B = request_B < N
        request_B = request_B.clamp(max=N - 1)
        if valid is not None:
            live_B &= valid[request_B]
        col_B = t_B - bounds_N1[request_B]
        # Rows with taps from before their request took them from other requests so far.
        early = (live_B & (col_B < (K - 1) * dilation)).nonzero().squeeze(1)
        t_E, col_E, request_E = t_B[early], col_B[early], request_B[early]
        sum_EC = sum_BC.new_zeros(early.numel(), C)
        for k in range(K):
            back = (K - 1 - k) * dilation
            own_E = col_E >= back
            h_EC = x[(t_E - back).clamp(min=0)]
            h_EC[~own_E] = 0
            if initial_N is not None and conv_state is not None and state_indices is not None:
                old = (~own_E & initial_N[request_E]).nonzero().squeeze(1)
                slots = state_indices[request_E[old]].to(torch.int64)
                h_EC[old] = conv_state[slots, :, col_E[old] + k * dilation].to(x.dtype)
            sum_EC += h_EC * weight_KC[k]
        sum_BC[early] = sum_EC

        y_BC = sum_BC.to(x.dtype)
        if activation == "silu":
            y_BC = F.silu(y_BC)
        y_BC[~live_B] = 0
        out_TC[first:last] = y_BC
    return out_TC


@varlen_short_conv.register_kernel("cuda")
def _(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    conv_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    valid: Tensor | None,
    dilation: int,
    activation: str,
) -> Tensor:
    from ple_inductor.lowerings import _short_conv_triton

    arguments = (x, weight, query_start_loc, conv_state, state_indices, has_initial_state, valid)
    _check(*arguments, dilation, activation)
    return _short_conv_triton.conv(*arguments, dilation, activation)


@varlen_short_conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    conv_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    valid: Tensor | None,
    dilation: int,
    activation: str,
) -> Tensor:
    _check(
        x, weight, query_start_loc, conv_state, state_indices, has_initial_state, valid, dilation, activation
    )
    return x.new_empty(x.shape)


def _check(
    x_TC: Tensor,
    weight_CK: Tensor,
    query_start_loc: Tensor,
    conv_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    valid: Tensor | None,
    dilation: int,
    activation: str,
) -> None:
    require_requests(x_TC, query_start_loc, state_indices, has_initial_state=has_initial_state, valid=valid)
    require_tensor("weight", weight_CK, x_TC, 2, FLOATS)
    require(
        weight_CK.dtype == x_TC.dtype,
        f"weight has dtype {weight_CK.dtype} but x has {x_TC.dtype}; convert one of them",
    )
    require(
        weight_CK.shape[0] == x_TC.shape[1],
        f"weight has {weight_CK.shape[0]} channels but x has {x_TC.shape[1]}; pass it as [channels, taps]",
    )
    require(weight_CK.shape[1] >= 1, "weight has no taps, expected at least one; pass it as [channels, taps]")
    require(dilation >= 1, f"dilation is {dilation}, expected at least 1; pass 1 for neighbouring taps")
    require(
        activation in ACTIVATIONS,
        f"activation is {activation!r}, expected {' or '.join(map(repr, ACTIVATIONS))}; pass one of these",
    )
    if conv_state is not None:
        require(
            state_indices is not None,
            "state_indices is missing, expected with conv_state; pass one slot for each request",
        )
        require_pool(x_TC, conv_state, (weight_CK.shape[1] - 1) * dilation)
