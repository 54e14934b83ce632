"""``varlen_short_conv`` in plain torch: equal to the oracle and to torch's own convolution; its memory."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import dyadic
from ragged_batches import DTYPES, NAN, assert_same, batches

from ple_inductor.lowerings.update_conv_state import update_conv_state
from ple_inductor.lowerings.varlen_short_conv import varlen_short_conv


@hypothesis.given(batches(), st.booleans(), st.booleans(), st.booleans())
@hypothesis.settings(max_examples=150, deadline=None)
def test_equals_the_oracle(batch, with_state, with_has, with_valid):
    if not with_has:
        batch = batch._replace(has_initial_state=None)
    if not with_valid:
        batch = batch._replace(live=None)
    if not with_state:
        batch = batch._replace(conv_state=None, state_indices=None)
    assert_same(varlen_short_conv(*batch.conv_args), oracle.conv(*batch.conv_args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torchs_convolution(dtype):
    """One request at a time through ``conv1d`` and ``silu``, on random data."""
    torch.manual_seed(0)
    x_TC, weight_CK = torch.randn(137, 67).to(dtype), torch.randn(67, 4).to(dtype)
    query_start_loc = oracle.bounds([100, 1, 36])
    out_TC = varlen_short_conv(x_TC, weight_CK, query_start_loc, None, None, None, None, 3, "silu")
    for rows in (slice(0, 100), slice(100, 101), slice(101, 137)):
        history = F.pad(x_TC[rows].t(), (9, 0)).unsqueeze(0)
        expected = F.silu(F.conv1d(history, weight_CK.unsqueeze(1), groups=67, dilation=3))[0].t()
        if dtype == torch.float32:
            torch.testing.assert_close(out_TC[rows], expected, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(out_TC[rows], expected)


def test_blocks_join_without_a_seam():
    """More rows than one block holds, and taps that reach over its edge."""
    torch.manual_seed(0)
    C = 4096
    lens = [700, 3, 400]
    x_TC, weight_CK = torch.randn(1103, C).bfloat16(), torch.randn(C, 4).bfloat16()
    arguments = (x_TC, weight_CK, oracle.bounds(lens), None, None, None, torch.tensor([True, False, True]), 3)
    assert_same(varlen_short_conv(*arguments, "silu"), oracle.conv(*arguments, "silu"))


# (lens, slots, has, how the pool and the data are made, output checksum, pool checksum)
CHECKSUMS = [
    ([0, 5, 0, 0, 7, 0], [1, 2, 3, 4, 5, 6], None, {}, 833.032471, -993),
    ([0, 5, 0, 0, 7, 0], [1, 2, 3, 4, 5, 6], None, dict(dtype=torch.float32), 833.570111, -993),
    ([1, 2, 3, 8], [1, 2, 3, 4], [1, 1, 0, 0], {}, 491.733887, -3282),
    ([4, 6, 2], [0, 3, 0], None, {}, 485.332275, -1523),
    ([40], [1], [0], dict(pool_slots=3), 4154.036621, 759),
    ([5, 9, 10], [1, 2, 3], [1, 1, 0], dict(width=14, layout="SD"), 1878.307373, -468),
    ([5, 9, 10], [1, 2, 3], [1, 1, 0], dict(width=14, layout="DS"), 1878.307373, -468),
]
TAPS = [
    (2, 1, 1369.466553, -750),
    (3, 2, 1543.449219, -1659),
    (4, 3, 1810.474854, 1039),
    (4, 1, 2876.526123, -324),
    (5, 2, 2396.991943, 387),
    (1, 1, 713.953613, -578),
]
for taps, dilation, out, pool in TAPS:
    options = dict(taps=taps, dilation=dilation, pool_slots=4, width=max((taps - 1) * dilation, 1))
    CHECKSUMS.append(([5, 11, 7], [1, 2, 3], [1, 0, 1], options, out, pool))


@pytest.mark.parametrize(("lens", "slots", "has", "options", "out", "pool"), CHECKSUMS)
def test_checksums(lens, slots, has, options, out, pool):
    """Sums that the padded form gives for the same step, known from elsewhere."""
    batch = dyadic(lens, slots, has, **options)
    assert oracle.output_checksum(varlen_short_conv(*batch.conv_args)) == pytest.approx(out, abs=1e-5)
    update_conv_state(*batch.update_args)
    assert oracle.state_checksum(batch.conv_state) == pool


@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_a_recycled_slot_does_not_leak(poison):
    batch = dyadic([3, 4], [1, 2], [0, 0])
    batch.conv_state.fill_(poison)
    before = batch.conv_state.clone()
    out_TC = varlen_short_conv(*batch.conv_args)
    update_conv_state(*batch.update_args)
    assert out_TC.isfinite().all()
    assert batch.conv_state[1:3].isfinite().all()
    for slot in (0, *range(3, 12)):
        assert torch.equal(batch.conv_state[slot].view(torch.int16), before[slot].view(torch.int16))


def test_dead_rows_are_zero_even_of_poison():
    """Null requests and rows behind the last one, whatever x, the weight and the null slot hold there."""
    batch = dyadic([4, 6, 2], [0, 3, 0])
    batch.conv_state[0] = NAN
    x_TC = torch.cat((batch.x, torch.full((3, 16), float("inf"), dtype=batch.x.dtype)))
    x_TC[:4] = NAN
    weight_CK = batch.weight.clone()
    weight_CK[0] = float("inf")
    out_TC = varlen_short_conv(*batch._replace(x=x_TC, weight=weight_CK).conv_args)
    assert torch.equal(out_TC[:4], torch.zeros(4, 16, dtype=torch.bfloat16))
    assert torch.equal(out_TC[10:], torch.zeros(5, 16, dtype=torch.bfloat16))
    assert oracle.output_checksum(varlen_short_conv(*batch.conv_args)) == pytest.approx(485.332275, abs=1e-5)


@pytest.mark.parametrize("cuts", [[1] * 40, [8] * 5, [9, 31], [39, 1], [3, 3, 34], [20, 0, 20]], ids=str)
def test_chunks_equal_one_shot(cuts):
    whole = dyadic([40], [1], [0], pool_slots=3)
    expected = oracle.conv(*whole.conv_args)
    expected_pool = oracle.new_pool(*whole.update_args)
    start, chunks = 0, []
    for length in cuts:
        chunk = whole._replace(
            x=whole.x[start : start + length],
            query_start_loc=oracle.bounds([length]),
            has_initial_state=torch.tensor([start > 0]),
        )
        chunks.append(varlen_short_conv(*chunk.conv_args))
        update_conv_state(*chunk.update_args)
        start += length
    assert torch.equal(torch.cat(chunks), expected)
    assert torch.equal(whole.conv_state, expected_pool)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_state_of_another_dtype(dtype, state_dtype):
    """Random data cut at 20 of 40 tokens: only a state narrower than x changes the rows that read it."""
    torch.manual_seed(0)
    batch = dyadic([40], [1], [0], dtype=dtype, state_dtype=state_dtype, pool_slots=3)
    batch = batch._replace(x=torch.randn(40, 16).to(dtype))
    whole = oracle.conv(*batch.conv_args)
    first = batch._replace(x=batch.x[:20], query_start_loc=oracle.bounds([20]))
    second = first._replace(x=batch.x[20:], has_initial_state=torch.tensor([True]))
    update_conv_state(*first.update_args)
    expected = oracle.conv(*second.conv_args)
    actual = varlen_short_conv(*second.conv_args)
    assert_same(actual, expected)
    torch.testing.assert_close(actual[9:], whole[29:], rtol=1e-6, atol=1e-7)
    # What one shot has in fp32, these rows read back from bf16 or fp16.
    is_lossy = torch.finfo(state_dtype).eps > torch.finfo(dtype).eps
    assert is_lossy == (not torch.allclose(actual[:9], whole[20:29], rtol=1e-6, atol=1e-7))


def column_slice(x_TC):
    wide = torch.full((x_TC.shape[0], 3 * x_TC.shape[1]), NAN, dtype=x_TC.dtype)
    wide[:, 16:32] = x_TC
    return wide[:, 16:32]


def transposed_storage(x_TC):
    return x_TC.t().contiguous().t()


def every_other_row(x_TC):
    return x_TC.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("strided", [column_slice, transposed_storage, every_other_row])
def test_strided_x(strided):
    batch = dyadic([5, 9, 10], [1, 2, 3], [1, 1, 0], width=14, layout="SD")
    strided_batch = batch._replace(
        x=strided(batch.x),
        weight=batch.weight.t().contiguous().t(),
        state_indices=batch.state_indices.repeat_interleave(3)[::3],
    )
    assert not strided_batch.x.is_contiguous()
    assert torch.equal(varlen_short_conv(*strided_batch.conv_args), oracle.conv(*batch.conv_args))


def test_one_row_and_one_channel_repeated():
    """Strides that ``is_contiguous`` does not tell apart, and a channel stride of 0."""
    one = dyadic([1], [1])
    row = one.x.t().contiguous().as_strided((1, 16), (1, 1))
    assert torch.equal(varlen_short_conv(*one._replace(x=row).conv_args), oracle.conv(*one.conv_args))
    batch = dyadic([5, 9], [1, 2])
    expanded = batch._replace(x=batch.x[:, :1].expand(-1, 16))
    assert torch.equal(varlen_short_conv(*expanded.conv_args), oracle.conv(*expanded.conv_args))


def test_offsets_beyond_int32():
    """Rows a million elements apart; only the pages that are written exist."""
    lens = [2150, 50]
    far_TC = torch.empty_strided((2200, 16), (1_000_000, 1), dtype=torch.bfloat16)
    far_TC.copy_(torch.randn(2200, 16))
    batch = dyadic(lens, [1, 2])
    out_TC = varlen_short_conv(*batch._replace(x=far_TC).conv_args)
    assert torch.equal(out_TC, oracle.conv(*batch._replace(x=far_TC.contiguous()).conv_args))


@pytest.mark.parametrize("shape", [dict(lens=[], slots=[]), dict(lens=[0, 0, 0], slots=[1, 2, 3])], ids=str)
def test_nothing_to_do(shape):
    batch = dyadic(**shape)
    before = batch.conv_state.clone()
    assert varlen_short_conv(*batch.conv_args).shape == (0, 16)
    update_conv_state(*batch.update_args)
    assert torch.equal(batch.conv_state, before)


def test_scratch_memory_follows_tokens():
    """One long request among many short ones: the padded form would take N x L x C elements, 160 times x."""
    lens = [5000, *[1] * 199]
    batch = dyadic(lens, list(range(1, 201)), pool_slots=3000, layout="SD")
    with torch.profiler.profile(profile_memory=True) as profile:
        varlen_short_conv(*batch.conv_args)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 8 * batch.x.numel()
