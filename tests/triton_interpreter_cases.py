"""Cases for the Triton kernels in the interpreter; ``test_triton_interpreter.py`` runs this file in a child.

To run some by hand: ``TRITON_INTERPRET=1 pytest tests/triton_interpreter_cases.py -k taps``.

Uninitialised floats are NaN here, so an output element that no program writes shows, and every launch grid is
checked. The interpreter truncates where it rounds fp32 to bf16, so arithmetic is in fp32 and fp16, and bf16
appears only with values that are exact in it; rounding on a GPU is in ``test_triton_compile.py``.

Dimension key: T tokens, N requests, C channels, K taps, S = (K - 1) * dilation state length, W state width.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from ple_inductor.lowerings import _short_conv_triton as kernels

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before these cases are collected"

RAGGED = [0, 1, 8, 9, 10, 0, 33, 2, 0]
NAN = float("nan")


class Launches:
    """A kernel that notes each grid it is launched on, and refuses one that no GPU accepts."""

    def __init__(self, kernel: Any, runs: bool = True) -> None:
        self.kernel, self.runs = kernel, runs
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert min(grid) > 0
        assert grid[0] * kernels.WARPS * 64 < 2**32
        assert max(grid[1:]) < 2**16
        self.grids.append(grid)
        return self.kernel[grid] if self.runs else lambda *args, **options: None


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def conv_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches(kernels.varlen_short_conv_kernel)
    monkeypatch.setattr(kernels, "varlen_short_conv_kernel", launches)
    return launches


@pytest.fixture(autouse=True)
def update_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches(kernels.update_conv_state_kernel)
    monkeypatch.setattr(kernels, "update_conv_state_kernel", launches)
    return launches


def check_conv(*args: Any, exact: bool = False) -> Tensor:
    out, expected = kernels.conv(*args), oracle.conv(*args)
    assert out.is_contiguous()
    rtol, atol = (0.0, 0.0) if exact else (1e-6, 2e-6)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol, equal_nan=True)
    return out


def check_update(*args: Any) -> None:
    expected = oracle.new_pool(*args)
    kernels.update(*args)
    assert torch.equal(bits(args[0]), bits(expected))


def check(step: oracle.Batch, *, exact: bool = False) -> Tensor:
    """Both kernels, the state bit for bit; returns the output."""
    out = check_conv(*step.conv_args, exact=exact)
    check_update(*step.update_args)
    return out


def bits(pool: Tensor) -> Tensor:
    """Every byte of the pool in logical order: NaN equals itself, and columns beyond S count."""
    return pool.contiguous().view(torch.uint8)


def exact_step(
    lens: list[int], slots: list[int] | None = None, has: Any = None, **options: Any
) -> oracle.Batch:
    slots = list(range(1, len(lens) + 1)) if slots is None else slots
    return oracle.dyadic(lens, slots, has, **{"dtype": torch.float32, "pool_slots": len(lens) + 2, **options})


def random_step(
    lens: list[int], slots: list[int] | None = None, has: Any = None, **options: Any
) -> oracle.Batch:
    """The same step with values whose sums do depend on the order of the taps."""
    step = exact_step(lens, slots, has, **options)
    generator = torch.Generator().manual_seed(0)
    for tensor in (step.x, step.weight, step.conv_state):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return step


@pytest.mark.parametrize("has", [None, [1, 0, 1, 1, 0, 1, 1, 1, 0]], ids=["all initial", "some initial"])
@pytest.mark.parametrize("width", [9, 14])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_lengths_around_the_state(layout: str, width: int, has: list[int] | None) -> None:
    check(random_step(RAGGED, None, has, layout=layout, width=width))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 150])
def test_one_request(length: int) -> None:
    check(random_step([length]))


def test_many_requests_in_one_tile() -> None:
    check(random_step([1] * 20 + [0, 0, 2, 0] * 5 + [3] * 7, has=[1, 0, 1, 1, 0, 1, 1] * 6 + [1] * 5))


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(
    ("taps", "dilation"), [(2, 1), (3, 2), (4, 3), (4, 1), (5, 2), (1, 1), (1, 4), (9, 5)]
)
def test_taps_and_dilation(taps: int, dilation: int, activation: str) -> None:
    options = {"taps": taps, "dilation": dilation, "activation": activation}
    # Without a compiler to contract a product and a sum, the same order of taps gives the same bits.
    check(random_step([5, 11, 7, 47], has=[1, 0, 1, 1], **options), exact=activation == "none")


@pytest.mark.parametrize("channels", [1, 3, 63, 65, 130, 300])
def test_channels_beside_the_block(channels: int) -> None:
    check(random_step([2, 40, 3], has=[1, 1, 0], channels=channels))


def test_null_slots_are_zero_and_untouched() -> None:
    step = random_step([4, 6, 2], [0, 3, 0])
    step.x[:4] = step.x[10:] = NAN
    step.conv_state[0] = NAN
    step.weight[1] = float("inf")
    out = check(step)
    assert (out[:4] == 0).all()
    assert (out[10:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_outside_the_pool_have_no_state(dtype: torch.dtype) -> None:
    step = random_step([3, 4, 5, 20, 6])
    beyond = step.conv_state.shape[0]
    slots = torch.tensor([-1, beyond, 2, torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)
    check(step._replace(state_indices=slots))


def test_absent_flags_mean_all_requests() -> None:
    step = random_step(RAGGED)
    x, weight, bounds, pool, slots, *_ = step
    check_conv(x, weight, bounds, pool, slots, None, None, 3, "silu")
    check_update(pool, x, bounds, slots, None, None, 9)


def test_without_a_pool_the_history_is_zero() -> None:
    step = random_step(RAGGED)
    valid = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    check_conv(step.x, step.weight, step.query_start_loc, None, None, None, None, 3, "silu")
    check_conv(step.x, step.weight, step.query_start_loc, None, None, None, valid, 3, "silu")


def test_recycled_slot_leaks_nothing() -> None:
    for left_behind in (NAN, float("inf")):
        step = random_step([3, 40], has=[0, 0])
        step.conv_state.fill_(left_behind)
        out = check(step)
        assert out.isfinite().all()
        assert step.conv_state[1:3].isfinite().all()


def test_rows_after_the_last_request_are_zero() -> None:
    step = random_step([5, 30, 40])
    step.x[36:] = NAN
    bounds = torch.tensor([0, 5, 36, 36], dtype=torch.int64)
    out = check(step._replace(query_start_loc=bounds))
    assert (out[36:] == 0).all()


def test_infinite_weight_meets_the_state_as_in_the_definition() -> None:
    step = random_step([12, 3, 40], has=[1, 0, 1])
    step.weight[2, 0] = step.weight[5, 3] = float("inf")
    check(step)


def x_in_a_wider_buffer(x_TC: Tensor) -> Tensor:
    return torch.cat((x_TC, x_TC.neg(), x_TC), dim=1)[:, x_TC.shape[1] : 2 * x_TC.shape[1]].neg_()


def x_transposed(x_TC: Tensor) -> Tensor:
    return x_TC.t().contiguous().t()


def x_with_a_channel_stride(x_TC: Tensor) -> Tensor:
    return torch.stack((x_TC, torch.full_like(x_TC, NAN)), dim=2)[:, :, 0]


def x_expanded(x_TC: Tensor) -> Tensor:
    return x_TC[:, :1].expand(x_TC.shape)


@pytest.mark.parametrize("view", [x_in_a_wider_buffer, x_transposed, x_with_a_channel_stride, x_expanded])
def test_strides_of_x(view: Any) -> None:
    step = random_step(RAGGED)
    check(step._replace(x=view(step.x)))


def test_one_row_with_unit_strides() -> None:
    step = random_step([1])
    check(step._replace(x=step.x.as_strided((1, 16), (1, 1))))


def test_strides_of_weight_and_pool() -> None:
    step = random_step(RAGGED)
    pool = torch.full((3, 11, 14, 16), NAN)
    pool[1, :, 2:11] = step.conv_state.transpose(1, 2)
    weight = step.weight.t().contiguous().t()
    check(step._replace(weight=weight, conv_state=pool[1, :, 2:].transpose(1, 2)))
    assert pool[::2].isnan().all()
    assert pool[1, :, :2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides_of_index_vectors(dtype: torch.dtype) -> None:
    step = random_step(RAGGED, has=[1, 0, 1, 1, 0, 1, 1, 1, 0])
    block_table = torch.full((len(RAGGED), 5), 1, dtype=dtype)
    block_table[:, 2] = step.state_indices
    step = step._replace(
        query_start_loc=step.query_start_loc.to(dtype).repeat_interleave(2)[::2],
        state_indices=block_table[:, 2],
        has_initial_state=step.has_initial_state.repeat_interleave(3)[::3],
        live=step.live.repeat_interleave(2)[::2],
    )
    check(step)


@pytest.mark.parametrize("state", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("x", [torch.float32, torch.float16])
def test_exact_state_of_another_dtype(x: torch.dtype, state: torch.dtype) -> None:
    check(exact_step([1, 5, 12, 9, 40], None, [1, 1, 0, 1, 1], dtype=x, state_dtype=state))


def test_wider_state_is_rounded_to_the_dtype_of_x() -> None:
    step = random_step([1, 5, 12, 9], dtype=torch.float16, state_dtype=torch.float32, activation="none")
    check(step, exact=True)
    assert torch.equal(step.conv_state[1], step.conv_state[1].half().float())


@pytest.mark.parametrize("cuts", [[1] * 40, [8] * 5, [9, 31], [39, 1], [3, 3, 34], [20, 0, 20]], ids=str)
def test_chunks_continue_where_the_last_one_ended(cuts: list[int]) -> None:
    whole = random_step([40], [1], [0])
    chunked = random_step([40], [1], [0])
    expected = check(whole)
    rows = []
    for i, x in enumerate(chunked.x.split(cuts)):
        initial = torch.tensor([i > 0])
        step = chunked._replace(x=x, query_start_loc=oracle.bounds([len(x)]), has_initial_state=initial)
        rows.append(kernels.conv(*step.conv_args))
        kernels.update(*step.update_args)
    assert torch.equal(torch.cat(rows), expected)
    assert torch.equal(bits(chunked.conv_state), bits(whole.conv_state))


@pytest.mark.parametrize("lens", [[], [0, 0, 0]], ids=["no requests", "empty requests"])
def test_no_tokens_launch_nothing(
    lens: list[int], conv_launches: Launches, update_launches: Launches
) -> None:
    step = random_step(lens)
    assert check(step).shape == (0, 16)
    assert conv_launches.grids == update_launches.grids == []


def test_no_requests_are_rows_of_zeros(conv_launches: Launches, update_launches: Launches) -> None:
    step = random_step([])
    out = check(step._replace(x=torch.full((5, 16), NAN)))
    assert torch.equal(out, torch.zeros(5, 16))
    assert conv_launches.grids == update_launches.grids == []


def test_empty_pool_and_no_channels(update_launches: Launches) -> None:
    step = random_step([3, 40])
    check(step._replace(conv_state=torch.empty(0, 16, 9)))
    check(step._replace(x=step.x[:, :0], weight=step.weight[:0], conv_state=step.conv_state[:, :0]))
    assert update_launches.grids == []


def test_token_tiles_continue_on_the_third_axis(
    monkeypatch: pytest.MonkeyPatch, conv_launches: Launches
) -> None:
    monkeypatch.setattr(kernels, "TILES_PER_AXIS", 2)
    check(random_step([100, 50]))
    assert conv_launches.grids == [(2, 1, 3)]


@pytest.mark.parametrize(("tokens", "channels"), [(2**31, 1), (2**31 - 1, 1), (3, 2**21)])
def test_grid_is_legal_and_covers_far_more_than_fits_here(
    tokens: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory behind these tensors is touched: x is one element, and the output is never written."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    launches = Launches(None, runs=False)
    monkeypatch.setattr(kernels, "varlen_short_conv_kernel", launches)
    x = torch.zeros(1, 1, dtype=torch.float16).expand(tokens, channels)
    weight = torch.zeros(1, 4, dtype=torch.float16).expand(channels, 4)
    kernels.conv(x, weight, torch.tensor([0, tokens]), None, None, None, None, 1, "none")
    ((tiles, blocks, folds),) = launches.grids
    assert tiles * folds * kernels.TOKENS_PER_TILE >= tokens
    assert blocks * kernels.CHANNELS_PER_TILE >= channels


def test_far_rows_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token offsets pass 2**31 elements; only the pages that are touched exist."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    step = exact_step([2150, 50], has=[1, 1], dtype=torch.float16, activation="none")
    far = torch.empty_strided((2200, 16), (1_000_000, 1), dtype=torch.float16).copy_(step.x)
    check(step._replace(x=far), exact=True)


def test_far_slots_and_columns_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot, channel and column offsets each pass 2**31 elements."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    step = exact_step([4, 20], [1, 2], dtype=torch.float16, channels=4, pool_slots=3, activation="none")
    for strides in ((1_200_000_000, 9, 1), (1, 800_000_000, 4), (4, 1, 300_000_000)):
        far = torch.empty_strided((3, 4, 9), strides, dtype=torch.float16).copy_(step.conv_state)
        check(step._replace(conv_state=far), exact=True)
