"""``ple_inductor::update_conv_state``: each state becomes the last columns of its history, in place.

Here are the contract (schema, checks, fake implementation) and the implementation in plain torch, which
serves every device without one of its own. CUDA and ROCm import their Triton kernel when a tensor first
reaches it. The operator is apart from the convolution because reading old states and writing new ones in
one launch races.

May be changed: how the new columns are gathered. Must hold: only the listed slots of updated, non-empty
requests are written, and of those only the first S columns (the pool may be mapped memory, and huge).

Dimension key: T tokens, N requests, C channels, S state length, W >= S state width, M requests that are
written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ple_inductor.lowerings.ragged_arguments import require, require_pool, require_requests


@torch.library.custom_op(
    "ple_inductor::update_conv_state",
    mutates_args=("conv_state",),
    schema=(
        "(Tensor(a!) conv_state, Tensor x, Tensor query_start_loc, Tensor state_indices, "
        "Tensor? has_initial_state, Tensor? update, SymInt state_len) -> ()"
    ),
    tags=(torch.Tag.flexible_layout,),
)
def update_conv_state(
    conv_state: Tensor,
    x: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor | None,
    update: Tensor | None,
    state_len: int,
) -> None:
    """``conv_state[slot, :, p] = h(len + p)`` for ``p < S``: the last S columns of each history.

    ``h(j)`` is state column ``j`` of the request's slot where ``j < S`` (0 without an initial state), else
    its token ``j - S``. A value is rounded to x's dtype and then to the pool's, also where a column only
    moves. Written are requests with tokens, with ``update``, and with a slot inside the pool; every other
    byte of the pool stays.

    Args:
        conv_state: State pool [slots, C, W], W >= S, bf16, fp16 or fp32, any strides; written in place.
        x: Packed tokens [T, C], any of the three dtypes, any strides. T may be 0.
        query_start_loc: Request bounds [N + 1], int32 or int64; starts at 0, never decreases, ends at or
            before T.
        state_indices: Slot of each request [N], int32 or int64, any stride. If two written requests name
            one slot, it ends up with either state, perhaps mixed.
        has_initial_state: bool [N], False takes zeros for the old state; None for all True.
        update: bool [N], False leaves the request's slot as it is; None for all True.
        state_len: S >= 0, columns.

    Raises:
        ValueError: ranks, sizes, dtypes or devices disagree. Values of the index vectors are not checked.
    """
    _check(conv_state, x, query_start_loc, state_indices, has_initial_state, update, state_len)
    length_N = query_start_loc.diff()
    written_N = (length_N > 0) & (state_indices >= 0) & (state_indices < conv_state.shape[0])
    if update is not None:
        written_N &= update
    written = written_N.nonzero().squeeze(1)
    if written.numel() == 0 or state_len == 0:
        return
    slots_M = state_indices[written].to(torch.int64)
    first_M = query_start_loc[written].to(torch.int64)

    j_MS = length_N[written].to(torch.int64).unsqueeze(1) + torch.arange(state_len, device=x.device)
    old_MS = j_MS < state_len
    new_MSC = x.new_zeros(*j_MS.shape, x.shape[1])
    m, p = (~old_MS).nonzero(as_tuple=True)
    new_MSC[m, p] = x[first_M[m] + j_MS[m, p] - state_len]
    if has_initial_state is not None:
        old_MS &= has_initial_state[written].unsqueeze(1)
    m, p = old_MS.nonzero(as_tuple=True)
    new_MSC[m, p] = conv_state[slots_M[m], :, j_MS[m, p]].to(x.dtype)
    conv_state[:, :, :state_len][slots_M] = new_MSC.transpose(1, 2).to(conv_state.dtype)


@update_conv_state.register_kernel("cuda")
def _(
    conv_state: Tensor,
    x: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor | None,
    update: Tensor | None,
    state_len: int,
) -> None:
    from ple_inductor.lowerings import _short_conv_triton

    arguments = (conv_state, x, query_start_loc, state_indices, has_initial_state, update)
    _check(*arguments, state_len)
    _short_conv_triton.update(*arguments, state_len)


@update_conv_state.register_fake
def _(
    conv_state: Tensor,
    x: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor | None,
    update: Tensor | None,
    state_len: int,
) -> None:
    _check(conv_state, x, query_start_loc, state_indices, has_initial_state, update, state_len)


def _check(
    conv_state: Tensor,
    x_TC: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor | None,
    update: Tensor | None,
    state_len: int,
) -> None:
    require_requests(x_TC, query_start_loc, state_indices, has_initial_state=has_initial_state, update=update)
    require(state_len >= 0, f"state_len is {state_len}, expected at least 0; pass (taps - 1) * dilation")
    require_pool(x_TC, conv_state, state_len)
