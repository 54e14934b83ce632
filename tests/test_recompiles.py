"""A sweep over steps compiles a few times, and equal sizes at the first compile neither miss nor mislead."""

from __future__ import annotations

import oracle
import pytest
import torch
from engine_bodies import BODIES, load_body
from recorded import Recorded, recording
from test_engine_results import Engine

# D7
SWEEP = [[5, 17, 3, 2, 6], [6, 2], [7, 7, 7, 7], [30], [1, 1], [3] * 20, [100, 1, 1, 1, 1], [2, 2, 2]]


@pytest.fixture
def engine():
    """A body, compiled afresh for each test."""
    body = load_body(*BODIES[0])
    recorded = Recorded()
    torch._dynamo.reset()
    with recording(recorded):
        yield Engine(body, torch.compile(body, dynamic=True), recorded)
    torch._dynamo.reset()


def step(lens: list[int], channels: int = 24) -> oracle.Batch:
    return oracle.dyadic(lens, list(range(1, len(lens) + 1)), channels=channels, pool_slots=29)


def test_sweep_compiles_at_most_three_times(engine):
    for lens in SWEEP:
        engine.check(step(lens))
    assert len(engine.recorded.before) <= 3


@pytest.mark.parametrize(
    ("first", "channels"),
    [
        pytest.param([5, 11, 7], 24, id="requests+1 is taps"),
        pytest.param([5, 11, 7, 6], 24, id="requests is taps"),
        pytest.param([3, 5, 2, 6], 4, id="requests is channels is taps"),
        pytest.param([9, 4], 24, id="longest is state length"),
        pytest.param([3, 2], 24, id="longest is dilation"),
        pytest.param([4, 2], 24, id="longest is taps"),
        pytest.param([2, 1], 24, id="longest is requests"),
        pytest.param([30], 24, id="longest is tokens"),
        pytest.param([11, 13], 24, id="tokens is channels"),
        pytest.param([20, 9], 24, id="tokens is slots"),
        pytest.param([24, 3], 24, id="longest is channels"),
        pytest.param([1, 1], 24, id="longest is one"),
    ],
)
def test_colliding_sizes_at_the_first_compile(engine, first, channels):
    engine.check(step(first, channels))
    for lens in ([5, 17, 3, 2, 6], [6, 2], [1, 1]):
        engine.check(step(lens, channels))
