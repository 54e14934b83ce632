"""The state pool: written in place, only at the listed slots, after everyone who reads the old state."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import textwrap

import oracle
import pytest
import torch
from engine_bodies import call_body, load_body
from padded_variants import inputs, short_conv
from recorded import eager, record


def record_body(batch: oracle.Batch):
    """The engine's body over ``batch``, which it writes into."""
    torch._dynamo.mark_static(batch.weight)
    return record(
        load_body("0.29.0", "nvidia"),
        batch.x,
        batch.query_start_loc,
        int(batch.query_start_loc.diff().max()),
        batch.weight,
        batch.conv_state,
        batch.state_indices,
        batch.has_initial_state,
        batch.dilation,
        call=call_body,
    )


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_generated_code_allocates_and_loops_over_nothing_like_the_pool(layout):
    """D6: 4,096 slots, two requests. Sizes in the code are symbols; none belongs to the pool."""
    batch = oracle.dyadic(
        [30, 7], [100, 3000], channels=64, pool_slots=4096, layout=layout, dtype=torch.float32
    )
    recorded = record_body(batch)
    assert len(recorded.rewrites) == 1
    (code,) = recorded.code
    slots = re.search(r"assert_size_stride\(\w+, \((s\d+), 64, s\d+\)", code)[1]
    allocations = re.findall(r"empty_strided_cpu\((.*)\)", code)
    assert allocations
    assert not [allocation for allocation in allocations if slots in allocation]
    kernels = re.findall(r"^(\w+) = async_compile\.cpp_pybinding\(.*?r\'\'\'(.*?)\'\'\'", code, re.M | re.S)
    assert kernels
    for name, kernel in kernels:
        (arguments,) = re.findall(rf"^        {name}\((.*)\)$", code, re.M)
        sizes = [argument for argument in arguments.split(", ") if re.fullmatch(r"s\d+", argument)]
        bounds = re.findall(r"for\s*\(int64_t (?:.*?);(.*?);", kernel)
        assert bounds
        if slots in sizes:
            assert not [bound for bound in bounds if re.search(rf"\bks{sizes.index(slots)}\b", bound)]


WRITES_ONLY_LISTED = """
    import ctypes, mmap, sys
    import torch
    sys.path[:0] = {path!r}
    import oracle
    from test_state_pool import record_body

    slots, channels, width = 4096, 64, 9
    page, row = mmap.PAGESIZE, channels * width * 4
    memory = mmap.mmap(-1, slots * row)
    pool = torch.frombuffer(memory, dtype=torch.float32).view(slots, width, channels)
    pool.copy_(torch.randn(slots, width, channels, generator=torch.Generator().manual_seed(0)))
    listed = [100, 3000]
    batch = oracle.dyadic([30, 7, 4, 0], [*listed, 0, 5], channels=channels, dtype=torch.float32)
    batch = batch._replace(conv_state=pool.transpose(1, 2), x=torch.randn(41, channels))
    expected = oracle.new_pool(*batch.update_args)

    writable = set()
    for slot in listed:
        writable |= set(range(slot * row // page, (slot * row + row - 1) // page + 1))
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for at in range(slots * row // page):
        if at not in writable:
            assert libc.mprotect(ctypes.c_void_p(base + at * page), page, 1) == 0
    recorded = record_body(batch)
    assert len(recorded.rewrites) == 1, recorded.codes
    assert torch.equal(batch.conv_state, expected)
    assert not torch.equal(expected[100], oracle.dyadic([1], [1]).conv_state[1])
    print("only the listed slots")
"""


def test_pages_of_other_slots_may_be_read_only():
    """D6: every page without a listed slot is mapped read-only; a write there would kill the process.

    The null slot 0 and the slot of an empty request are among the protected ones.
    """
    script = textwrap.dedent(WRITES_ONLY_LISTED).format(
        path=[entry for entry in sys.path if "tests" in entry]
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-800:]}"
    assert done.stdout.strip() == "only the listed slots"


def reads_old_state_late(x, bounds, max_len, weight, pool, slots, has, dilation, other):
    """A second mutated input takes what the pool held before the step."""
    out = short_conv()(x, bounds, max_len, weight, pool, slots, has, dilation)
    return out, other


def two_layers_on_one_pool(x, bounds, max_len, weight, pool, slots, has, dilation):
    first = short_conv()(x, bounds, max_len, weight, pool, slots, has, dilation)[0]
    second = short_conv()(x, bounds, max_len, weight, pool, slots + len(has), has, dilation)[0]
    return first, second


def layers_with_pools_of_their_own(x, bounds, max_len, weight, pool, slots, has, dilation, other_pool):
    first = short_conv()(x, bounds, max_len, weight, pool, slots, has, dilation)[0]
    return short_conv()(first, bounds, max_len, weight, other_pool, slots, has, dilation)[0]


def copies_old_pool(x, bounds, max_len, weight, pool, slots, has, dilation, other):
    other.copy_(pool)
    return short_conv()(x, bounds, max_len, weight, pool, slots, has, dilation)[0]


def adds_old_rows(x, bounds, max_len, weight, pool, slots, has, dilation, other):
    old = pool[slots] * 2
    out = short_conv()(x, bounds, max_len, weight, pool, slots, has, dilation)[0]
    other[slots] += old
    return out


def returns_old_rows(x, bounds, max_len, weight, pool, slots, has, dilation, other):
    old = pool[slots] * 2
    return short_conv()(x, bounds, max_len, weight, pool, slots, has, dilation)[0], old


def returns_the_pool(x, bounds, max_len, weight, pool, slots, has, dilation, other):
    return short_conv()(x, bounds, max_len, weight, pool, slots, has, dilation)[0], pool


def check(fn, *args, rewrites: int, codes: tuple[str, ...] = ()) -> None:
    """``fn`` gives eager's result and leaves eager's arguments; so many rewrites and these refusals."""
    expected, expected_args = eager(fn, *args)
    given = copy.deepcopy(args)
    recorded = record(fn, *given)
    assert (len(recorded.rewrites), tuple(recorded.codes)) == (rewrites, codes)
    torch.testing.assert_close(recorded.output, expected, rtol=0, atol=0)
    for left, right in zip(given, expected_args, strict=True):
        assert not isinstance(left, torch.Tensor) or torch.equal(left, right)


@pytest.mark.parametrize("fn", [copies_old_pool, adds_old_rows, returns_old_rows, returns_the_pool])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_readers_of_the_old_state(fn, layout):
    x, bounds, max_len, weight, pool, *rest = inputs([5, 11, 7])
    if layout == "SD":
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    check(fn, x, bounds, max_len, weight, pool, *rest, torch.zeros_like(pool), rewrites=1)


def test_layers_with_pools_of_their_own():
    args = inputs([5, 11, 7])
    check(layers_with_pools_of_their_own, *args, args[4].flip(0), rewrites=2)


def test_two_layers_on_one_pool_are_refused():
    check(two_layers_on_one_pool, *inputs([5, 11, 7]), rewrites=0, codes=("new_state_read", "state_pool"))


def test_pools_that_are_views_of_one_storage():
    """D6: both stay in place, or nothing is rewritten; never a copy that is lost."""
    x, bounds, max_len, weight, pool, *rest = inputs([5, 11, 7])
    storage = torch.stack((pool, pool.flip(0)))
    expected_storage = storage.clone()
    args = (x, bounds, max_len, weight)
    expected = layers_with_pools_of_their_own(*args, expected_storage[0], *rest, expected_storage[1])
    recorded = record(layers_with_pools_of_their_own, *args, storage[0], *rest, storage[1])
    torch.testing.assert_close(recorded.output, expected, rtol=0, atol=0)
    assert torch.equal(storage, expected_storage)
    assert len(recorded.rewrites) + len(recorded.misses) == 2


def test_pool_transposed_inside_the_function():
    """The graph input is [slots, S, C]; the function views it as [slots, C, S]."""

    def transposed(x, bounds, max_len, weight, pool, *rest):
        return short_conv()(x, bounds, max_len, weight, pool.transpose(1, 2), *rest)

    x, bounds, max_len, weight, pool, *rest = inputs([5, 11, 7])
    check(transposed, x, bounds, max_len, weight, pool.transpose(1, 2).contiguous(), *rest, rewrites=1)


def assigned(pool, slots, rows):
    pool[slots] = rows


@pytest.mark.parametrize("lens", [[9], [1], [4, 7]], ids=str)
@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_assigned_by_index(lens, dynamic):
    """A single row reaches the pool without its unit axis."""
    fn = short_conv(write=assigned)
    args = inputs(lens)
    expected, expected_args = eager(fn, *args)
    recorded = record(fn, *args, dynamic=dynamic)
    assert (len(recorded.rewrites), recorded.codes) == (1, [])
    assert torch.equal(recorded.output[0], expected[0])
    assert torch.equal(args[4], expected_args[4])


def test_static_weight_over_symbolic_channels():
    """Nothing but the values at hand says that a static weight has one filter a channel: a guard does."""
    fn = short_conv(write_state=False)
    args = inputs([5, 11, 7])
    torch._dynamo.mark_static(args[3])
    recorded = record(fn, *args)
    assert (len(recorded.rewrites), recorded.codes) == (1, [])
    assert torch.equal(recorded.output[0], fn(*args)[0])
