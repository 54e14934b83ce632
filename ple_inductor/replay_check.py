"""What one process can say of its own result: digests for others to compare, and an independent check.

The check computes each request alone, from its own unpadded rows: history in front, taps added in
float32 from the oldest on, one rounding to the dtype, SiLU in float32, one rounding. It shares no code
with the forms it judges, and works on blocks of channels so that it needs little memory. It is what makes
"same results" mean something when no padded form lives to be compared with.

Dimension key: T tokens, C channels, S state length, B channels of a block, n tokens of one request.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ple_inductor.replay_inputs import Inputs

_BLOCK_ELEMENTS = 2**24
_ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-6}
"""How far, relatively, the same sum in another order may end: two units in the last place of 16 bits."""
_CANCELLATION = 1e-6
"""The same, absolutely, where large terms leave a small sum."""


@dataclass(frozen=True)
class Check:
    """How a result compares with the independent one.

    Args:
        different: Output values whose bits differ.
        wrong: Output values that differ by more than another order of the same sum explains.
        largest: The largest absolute difference.
        state_equal: Whether every byte of the state pool is right.
    """

    different: int
    wrong: int
    largest: float
    state_equal: bool


def digest(tensor: Tensor) -> str:
    """SHA-256 over the values in row-major order."""
    values = tensor.detach().contiguous()
    size = values.numel() * values.element_size()
    return hashlib.sha256((ctypes.c_char * size).from_address(values.data_ptr())).hexdigest()


def check(out_TC: Tensor, pool_after: Tensor, pool_before: Tensor, inputs: Inputs) -> Check:
    """Compare an output and a state pool with each request computed alone.

    Args:
        out_TC: The output to judge.
        pool_after: The state pool ``[slots, C, W]`` to judge.
        pool_before: The pool as it was; overwritten with the right values.
        inputs: What the output came from; its own pool is not read.
    """
    different = wrong = 0
    largest = 0.0
    bounds = inputs.query_start_loc.tolist()
    for start, end, slot, continues in zip(
        bounds, bounds[1:], inputs.state_indices.tolist(), inputs.has_initial_state.tolist(), strict=False
    ):
        if start == end:
            continue
        block = max(1, _BLOCK_ELEMENTS // (end - start))
        for first in range(0, out_TC.shape[1], block):
            channels = slice(first, first + block)
            state = pool_before[slot, channels]
            right_nB = _request_alone(
                inputs.x_TC[start:end, channels],
                inputs.weight_CK[channels],
                state,
                continues,
                inputs.dilation,
            )
            got_nB = out_TC[start:end, channels]
            different += int((got_nB != right_nB).sum())
            error_nB = (got_nB.float() - right_nB.float()).abs()
            allowed_nB = _CANCELLATION + _ROUNDING[right_nB.dtype] * right_nB.float().abs()
            # Written so that a NaN counts as wrong.
            wrong += int((~(error_nB <= allowed_nB)).sum())
            largest = max(largest, float(error_nB.max()))
    return Check(different, wrong, largest, torch.equal(pool_after, pool_before))


def _request_alone(
    x_nB: Tensor, weight_BK: Tensor, state_BW: Tensor, continues: bool, dilation: int
) -> Tensor:
    """The right output of one request; ``state_BW`` gets the right new state."""
    length, taps = x_nB.shape[0], weight_BK.shape[1]
    state_len = (taps - 1) * dilation
    old_SB = state_BW[:, :state_len].T.to(x_nB.dtype)
    history = torch.cat((old_SB if continues else torch.zeros_like(old_SB), x_nB))
    total_nB = torch.zeros(x_nB.shape, dtype=torch.float32)
    for tap in range(taps):
        rows_nB = history[tap * dilation : tap * dilation + length].float()
        total_nB += rows_nB * weight_BK[:, tap].float()
    state_BW[:, :state_len] = history[length:].T
    return F.silu(total_nB.to(x_nB.dtype))
