"""``update_conv_state`` in plain torch: the whole pool equals the oracle's, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import oracle
import pytest
import torch
from oracle import dyadic
from ragged_batches import NAN, batches

from ple_inductor.lowerings.update_conv_state import update_conv_state


def bits(pool):
    """Its bytes, so that NaN compares too."""
    return pool.contiguous().view(torch.int16 if pool.dtype.itemsize == 2 else torch.int32)


@hypothesis.given(batches(), st.booleans(), st.booleans())
@hypothesis.settings(max_examples=200, deadline=None)
def test_equals_the_oracle(batch, with_has, with_update):
    if not with_has:
        batch = batch._replace(has_initial_state=None)
    if not with_update:
        # Without flags the null slot is a slot like any other, and only one request may name it.
        slots = batch.state_indices
        batch = batch._replace(live=None, state_indices=torch.where(slots == 0, -1, slots))
    expected = oracle.new_pool(*batch.update_args)
    strides, memory = batch.conv_state.stride(), batch.conv_state.data_ptr()
    update_conv_state(*batch.update_args)
    assert torch.equal(bits(batch.conv_state), bits(expected))
    assert (batch.conv_state.stride(), batch.conv_state.data_ptr()) == (strides, memory)


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("length", range(12))
def test_every_length_around_the_state(length, layout):
    """Shorter than S: the old columns move up and the new tokens follow; 0 leaves the state alone."""
    batch = dyadic([length, 2], [3, 5], pool_slots=7, width=11, layout=layout)
    expected = oracle.new_pool(*batch.update_args)
    update_conv_state(*batch.update_args)
    assert torch.equal(batch.conv_state, expected)


def test_a_moved_column_is_rounded_like_one_that_is_read():
    """An fp32 pool with bf16 tokens: the window is rounded to bf16, the columns behind it are not."""
    torch.manual_seed(0)
    batch = dyadic([2], [1], state_dtype=torch.float32, width=11)
    batch.conv_state.copy_(torch.randn(batch.conv_state.shape))
    before = batch.conv_state.clone()
    update_conv_state(*batch.update_args)
    assert torch.equal(batch.conv_state[1, :, :7], before[1, :, 2:9].bfloat16().float())
    assert not torch.equal(batch.conv_state[1, :, :7], before[1, :, 2:9])
    assert torch.equal(batch.conv_state[1, :, 9:], before[1, :, 9:])


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_unlisted_slots_keep_their_nans(layout):
    batch = dyadic([3, 0, 12, 5, 1], [2, 4, 6, 0, 7], [0, 1, 1, 1, 1], width=12, layout=layout)
    batch.live[4] = False
    batch.conv_state.fill_(NAN)
    batch.conv_state[6] = 1.0
    before = batch.conv_state.clone()
    update_conv_state(*batch.update_args)
    changed = (bits(batch.conv_state) != bits(before)).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [2, 6]
    assert torch.equal(bits(batch.conv_state[:, :, 9:]), bits(before[:, :, 9:]))
    assert batch.conv_state[[2, 6], :, :9].isfinite().all()


@pytest.mark.parametrize("slot", [-1, -12, 12, 2**31 - 1])
def test_a_slot_outside_the_pool_is_skipped(slot):
    batch = dyadic([4, 4], [1, 2])
    batch.state_indices[0] = slot
    expected = oracle.new_pool(*batch.update_args)
    update_conv_state(*batch.update_args)
    assert torch.equal(batch.conv_state, expected)
    assert torch.equal(batch.conv_state[-1], dyadic([4, 4], [1, 2]).conv_state[-1])


def test_two_views_of_one_storage():
    """Two layers keep their states side by side in one buffer."""
    storage = torch.full((12, 32, 9), NAN, dtype=torch.bfloat16)
    halves = [storage[:, :16], storage[:, 16:]]
    expected = []
    for half, lens in zip(halves, ([4, 12], [1, 3]), strict=True):
        batch = dyadic(lens, [3, 5])
        half.copy_(batch.conv_state)
        batch = batch._replace(conv_state=half)
        expected.append(oracle.new_pool(*batch.update_args))
        update_conv_state(*batch.update_args)
    assert torch.equal(storage, torch.cat(expected, 1))


READ_ONLY_POOL = """
import ctypes, mmap, sys
import torch
from oracle import dyadic, new_pool
from ple_inductor.lowerings.update_conv_state import update_conv_state

page, slots, listed = mmap.PAGESIZE, 64, (5, 9)
memory = mmap.mmap(-1, slots * page)
pool = torch.frombuffer(memory, dtype=torch.float32).view(slots, -1, 16)
if sys.argv[1] == "SD":
    pool = pool.view(slots, 16, -1).transpose(1, 2)
batch = dyadic([4, 12, 3, 0], [5, 9, 0, 20], channels=pool.shape[1], dtype=torch.float32, pool_slots=slots)
pool.copy_(torch.randn(pool.shape))
batch = batch._replace(conv_state=pool)
expected = new_pool(*batch.update_args)
libc = ctypes.CDLL(None, use_errno=True)
for slot in set(range(slots)) - set(listed):
    assert libc.mprotect(ctypes.c_void_p(pool[slot].data_ptr()), page, mmap.PROT_READ) == 0
update_conv_state(*batch.update_args)
assert torch.equal(pool, expected)
print("written")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_other_slots_are_not_even_rewritten(layout):
    """Each slot is a page, read-only unless it is listed: a store of the old value would kill the process."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY_POOL, layout],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "written"), done.stderr


def test_nothing_follows_the_number_of_slots():
    batch = dyadic([4, 2], [1, 2], channels=64, dtype=torch.float32, pool_slots=4096, layout="SD")
    with torch.profiler.profile(profile_memory=True) as profile:
        update_conv_state(*batch.update_args)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 2 * 9 * 64 * 4
