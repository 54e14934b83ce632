"""What the operators must return, worked out request by request, and the data that makes sums exact.

``conv`` and ``new_pool`` take the arguments of the two operators and follow the definition literally: the
history of a request is its S state columns and then its tokens. They share no code with the package.

``dyadic`` data: every tap sum of up to 5 taps is exact in fp32, bf16 and fp16, so the order of the taps
cannot change a bit. ``output_checksum`` and ``state_checksum`` are position-weighted sums of a result.

Dimension key: T tokens, N requests, C channels, K taps, S = (K - 1) * dilation state length, W >= S state
width.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor


def histories(
    x_TC: Tensor,
    query_start_loc: Tensor,
    conv_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    state_len: int,
) -> list[Tensor]:
    """Per request [S + len, C] in x's dtype."""
    bounds = query_start_loc.tolist()
    result = []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        old = torch.zeros(state_len, x_TC.shape[1], dtype=x_TC.dtype)
        slot = int(state_indices[n]) if state_indices is not None else -1
        if (
            conv_state is not None
            and 0 <= slot < conv_state.shape[0]
            and (has_initial_state is None or bool(has_initial_state[n]))
        ):
            old = conv_state[slot, :, :state_len].to(x_TC.dtype).t()
        result.append(torch.cat((old, x_TC[start:end])))
    return result


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
    """The output of ``varlen_short_conv``."""
    taps = weight_CK.shape[1]
    state_len = (taps - 1) * dilation
    out_TC = torch.zeros(x_TC.shape, dtype=x_TC.dtype)
    of_requests = histories(x_TC, query_start_loc, conv_state, state_indices, has_initial_state, state_len)
    for n, history in enumerate(of_requests):
        if valid is not None and not bool(valid[n]):
            continue
        length = history.shape[0] - state_len
        total = torch.zeros(length, x_TC.shape[1])
        for k in range(taps):
            total += weight_CK[:, k].float() * history[k * dilation : k * dilation + length].float()
        y = total.to(x_TC.dtype)
        if activation == "silu":
            y = (y.float() / (1 + torch.exp(-y.float()))).to(x_TC.dtype)
        start = int(query_start_loc[n])
        out_TC[start : start + length] = y
    return out_TC


def new_pool(
    conv_state: Tensor,
    x_TC: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor | None,
    update: Tensor | None,
    state_len: int,
) -> Tensor:
    """The whole pool after ``update_conv_state``, contiguous; ``conv_state`` stays as it is."""
    pool = conv_state.clone(memory_format=torch.contiguous_format)
    of_requests = histories(x_TC, query_start_loc, conv_state, state_indices, has_initial_state, state_len)
    for n, history in enumerate(of_requests):
        slot = int(state_indices[n])
        has_tokens = history.shape[0] > state_len
        if has_tokens and 0 <= slot < pool.shape[0] and (update is None or bool(update[n])):
            newest = history[history.shape[0] - state_len :]
            pool[slot, :, :state_len] = newest.t().to(pool.dtype)
    return pool


class Batch(NamedTuple):
    """The tensors of one step; ``conv_args`` and ``update_args`` are the operators' arguments."""

    x: Tensor
    weight: Tensor
    query_start_loc: Tensor
    conv_state: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    live: Tensor
    dilation: int
    activation: str

    @property
    def conv_args(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def update_args(self) -> tuple[Any, ...]:
        state_len = (self.weight.shape[1] - 1) * self.dilation
        requests = (self.query_start_loc, self.state_indices, self.has_initial_state, self.live)
        return (self.conv_state, self.x, *requests, state_len)


def dyadic(
    lens: list[int],
    slots: list[int],
    has: list[int] | None = None,
    *,
    channels: int = 16,
    taps: int = 4,
    dilation: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype | None = None,
    pool_slots: int = 12,
    width: int | None = None,
    layout: str = "DS",
    activation: str = "silu",
) -> Batch:
    """A step of exact data. Slot 0 is the null slot: not live, no initial state.

    Args:
        lens: Tokens of each request.
        slots: Slot of each request.
        has: 1 where the request has an initial state; None for all.
        width: Of the pool, columns; None for S.
        layout: "DS" stores [slots, C, W], "SD" stores [slots, W, C] and views it transposed.
    """
    width = (taps - 1) * dilation if width is None else width
    t, c = torch.arange(sum(lens)).unsqueeze(1), torch.arange(channels)
    x_TC = ((7 * t + 3 * c) % 17 - 8) / 8
    weight_CK = ((5 * c.unsqueeze(1) + 3 * torch.arange(taps)) % 9 - 4) / 4
    s, p = torch.arange(pool_slots).view(-1, 1, 1), torch.arange(width)
    pool = (((11 * s + 2 * c.unsqueeze(1) + 5 * p) % 15 - 7) / 8).to(state_dtype or dtype)
    if layout == "SD":
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    live = torch.tensor(slots, dtype=torch.int32) != 0
    initial = torch.ones(len(lens), dtype=torch.bool) if has is None else torch.tensor(has, dtype=torch.bool)
    return Batch(
        x=x_TC.to(dtype),
        weight=weight_CK.to(dtype),
        query_start_loc=bounds(lens),
        conv_state=pool,
        state_indices=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=initial & live,
        live=live,
        dilation=dilation,
        activation=activation,
    )


def bounds(lens: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """[N + 1] from the lengths of N requests."""
    return torch.tensor([0, *lens]).cumsum(0).to(dtype)


def output_checksum(out_TC: Tensor) -> float:
    t, c = (torch.arange(size) for size in out_TC.shape)
    return float((out_TC.double() * (1 + (31 * t.unsqueeze(1) + c) % 97)).sum())


def state_checksum(pool: Tensor) -> int:
    s, c, p = (torch.arange(size) for size in pool.shape)
    weights = 1 + (13 * s.view(-1, 1, 1) + 7 * c.unsqueeze(1) + p) % 89
    return int((8 * pool.double() * weights).sum())
