"""A padded short convolution whose every step can be exchanged, for near misses and their accepted twins.

Dimension key: N requests, L the longest, T tokens, C channels, K taps, S state columns, W pool columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def inputs(
    lens: list[int],
    *,
    channels: int = 20,
    taps: int = 4,
    dilation: int = 3,
    slots: int = 12,
    width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Random arguments for a function made by `short_conv`; request n has slot n + 1."""
    generator = torch.Generator().manual_seed(seed)
    state_length = (taps - 1) * dilation

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    x_TC = random(sum(lens), channels).to(dtype)
    weight_CK = (random(channels, taps) / 2).to(dtype)
    pool = random(slots, channels, width or max(state_length, 1)).to(state_dtype or dtype)
    query_start_loc = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    slot_N = torch.arange(1, len(lens) + 1)
    has_initial_N = torch.arange(len(lens)) % 2 == 0
    return x_TC, query_start_loc, max(lens), weight_CK, pool, slot_N, has_initial_N, dilation


def _cat(state: Tensor, packed: Tensor) -> Tensor:
    return torch.cat((state, packed), dim=-1)


def _conv(history: Tensor, weight_CK: Tensor, dilation: int) -> Tensor:
    return F.conv1d(history, weight_CK.unsqueeze(1), groups=history.shape[1], dilation=dilation)


def _put(packed: Tensor, request: Tensor, column: Tensor, x_TC: Tensor) -> None:
    packed[request, column] = x_TC


def _masked(has_initial: Tensor, state: Tensor) -> Tensor:
    return torch.where(has_initial, state, torch.zeros_like(state))


def _zeros(x_TC: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return x_TC.new_zeros(sizes)


def _same(value: Tensor) -> Tensor:
    return value


def short_conv(
    *,
    buffer: Callable[..., Tensor] = _zeros,
    before_pack: Callable[..., Any] = lambda x, pool, weight: None,
    columns_of: Callable[[Tensor], Tensor] = _same,
    put: Callable[..., None] = _put,
    on_packed: Callable[[Tensor], Tensor] = _same,
    channels_last: Callable[[Tensor], Tensor] = lambda packed: packed.transpose(1, 2).contiguous(),
    initial: Callable[[Tensor, Tensor], Tensor] = _masked,
    on_history: Callable[..., Any] = lambda x, pool, weight: None,
    join: Callable[[Tensor, Tensor], Tensor] = _cat,
    conv: Callable[[Tensor, Tensor, int], Tensor] = _conv,
    activation: Callable[[Tensor], Tensor] = F.silu,
    tokens_last: Callable[[Tensor], Tensor] = lambda result: result.transpose(1, 2),
    unpack_bounds: Callable[[Tensor], Tensor] = _same,
    also: Callable[..., Any] = lambda packed, history, result, pool: None,
    write_state: bool = True,
    updates: Callable[[Tensor], Tensor] = lambda lengths: lengths > 0,
    offsets: Callable[[Tensor], Tensor] = _same,
    written_slots: Callable[[Tensor], Tensor] = _same,
    to_pool: Callable[[Tensor, Tensor], Tensor] = lambda new, pool: new.to(pool.dtype),
    write: Callable[..., Any] = lambda pool, slot_N, rows: pool.index_copy_(0, slot_N, rows),
    at_end: Callable[..., Any] = lambda x, pool: None,
) -> Callable[..., Any]:
    """A padded short convolution with some of its steps exchanged."""

    def fn(x_TC, query_start_loc, max_len, weight_CK, pool, slot_N, has_initial_N, dilation):  # type: ignore[no-untyped-def]
        tokens, channels = x_TC.shape
        requests = query_start_loc.shape[0] - 1
        columns = (weight_CK.shape[1] - 1) * dilation
        bounds = query_start_loc.to(torch.int64)
        positions = torch.arange(tokens)
        request = torch.searchsorted(bounds[1:], positions, right=True)
        column = columns_of(positions - bounds[request])
        before_pack(x_TC, pool, weight_CK)
        packed = buffer(x_TC, (requests, max_len, channels))
        put(packed, request, column, x_TC)
        packed = channels_last(on_packed(packed))
        state = pool[slot_N][..., :columns].to(x_TC.dtype)
        state = initial(has_initial_N.view(-1, 1, 1), state)
        on_history(x_TC, pool, weight_CK)
        history = join(state, packed)
        result = tokens_last(activation(conv(history, weight_CK, dilation)))
        other = unpack_bounds(bounds)
        request_out = torch.searchsorted(other[1:], positions, right=True)
        out = result[request_out, positions - other[request_out]]
        extra = also(packed, history, result, pool)
        if write_state:
            lengths = bounds[1:] - bounds[:-1]
            index = lengths.view(-1, 1, 1) + offsets(torch.arange(columns)).view(1, 1, -1)
            new = history.gather(2, index.expand(-1, channels, -1))
            old = pool.index_select(0, slot_N)
            rows = torch.where(updates(lengths).view(-1, 1, 1), to_pool(new, pool), old[..., :columns])
            old[..., :columns] = rows
            write(pool, written_slots(slot_N), old)
        last = at_end(x_TC, pool)
        return tuple(value for value in (out, extra, last) if value is not None)

    return fn
