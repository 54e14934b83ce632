"""Inputs of a replay: the same tensors in every process for one step and seed.

The data is random, so that a wrong tap, a wrong row or a wrong rounding shows. The state pool has slots
that no request names, is stored token-major and seen transposed (the inference engine's default layout),
and is wider than the state, as with speculative decoding. ``warm_up_step`` gives the small step on which
a form is compiled first; its sizes are what keeps the measured call from compiling again.

Dimension key: T tokens, N requests, C channels, K taps, S state length, W state width.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from ple_inductor.padded_form import NULL_SLOT
from ple_inductor.step import Step

_EXTRA_SLOTS = 7
_EXTRA_COLUMNS = 5
_WARM_ELEMENTS = 2**18
"""Elements of a warm-up: few enough to cost nothing, enough that Inductor's code uses all threads."""


class Inputs(NamedTuple):
    """The arguments of ``padded_short_conv``, in its order."""

    x_TC: Tensor
    weight_CK: Tensor
    query_start_loc: Tensor
    conv_state: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    num_requests: int
    max_length: int
    dilation: int


def make_inputs(step: Step, seed: int = 0) -> Inputs:
    """Tensors of one step on the CPU; every other request continues an earlier one."""
    dtype = torch_dtype(step)
    generator = torch.Generator().manual_seed(seed)
    x_TC = torch.randn(step.tokens, step.channels, dtype=dtype, generator=generator)
    weight_CK = torch.randn(step.channels, step.kernel_size, dtype=dtype, generator=generator)
    # The weight of a model has one shape for life. Its K must not share a symbol with N, say.
    torch._dynamo.mark_static(weight_CK)
    ends = torch.tensor(step.lens).cumsum(0)
    order = torch.randperm(step.requests + _EXTRA_SLOTS - 1, generator=generator)
    return Inputs(
        x_TC=x_TC,
        weight_CK=weight_CK,
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32),
        conv_state=make_pool(step, seed),
        state_indices=(order[: step.requests] + NULL_SLOT + 1).to(torch.int32),
        has_initial_state=torch.arange(step.requests) % 2 == 0,
        num_requests=step.requests,
        max_length=step.longest,
        dilation=step.dilation,
    )


def make_pool(step: Step, seed: int = 0) -> Tensor:
    """The state pool ``[slots, C, W]`` as it is before the step."""
    generator = torch.Generator().manual_seed(seed + 1)
    slots, width = step.requests + _EXTRA_SLOTS, step.state_len + _EXTRA_COLUMNS
    stored = torch.randn(slots, width, step.channels, dtype=torch_dtype(step), generator=generator)
    return stored.transpose(1, 2)


def torch_dtype(step: Step) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[step.dtype]


def warm_up_step(step: Step) -> Step:
    """A small step that compiles to the code which ``step`` will run.

    Equal sizes get one symbol and a size of 1 becomes a constant, so here every size differs from every
    other, and is 1 just where the step's is.
    """
    state_len = step.state_len
    fixed = {step.channels, step.kernel_size, step.dilation, state_len, state_len + _EXTRA_COLUMNS}
    for more in count():
        warm = Step(_warm_lens(step, more), step.channels, step.dtype, step.kernel_size, step.dilation)
        if step.requests == 1:
            # Then only the length varies from step to step, and it is the tokens as well.
            varying = [warm.longest]
        else:
            varying = [warm.requests, warm.requests + 1, warm.requests + _EXTRA_SLOTS]
            varying += [size for size in (warm.longest, warm.tokens) if size != 1]
        if len(set(varying)) == len(varying) and (varying == [1] or not fixed & set(varying)):
            return warm
    raise AssertionError("unreachable")


def _warm_lens(step: Step, more: int) -> tuple[int, ...]:
    long = max(67, _WARM_ELEMENTS // step.channels) + 2 * more
    if step.requests == 1:
        return (1,) if step.longest == 1 else (long,)
    if step.tokens == 1:
        return (0,) * (4 + more) + (1,)
    if step.longest == 1:
        return (1, 0, 1) * (5 + more)
    return (11, long, 7) + (2,) * (2 + more)
