"""The instruments of a replay: peak, limit, inputs that never recompile, and the independent check."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_inductor import replay_memory
from ple_inductor.padded_form import padded_short_conv
from ple_inductor.replay_check import check, digest
from ple_inductor.replay_child import call_compiled_code_only
from ple_inductor.replay_inputs import make_inputs, make_pool, warm_up_step
from ple_inductor.replay_memory import Limit, peak_above_here
from ple_inductor.step import Step

MIB = 2**20


@pytest.mark.parametrize("can_reset", [True, False])
def test_peak_counts_what_was_freed_again(monkeypatch: pytest.MonkeyPatch, can_reset: bool) -> None:
    if not can_reset:
        monkeypatch.setattr(replay_memory, "_reset_high_water_mark", lambda: False)
    with peak_above_here() as peak:
        torch.ones(48 * MIB, dtype=torch.uint8)
        torch.ones(48 * MIB, dtype=torch.uint8).add_(1)
    assert peak.method == ("high-water mark" if can_reset else "polled")
    assert 46 * MIB <= peak.bytes <= 56 * MIB


def test_peak_starts_at_the_baseline() -> None:
    torch.ones(96 * MIB, dtype=torch.uint8)  # an earlier peak, which must not count
    held = torch.ones(8 * MIB, dtype=torch.uint8)
    with peak_above_here() as peak:
        held.add_(1)
    assert peak.bytes < 4 * MIB


def test_limit_binds_tensors_and_says_what_was_left() -> None:
    limit = Limit(64 * MIB)
    try:
        kept = torch.ones(40 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="tried to allocate 41943040 bytes"):
            torch.ones(40 * MIB, dtype=torch.uint8)
    finally:
        left = limit.lift()
    assert left == pytest.approx(24 * MIB, abs=2 * MIB)
    assert torch.ones(80 * MIB, dtype=torch.uint8).numel() > kept.numel()


def by_hand(step: Step, at: int, column: int, channel: int) -> float:
    """One output value from its definition, in plain Python; exact until the two roundings."""
    inputs = make_inputs(step)
    pool = make_pool(step)
    start = sum(step.lens[:at])
    total = 0.0
    for tap in range(step.kernel_size):
        row = column + tap * step.dilation - step.state_len
        if row >= 0:
            value = inputs.x_TC[start + row, channel].item()
        elif inputs.has_initial_state[at]:
            value = pool[inputs.state_indices[at], channel, row + step.state_len].item()
        else:
            value = 0.0
        total += value * inputs.weight_CK[channel, tap].item()
    rounded = torch.tensor(total).to(inputs.x_TC.dtype).item()
    return torch.tensor(rounded / (1 + math.exp(-rounded))).to(inputs.x_TC.dtype).item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("taps", "dilation"), [(4, 3), (1, 3), (3, 1)])
def test_the_padded_form_passes_the_check_and_both_are_right(dtype: str, taps: int, dilation: int) -> None:
    step = Step((30, 0, 1, 9, 10), 6, dtype, taps, dilation)
    inputs = make_inputs(step)
    out_TC = padded_short_conv(*inputs)
    found = check(out_TC, inputs.conv_state, make_pool(step), inputs)
    assert (found.wrong, found.state_equal) == (0, True)
    if dtype != "float32":
        assert found.different == 0
    for at, column, channel in ((0, 0, 0), (0, 29, 5), (2, 0, 3), (3, 8, 1), (4, 4, 2)):
        row = sum(step.lens[:at]) + column
        assert out_TC[row, channel].item() == pytest.approx(
            by_hand(step, at, column, channel), rel=1e-2, abs=1e-5
        )


def test_the_check_sees_a_wrong_row_a_nan_and_a_foreign_slot() -> None:
    step = Step((30, 2, 9), 6)
    inputs = make_inputs(step)
    right_TC = padded_short_conv(*inputs)

    shifted = right_TC.roll(1, 0)
    assert check(shifted, inputs.conv_state, make_pool(step), inputs).wrong > 200
    poisoned = right_TC.clone()
    poisoned[31, 2] = math.nan
    found = check(poisoned, inputs.conv_state, make_pool(step), inputs)
    assert (found.different, found.wrong) == (1, 1)
    unlisted = set(range(len(inputs.conv_state))) - set(inputs.state_indices.tolist())
    inputs.conv_state[unlisted.pop(), 0, 0] += 1
    assert not check(right_TC, inputs.conv_state, make_pool(step), inputs).state_equal


def test_the_check_calls_one_rounding_different_but_not_wrong() -> None:
    step = Step((30,), 6)
    inputs = make_inputs(step)
    out_TC = padded_short_conv(*inputs)
    bits = out_TC.view(torch.int16)
    bits[7, 3] += 1
    found = check(out_TC, inputs.conv_state, make_pool(step), inputs)
    assert (found.different, found.wrong) == (1, 0)
    assert found.largest > 0


def test_digest_is_of_the_values_and_not_of_their_layout() -> None:
    stored = torch.arange(12, dtype=torch.int16).view(3, 4)
    assert digest(stored.T) == digest(stored.T.contiguous())
    assert digest(stored.T) != digest(stored)


def test_inputs_are_the_same_in_every_process_and_differ_by_seed() -> None:
    step = Step((5, 4), 3)
    one, same, other = make_inputs(step), make_inputs(step), make_inputs(step, seed=9)
    assert torch.equal(one.x_TC, same.x_TC)
    assert torch.equal(one.conv_state, make_pool(step))
    assert not torch.equal(one.x_TC, other.x_TC)
    assert 0 not in one.state_indices
    assert len(set(one.state_indices.tolist())) == 2


small = st.integers(0, 20) | st.sampled_from([0, 1, 1000])


@settings(max_examples=300, deadline=None)
@given(
    lens=st.lists(small, min_size=1, max_size=20).filter(any),
    channels=st.integers(1, 40) | st.sampled_from([67, 256, 10240]),
    taps=st.integers(1, 12),
    dilation=st.integers(1, 12),
)
def test_a_warm_up_step_has_no_two_equal_sizes_and_ones_where_the_step_has(
    lens: list[int], channels: int, taps: int, dilation: int
) -> None:
    step = Step(tuple(lens), channels, "bfloat16", taps, dilation)
    warm = warm_up_step(step)
    assert (warm.channels, warm.dtype, warm.kernel_size, warm.dilation) == (
        channels,
        "bfloat16",
        taps,
        dilation,
    )
    for name in ("requests", "tokens", "longest"):
        assert (getattr(warm, name) == 1) == (getattr(step, name) == 1)
    varying = [warm.requests, warm.requests + 1, warm.longest, warm.tokens]
    if step.requests == 1:
        varying = [warm.longest]  # it is the tokens as well, and the rest is the same in every such step
    varying = [size for size in varying if size != 1]
    assert len(set(varying)) == len(varying)
    assert not set(varying) & {channels, taps, dilation, step.state_len}
    assert warm.padded_elements < 2**23 * max(1, taps * dilation // 16)


def test_a_call_that_would_compile_again_is_refused() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    call_compiled_code_only(compiled, (torch.ones(3),))
    with pytest.raises(RuntimeError, match="recompile"):
        call_compiled_code_only(compiled, (torch.ones(4),))
