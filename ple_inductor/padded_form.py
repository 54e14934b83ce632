"""The padded short convolution as a model's author would write it: the code that ``replay`` runs.

Requests of unequal length are packed into one dense tensor, convolved with their history in front of
them, and unpacked again; each request's history is then written back to the state pool. Every dense
tensor here costs ``N*L*C`` elements for ``T*C`` of work. Nothing in this file knows of the rewrite: the
three forms of a replay are this same function, run eagerly, under stock Inductor, and under
``backend="ple_inductor"``. Change it only to something that a model would do as well.

Dimension key: T tokens, N requests, L the longest request, C channels, K taps, d dilation,
S = (K-1)*d state length, W state width (W >= S), slots of the state pool.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NULL_SLOT = 0
"""Slot that stands for "no request": its rows give zeros and its state is never changed."""


def padded_short_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    query_start_loc: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    num_requests: int,
    max_length: int,
    dilation: int,
) -> Tensor:
    """``silu(dilated depthwise conv)`` of each request behind its own history; updates ``conv_state``.

    Args:
        x_TC: Packed tokens, any float dtype, contiguous.
        weight_CK: Taps, oldest first, x's dtype.
        query_start_loc: Request bounds, int32 ``[N+1]``, from 0 to T; equal neighbours mean an empty request.
        conv_state: Pool ``[slots, C, W]``, any strides, any float dtype; the first S columns are used and
            overwritten, in place, for every listed slot but the null one.
        state_indices: Slot of each request, int ``[N]``.
        has_initial_state: Whether a request continues an earlier one, bool ``[N]``; if not, its history
            is zeros.
        num_requests: N.
        max_length: L, at least 1.
        dilation: Distance in tokens between two taps, at least 1.

    Returns:
        ``[T, C]`` in x's dtype, contiguous. The convolution is rounded to that dtype before SiLU.
    """
    out_TC = torch.empty_like(x_TC)
    state_len = (weight_CK.shape[1] - 1) * dilation
    starts = query_start_loc.to(torch.int64)
    lengths = starts[1:] - starts[:-1]
    token = torch.arange(x_TC.shape[0], device=x_TC.device)
    request = torch.searchsorted(starts[1:], token, right=True)
    column = token - starts[request]

    padded = x_TC.new_zeros((num_requests, max_length, x_TC.shape[1]))
    padded[request, column] = x_TC
    padded = padded.transpose(1, 2).contiguous()

    slots = state_indices[:num_requests].to(torch.int64)
    live = slots != NULL_SLOT
    slots = torch.where(live, slots, torch.zeros_like(slots))
    history = padded
    if state_len > 0:
        old_state = conv_state.index_select(0, slots)[..., :state_len].to(x_TC.dtype)
        keeps_state = (live & has_initial_state[:num_requests]).view(num_requests, 1, 1)
        old_state = torch.where(keeps_state, old_state, torch.zeros_like(old_state))
        history = torch.cat((old_state, padded), dim=-1)

    mixed = F.conv1d(history, weight_CK.unsqueeze(1).contiguous(), groups=history.shape[1], dilation=dilation)
    mixed = F.silu(mixed).transpose(1, 2).contiguous()
    inside = torch.arange(max_length, device=x_TC.device).view(1, -1) < lengths.view(-1, 1)
    mixed.masked_fill_(~(inside & live.view(-1, 1)).unsqueeze(-1), 0)
    out_TC.copy_(mixed[request, column])

    if state_len > 0:
        last = lengths.view(-1, 1, 1) + torch.arange(state_len, device=x_TC.device).view(1, 1, -1)
        new_state = history.gather(2, last.expand(-1, history.shape[1], -1))
        rows = conv_state.index_select(0, slots)
        changes = (live & (lengths > 0)).view(-1, 1, 1)
        rows[..., :state_len] = torch.where(changes, new_state.to(conv_state.dtype), rows[..., :state_len])
        conv_state.index_copy_(0, slots, rows)
    return out_TC
