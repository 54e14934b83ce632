"""Random steps for property tests of the operators, and how a result is compared with the oracle's."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from oracle import Batch, dyadic

NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit in 16 bits; fp32 within 1e-6, since ``exp`` is rounded by the vector unit at hand."""
    assert actual.is_contiguous()
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(actual, expected)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Lengths around S, slots that are null, -1 or beyond the pool, any flags, dtypes and layouts."""
    taps, dilation = draw(st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 3), (5, 2)]))
    S = (taps - 1) * dilation
    lens = draw(st.lists(st.sampled_from([0, 1, max(S - 1, 0), S, S + 1, 2 * S + 3]), max_size=6))
    owned = draw(st.permutations(range(1, 8)))[: len(lens)]
    slots = [draw(st.sampled_from([slot, slot, 0, -1, 99])) for slot in owned]
    dtype, state_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    batch = dyadic(
        lens,
        slots,
        channels=draw(st.sampled_from([1, 5, 40])),
        taps=taps,
        dilation=dilation,
        dtype=dtype,
        state_dtype=state_dtype,
        pool_slots=8,
        width=S + draw(st.sampled_from([0, 1, 5])),
        layout=draw(st.sampled_from(["SD", "DS"])),
        activation=draw(st.sampled_from(["none", "silu"])),
    )
    flags = st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tail = draw(st.sampled_from([0, 2]))
    x_TC = torch.randn(sum(lens) + tail, batch.x.shape[1], generator=generator).to(dtype)
    x_TC[sum(lens) :] = NAN
    return batch._replace(
        x=x_TC,
        weight=torch.randn(batch.weight.shape, generator=generator).to(dtype),
        query_start_loc=batch.query_start_loc.to(index_dtype),
        conv_state=batch.conv_state.copy_(torch.randn(batch.conv_state.shape, generator=generator)),
        state_indices=batch.state_indices.to(index_dtype),
        has_initial_state=torch.tensor(draw(flags), dtype=torch.bool),
        # Several requests may name the null slot, which none may write.
        live=torch.tensor(draw(flags), dtype=torch.bool) & batch.live,
    )
