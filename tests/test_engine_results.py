"""The unmodified engine bodies, rewritten, against the same bodies in eager: bit for bit, pool included.

Expected checksums are those of the per-request definition on exact data; see ``oracle.dyadic``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from engine_bodies import BODIES, call_body, load_body
from recorded import Recorded, recording

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Engine:
    """One body, eager and compiled, with a record of every graph that was compiled."""

    body: Any
    compiled: Any
    recorded: Recorded

    def check(self, batch: oracle.Batch, decode_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Run both on copies of ``batch``, compare, and return the compiled result and pool."""
        results = []
        for method in (self.body, self.compiled):
            given = copy.deepcopy(batch)
            lengths = given.query_start_loc.diff()
            torch._dynamo.mark_static(given.weight)
            output = call_body(
                method,
                given.x,
                given.query_start_loc,
                int(lengths.max()) if len(lengths) else 0,
                given.weight,
                given.conv_state,
                given.state_indices,
                given.has_initial_state,
                given.dilation,
                decode_tokens,
            )
            results.append((output, given.conv_state))
        (expected, expected_pool), (output, pool) = results
        if batch.x.dtype is torch.float32:
            torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert same_bits(output, expected)
        assert same_bits(pool, expected_pool)
        self.all_rewritten()
        return output, pool

    def all_rewritten(self) -> None:
        """No graph kept its padded convolution."""
        assert self.recorded.codes == []
        assert len(self.recorded.rewrites) == sum("aten.convolution" in text for text in self.recorded.before)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shapes and values; NaN equals NaN."""
    return (
        left.shape == right.shape
        and torch.equal(left.isnan(), right.isnan())
        and torch.equal(left.masked_fill(left.isnan(), 0), right.masked_fill(right.isnan(), 0))
    )


# Of the four bodies these two differ; the others are the first one, which a test below makes sure of.
DISTINCT = (BODIES[0], BODIES[-1])


@pytest.fixture(scope="module", params=DISTINCT, ids=lambda body: "-".join(body))
def engine(request):
    with compiled_body(*request.param) as engine:
        yield engine


@contextmanager
def compiled_body(release: str, vendor: str) -> Iterator[Engine]:
    """A body, compiled afresh, for as many shapes and dtypes as a test asks for."""
    body = load_body(release, vendor)
    recorded = Recorded()
    limits = torch._dynamo.config.patch(recompile_limit=128, fail_on_recompile_limit_hit=True)
    torch._dynamo.reset()
    with recording(recorded), limits:
        yield Engine(body, torch.compile(body, dynamic=True), recorded)


@pytest.fixture(params=["SD", "DS"])
def layout(request):
    return request.param


# (case, lengths, slots, has_initial_state, more, checksum of the output in bf16, of the pool)
CASES = [
    ("C1", [0, 5, 0, 0, 7, 0], [1, 2, 3, 4, 5, 6], [1] * 6, {}, 833.032471, -993),
    ("C2", [1, 2, 3, 8], [1, 2, 3, 4], [1, 1, 0, 0], {}, 491.733887, -3282),
    ("C5", [4, 6, 2], [0, 3, 0], [1, 1, 1], {}, 485.332275, -1523),
    ("C9", [5, 9, 10], [1, 2, 3], [1, 1, 0], dict(width=14), 1878.307373, -468),
    *(
        (f"C13-{taps}-{dilation}", [5, 11, 7], [1, 2, 3], [1, 0, 1],
         dict(taps=taps, dilation=dilation, pool_slots=4, width=max((taps - 1) * dilation, 1)), output, state)
        for (taps, dilation), output, state in zip(
            [(2, 1), (3, 2), (4, 3), (4, 1), (5, 2), (1, 1)],
            [1369.466553, 1543.449219, 1810.474854, 2876.526123, 2396.991943, 713.953613],
            [-750, -1659, 1039, -324, 387, -578],
            strict=True,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_case(engine, layout, case, dtype):
    _, lens, slots, has, more, output_sum, state_sum = case
    batch = oracle.dyadic(lens, slots, has, layout=layout, dtype=dtype, **more)
    output, pool = engine.check(batch)
    if dtype is torch.bfloat16:
        assert oracle.output_checksum(output) == pytest.approx(output_sum, abs=1e-6)
        assert oracle.state_checksum(pool) == state_sum


@pytest.mark.parametrize("body", [body for body in BODIES if body not in DISTINCT], ids="-".join)
def test_the_other_bodies_are_the_first_one(body, layout):
    assert load_body(*body).__code__.co_code == load_body(*BODIES[0]).__code__.co_code
    assert load_body(*body).__code__.co_consts == load_body(*BODIES[0]).__code__.co_consts
    with compiled_body(*body) as engine:
        for _, lens, slots, has, more, output_sum, state_sum in CASES[:4]:
            output, pool = engine.check(oracle.dyadic(lens, slots, has, layout=layout, **more))
            assert oracle.output_checksum(output) == pytest.approx(output_sum, abs=1e-6)
            assert oracle.state_checksum(pool) == state_sum


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_data(engine, layout, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 40, (7,), generator=generator).tolist()
    batch = oracle.dyadic(
        lens, [1, 2, 0, 4, 5, 6, 0], [1, 0, 1, 1, 0, 1, 1], layout=layout, channels=40, width=11
    )
    random = {
        name: (torch.randn(value.shape, generator=generator) * 2).to(dtype)
        for name, value in (("x", batch.x), ("weight", batch.weight))
    }
    pool = torch.empty_like(batch.conv_state, dtype=dtype).normal_(generator=generator)
    engine.check(batch._replace(conv_state=pool, **random))


def test_mixed_batch_behind_decode_tokens(engine, layout):
    """C1: the prefills' offsets start after three decode tokens."""
    engine.check(oracle.dyadic([3, 0, 8], [1, 2, 3], layout=layout), decode_tokens=3)


@pytest.mark.parametrize("lens", [[0, 0, 0], [], [0]], ids=str)
def test_no_tokens(engine, layout, lens):
    """C1: nothing to convolve."""
    batch = oracle.dyadic(lens, list(range(1, len(lens) + 1)), layout=layout)
    output, pool = engine.check(batch)
    assert output.shape == (0, 16)
    assert torch.equal(pool, batch.conv_state)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_recycled_slots_do_not_leak(engine, layout, poison):
    """C4: a pool full of its previous owners' NaN, and no initial state."""
    batch = oracle.dyadic([3, 4], [1, 2], [0, 0], layout=layout)
    batch.conv_state.fill_(poison)
    output, pool = engine.check(batch)
    assert output.isfinite().all()
    assert pool[1:3].isfinite().all()
    assert not pool[3:].isfinite().any()


def test_poisoned_null_slot(engine, layout):
    """C5: null rows are exactly zero and slot 0 keeps its content."""
    batch = oracle.dyadic([4, 6, 2], [0, 3, 0], layout=layout)
    batch.conv_state[0] = float("nan")
    output, pool = engine.check(batch)
    assert torch.count_nonzero(output[:4]) == torch.count_nonzero(output[10:]) == 0
    assert pool[0].isnan().all()


@pytest.mark.parametrize("cuts", [[1] * 40, [8] * 5, [9, 31], [39, 1], [3, 3, 34], [20, 0, 20]], ids=str)
def test_chunks_continue(engine, cuts):
    """C6: a prompt in chunks gives what it gives in one step."""
    whole = oracle.dyadic([40], [1], [0], pool_slots=3)
    output, pool = engine.check(whole)
    assert oracle.output_checksum(output) == pytest.approx(4154.036621, abs=1e-6)
    assert oracle.state_checksum(pool) == 759
    state, parts, start = whole.conv_state, [], 0
    for length in cuts:
        chunk = whole._replace(
            x=whole.x[start : start + length],
            query_start_loc=oracle.bounds([length]),
            conv_state=state,
            has_initial_state=torch.tensor([start > 0]),
        )
        part, state = engine.check(chunk)
        parts.append(part)
        start += length
    assert torch.equal(torch.cat(parts), output)
    assert torch.equal(state, pool)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_state_in_another_dtype(engine, layout, dtype, state_dtype):
    """C8: rounded on the way in and on the way out."""
    batch = oracle.dyadic([20, 2, 0], [1, 2, 3], layout=layout, dtype=dtype, state_dtype=state_dtype)
    pool = torch.empty_like(batch.conv_state).normal_(generator=torch.Generator().manual_seed(1))
    engine.check(batch._replace(conv_state=pool, x=torch.randn(22, 16).to(dtype)))


def column_slice(x_TC):
    return torch.cat((x_TC, x_TC, x_TC), 1)[:, 16:32]


def transposed_storage(x_TC):
    return x_TC.t().contiguous().t()


def expanded_channels(x_TC):
    return x_TC[:, :1].expand(-1, 16)


@pytest.mark.parametrize("strides", [column_slice, transposed_storage, expanded_channels])
def test_strides_of_x(engine, layout, strides):
    """C9: any layout of x gives what its contiguous clone gives."""
    batch = oracle.dyadic([5, 9, 10], [1, 2, 3], [1, 1, 0], layout=layout, width=14)
    strided = batch._replace(x=strides(batch.x))
    contiguous = batch._replace(x=strides(batch.x).contiguous())
    for left, right in zip(engine.check(strided), engine.check(contiguous), strict=True):
        assert torch.equal(left, right)


def test_one_token_with_stride_one(engine, layout):
    """C9: a single row whose strides (1, 1) pass for contiguous."""
    batch = oracle.dyadic([1], [1], layout=layout)
    engine.check(batch._replace(x=batch.x.t().contiguous().t()))


def test_pool_without_slots(engine):
    """A profiling run has no pool yet: the history is zeros and nothing is written."""
    batch = oracle.dyadic([5, 7], [1, 2], pool_slots=0)
    output, pool = engine.check(batch)
    zeros = oracle.conv(batch.x, batch.weight, batch.query_start_loc, None, None, None, batch.live, 3, "silu")
    assert torch.equal(output, zeros)
    assert pool.shape[0] == 0
