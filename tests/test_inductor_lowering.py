"""The generated CPU code: bit-equal to the oracle and to the operators in plain torch; what it allocates."""

from __future__ import annotations

import re

import hypothesis
import hypothesis.strategies as st
import oracle
import pytest
import torch
from oracle import Batch, dyadic
from ragged_batches import NAN, assert_same
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from ple_inductor.lowerings.inductor import register

CONV = torch.ops.ple_inductor.varlen_short_conv.default
UPDATE = torch.ops.ple_inductor.update_conv_state.default
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def fresh_compiles():
    """The lowerings are registered, and no graph comes from a cache that does not know them."""
    register()
    register()
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
    ):
        yield


def compiled_conv(dynamic=True):
    return torch.compile(lambda *arguments: CONV(*arguments), dynamic=dynamic)


def random_batch(lens, seed=0, **options) -> Batch:
    """Random values, a slot for each request, and every second request without an initial state."""
    slots = [n % 5 + 1 for n in range(len(lens))]
    batch = dyadic(lens, slots, [n % 2 for n in range(len(lens))], **options)
    generator = torch.Generator().manual_seed(seed)
    fill = {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in batch._asdict().items()
        if name in ("x", "weight")
    }
    batch.conv_state.copy_(torch.randn(batch.conv_state.shape, generator=generator))
    return batch._replace(**fill, state_indices=torch.tensor(slots, dtype=torch.int32))


# What is compiled apart: dtypes, layouts, absent arguments, the number of taps.
VARIANTS = {
    "all": dict(layout="SD"),
    "fp16": dict(dtype=FP16, state_dtype=BF16, width=14, absent=("live", "has_initial_state")),
    "fp32": dict(dtype=FP32, state_dtype=BF16, layout="SD", absent=("live",)),
    "wide_state": dict(state_dtype=FP32, width=11, index_dtype=torch.int64, absent=("has_initial_state",)),
    "no_state": dict(dtype=FP16, absent=("conv_state", "state_indices", "has_initial_state", "live")),
    "one_tap": dict(taps=1, width=2, activation="none"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_lengths_in_one_compile(variant):
    """Lengths around S, dead requests and odd slots, by code compiled once; 40 channels leave a remainder."""
    options = dict(VARIANTS[variant])
    absent, index_dtype = options.pop("absent", ()), options.pop("index_dtype", torch.int32)
    compiled = compiled_conv()

    def run(batch):
        batch = batch._replace(
            query_start_loc=batch.query_start_loc.to(index_dtype),
            state_indices=batch.state_indices.to(index_dtype),
        )._replace(**dict.fromkeys(absent))
        actual = compiled(*batch.conv_args)
        assert_same(actual, oracle.conv(*batch.conv_args))
        assert_same(actual, CONV(*batch.conv_args))

    # No two sizes are equal here: torch gives equal sizes one symbol, and the number of taps is specialised.
    run(random_batch([20, 0, 1, 8, 9, 10], channels=40, pool_slots=17, **options))

    @hypothesis.given(st.lists(st.sampled_from([0, 1, 2, 8, 9, 10, 33]), min_size=2, max_size=9), st.data())
    @hypothesis.settings(max_examples=40, deadline=None)
    def check(lens, data):
        hypothesis.assume(sum(lens) > 1)
        batch = random_batch(lens, seed=len(lens), channels=40, pool_slots=17, **options)
        flags = st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))
        slot = st.sampled_from([0, 1, 16, 17, -1])
        tail = data.draw(st.sampled_from([0, 3]))
        batch.live.copy_(torch.tensor(data.draw(flags)))
        batch.state_indices[data.draw(st.integers(0, len(lens) - 1))] = data.draw(slot)
        run(batch._replace(x=torch.cat((batch.x, torch.full((tail, 40), NAN, dtype=batch.x.dtype)))))

    with torch._dynamo.config.patch(error_on_recompile=True):
        check()


def test_rounding_is_seen_by_these_tests():
    """Without the rounding in front of the activation the random data would give another result."""
    batch = random_batch([50, 20], channels=40)
    unrounded = batch._replace(
        **{name: getattr(batch, name).float() for name in ("x", "weight", "conv_state")}
    )
    assert not torch.equal(oracle.conv(*unrounded.conv_args).bfloat16(), oracle.conv(*batch.conv_args))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_through_the_activation(dtype):
    """All 65,536 values of the dtype, one tap of weight 1: the bits of torch's silu, NaN and inf included."""
    x_TC = torch.arange(1 << 16).to(torch.int16).view(dtype).view(1024, 64)
    bounds = oracle.bounds([1000, 24])
    out_TC = compiled_conv()(x_TC, torch.ones(64, 1, dtype=dtype), bounds, None, None, None, None, 1, "silu")
    torch.testing.assert_close(out_TC, torch.nn.functional.silu(x_TC), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lens", [[], [0, 0], [1], [3], [2, 1, 1], [5, 11, 7, 40]], ids=str)
def test_static_shapes(lens):
    batch = random_batch(lens, channels=16, width=11)
    assert_same(compiled_conv(dynamic=False)(*batch.conv_args), oracle.conv(*batch.conv_args))


def test_sizes_that_turn_out_zero():
    """Compiled for sizes that nothing is known of: N, T and the pool may then be empty."""
    compiled = compiled_conv()
    steps = [[5, 0, 9, 1], [], [0, 0], [1], [40, 2, 13]]
    for lens, slots, tail in [(lens, slots, tail) for lens in steps for slots in (9, 0) for tail in (0, 2)]:
        batch = random_batch(lens, channels=40, pool_slots=slots)
        batch = batch._replace(x=torch.cat((batch.x, torch.full((tail, 40), NAN, dtype=BF16))))
        for value in (*batch[:1], *batch[2:7]):
            torch._dynamo.decorators.mark_unbacked(value, 0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same(compiled(*batch.conv_args), oracle.conv(*batch.conv_args))


def test_nothing_is_specialised():
    """T, N, C, slots, W and the dilation change without another compile."""
    compiled = compiled_conv()
    compiled(*random_batch([7, 11, 3, 2, 5], channels=40, dilation=3, pool_slots=8, width=14).conv_args)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lens, channels, dilation in (([30, 2], 24, 2), ([1] * 25, 7, 5), ([4, 4, 4, 4], 4, 4)):
            batch = random_batch(lens, channels=channels, dilation=dilation, pool_slots=9, width=19)
            assert_same(compiled(*batch.conv_args), oracle.conv(*batch.conv_args))


def column_slice(x_TC):
    return torch.cat((x_TC, x_TC, x_TC), 1)[:, 16:32]


def transposed_storage(x_TC):
    return x_TC.t().contiguous().t()


def one_channel_repeated(x_TC):
    return x_TC[:, :1].expand(-1, x_TC.shape[1])


@pytest.mark.parametrize("strided", [column_slice, transposed_storage, one_channel_repeated])
def test_strided_operands_are_read_where_they_are(strided):
    batch = random_batch([5, 9, 10, 0, 1, 4], channels=16, width=14, layout="SD")
    strided_batch = batch._replace(
        x=strided(batch.x),
        weight=batch.weight.t().contiguous().t(),
        state_indices=batch.state_indices.repeat_interleave(3)[::3],
    )
    out_TC, (code,) = run_and_get_code(compiled_conv(), *strided_batch.conv_args)
    assert_same(out_TC, oracle.conv(*strided_batch.conv_args))
    assert len(token_buffers(code)) == 1


def test_rows_far_apart():
    """Offsets beyond int32; only the pages that are written exist."""
    far_TC = torch.empty_strided((2200, 16), (1_000_000, 1), dtype=BF16)
    batch = random_batch([2150, 50], channels=16)
    far_TC.copy_(batch.x)
    out_TC = compiled_conv()(*batch._replace(x=far_TC).conv_args)
    assert_same(out_TC, oracle.conv(*batch.conv_args))


def test_lazy_operands_are_computed_once():
    """x, the bounds and the flags are themselves results of the compiled graph."""

    def step(x_TC, weight_CK, lens, conv_state, slots, has_initial):
        bounds = torch.cat((lens.new_zeros(1), lens.cumsum(0))).to(torch.int32)
        live = slots != 0
        out_TC = CONV(
            torch.sin(x_TC), weight_CK, bounds, conv_state, slots, has_initial & live, live, 3, "silu"
        )
        return out_TC * 2

    batch = random_batch([5, 0, 12], channels=40)
    lens = batch.query_start_loc.diff()
    arguments = (batch.x, batch.weight, lens, batch.conv_state, batch.state_indices, batch.has_initial_state)
    out_TC, (code,) = run_and_get_code(torch.compile(step, dynamic=True), *arguments)
    assert torch.equal(out_TC, step(*arguments))
    assert len(re.findall(r"\.sin\(\)", code)) <= 2  # the vectorized body and its remainder
    assert len(token_buffers(code)) == 3


def token_buffers(code):
    """The sizes of the [T, C] buffers that the wrapper makes: alone in having two sizes and x's dtype."""
    return re.findall(r"empty_strided_cpu\(\((\w+, \w+)\), \(\w+, 1\), torch.bfloat16\)", code)


def test_memory_follows_tokens():
    """A step of 8 MiB with one long request: peak as generated is the output and vectors of T."""
    batch = random_batch([3800, *[40] * 7], channels=1024, pool_slots=2000, layout="SD")
    compiled = compiled_conv()
    compiled(*batch.conv_args)
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(*batch.conv_args)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    one = batch.x.numel() * batch.x.itemsize
    assert one <= allocated <= 1.05 * one


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_state_is_written_in_place(layout):
    """Both operators in one graph, as a user calls them: no buffer follows the slots, and no loop does."""

    def step(x_TC, weight_CK, bounds, conv_state, slots, has_initial, live, dilation, activation):
        out_TC = CONV(x_TC, weight_CK, bounds, conv_state, slots, has_initial, live, dilation, activation)
        UPDATE(conv_state, x_TC, bounds, slots, has_initial, live, (weight_CK.shape[1] - 1) * dilation)
        return out_TC

    batch = random_batch([5, 0, 12, 1, 3], channels=40, pool_slots=4096, width=14, layout=layout)
    expected, expected_pool = oracle.conv(*batch.conv_args), oracle.new_pool(*batch.update_args)
    out_TC, (code,) = run_and_get_code(torch.compile(step, dynamic=True), *batch.conv_args)
    assert_same(out_TC, expected)
    assert torch.equal(batch.conv_state, expected_pool)
    assert "update_conv_state.default(arg" in code
    (slots,) = re.search(r"assert_size_stride\(\w+, \((s\d+), s\d+, s\d+\)", code).groups()
    assert not any(slots in line for line in code.splitlines() if "empty_strided" in line)


def post_grad_graph(write_state, conv_state, log, batch):
    """A graph as a rewrite leaves it: the pool's old value is read lazily by what follows the write."""

    def step(conv_state, log, x_TC, *requests):
        doubled = conv_state * 2
        write_state(conv_state, x_TC, requests)
        log.copy_(doubled)
        return (x_TC + 1,)

    requests = (batch.query_start_loc, batch.state_indices, batch.has_initial_state, batch.live)
    arguments = [conv_state, log, batch.x, *requests]
    traced = make_fx(step, tracing_mode="fake")(*[value.clone() for value in arguments])
    with torch.no_grad():
        compile_fx_inner(traced, arguments)(list(arguments))


def contiguous(pool):
    return pool.contiguous()


def transposed(pool):
    return pool.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("stored", [contiguous, transposed])
def test_lazy_readers_of_the_old_pool_come_first(stored):
    batch = random_batch([5, 0, 9, 1], channels=16, width=12)
    pool = stored(batch.conv_state)
    expected, doubled, log = oracle.new_pool(*batch.update_args), pool * 2, torch.zeros_like(pool)
    post_grad_graph(lambda pool, x_TC, requests: UPDATE(pool, x_TC, *requests, 9), pool, log, batch)
    assert torch.equal(pool, expected)
    assert torch.equal(log, doubled)


@pytest.mark.parametrize("stored", [contiguous, transposed])
def test_a_slice_of_the_pool_is_written_in_place(stored):
    """Two layers side by side in one buffer, which is also read lazily before."""
    first, second = (random_batch(lens, channels=16, width=12) for lens in ([5, 9], [1, 3]))
    pool = stored(torch.cat((first.conv_state, second.conv_state), 1))
    expected = torch.cat([oracle.new_pool(*batch.update_args) for batch in (first, second)], 1)
    second_x, second_bounds = second.x, second.query_start_loc
    doubled, log = pool * 2, torch.zeros_like(pool)

    def write_both(pool, x_TC, requests):
        bounds, *others = requests
        UPDATE(pool[:, :16], x_TC[:14], bounds[:3], *(value[:2] for value in others), 9)
        UPDATE(pool[:, 16:], x_TC[14:], bounds[3:], *(value[2:] for value in others), 9)

    both = first._replace(
        x=torch.cat((first.x, second_x)),
        query_start_loc=torch.cat((first.query_start_loc, second_bounds)),
        state_indices=first.state_indices.repeat(2),
        has_initial_state=first.has_initial_state.repeat(2),
        live=first.live.repeat(2),
    )
    post_grad_graph(write_both, pool, log, both)
    assert torch.equal(pool, expected)
    assert torch.equal(log, doubled)
