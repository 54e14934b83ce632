"""Both operators refuse wrong arguments in one line, fake tensors too, and pass torch's operator checks."""

from __future__ import annotations

import pytest
import torch
from oracle import dyadic
from ragged_batches import DTYPES
from torch._subclasses import FakeTensorMode

from ple_inductor.lowerings.update_conv_state import update_conv_state
from ple_inductor.lowerings.varlen_short_conv import varlen_short_conv

BFLOAT = torch.bfloat16
CONV = ("x", "weight", "query_start_loc", "conv_state", "state_indices", "has_initial_state", "valid")
UPDATE = (
    "conv_state",
    "x",
    "query_start_loc",
    "state_indices",
    "has_initial_state",
    "update",
    "state_len",
)


def conv_arguments(dtype=BFLOAT):
    batch = dyadic([3, 0, 2], [1, 2, 0], channels=8, taps=3, dilation=2, dtype=dtype, layout="SD", width=6)
    return dict(zip((*CONV, "dilation", "activation"), batch.conv_args, strict=True))


def update_arguments(dtype=BFLOAT):
    batch = dyadic([3, 0, 2], [1, 2, 0], channels=8, taps=3, dilation=2, dtype=dtype, layout="SD", width=6)
    return dict(zip(UPDATE, batch.update_args, strict=True))


WRONG_FOR_BOTH = [
    ("x has 3 dimensions, expected 2", dict(x=torch.zeros(5, 8, 1))),
    ("x has dtype torch.float64, expected bfloat16", dict(x=torch.zeros(5, 8).double())),
    ("query_start_loc is empty", dict(query_start_loc=torch.zeros(0).int())),
    (
        "query_start_loc has dtype torch.float32, expected int32 or int64",
        dict(query_start_loc=torch.zeros(4)),
    ),
    ("state_indices has 2 entries for 3 requests", dict(state_indices=torch.zeros(2).int())),
    ("has_initial_state has dtype torch.float32, expected bool", dict(has_initial_state=torch.zeros(3))),
    ("conv_state has 4 channels but x has 8", dict(conv_state=torch.zeros(4, 4, 8))),
    ("conv_state is 3 columns wide, expected at least 4", dict(conv_state=torch.zeros(4, 8, 3))),
    ("conv_state is on meta but x is on cpu", dict(conv_state=torch.zeros(4, 8, 4, device="meta"))),
]
WRONG_FOR_CONV = [
    ("weight has 7 channels but x has 8", dict(weight=torch.zeros(7, 3, dtype=BFLOAT))),
    ("weight has no taps", dict(weight=torch.zeros(8, 0, dtype=BFLOAT))),
    ("weight has dtype torch.float32 but x has torch.bfloat16", dict(weight=torch.zeros(8, 3))),
    ("state_indices is missing", dict(state_indices=None)),
    ("valid has 1 entries for 3 requests", dict(valid=torch.zeros(1).bool())),
    ("dilation is 0, expected at least 1", dict(dilation=0)),
    ("activation is 'gelu', expected 'none' or 'silu'", dict(activation="gelu")),
]
WRONG_FOR_UPDATE = [
    ("update has dtype torch.int32, expected bool", dict(update=torch.zeros(3).int())),
    ("state_len is -1, expected at least 0", dict(state_len=-1)),
]


@pytest.mark.parametrize(("message", "wrong"), WRONG_FOR_BOTH + WRONG_FOR_CONV)
def test_wrong_arguments_of_conv(message, wrong):
    assert_refused(varlen_short_conv, conv_arguments() | wrong, message)


@pytest.mark.parametrize(("message", "wrong"), WRONG_FOR_BOTH + WRONG_FOR_UPDATE)
def test_wrong_arguments_of_update(message, wrong):
    assert_refused(update_conv_state, update_arguments() | wrong, message)


def assert_refused(operator, arguments, message):
    """One line: what is wrong, what was expected, and behind a semicolon what to do."""
    with pytest.raises(ValueError, match=message) as error:
        operator(**arguments)
    assert "\n" not in str(error.value)
    assert "; " in str(error.value)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(v) if torch.is_tensor(v) else v for name, v in arguments.items()}
        with pytest.raises(ValueError, match=message):
            operator(**fake)


@pytest.mark.parametrize("absent", [(), ("valid",), ("has_initial_state",), ("conv_state", "state_indices")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_of_conv(dtype, absent):
    arguments = conv_arguments(dtype) | dict.fromkeys(absent)
    torch.library.opcheck(varlen_short_conv, tuple(arguments.values()))


@pytest.mark.parametrize("absent", [(), ("has_initial_state",), ("update",)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_of_update(dtype, absent):
    arguments = update_arguments(dtype) | dict.fromkeys(absent)
    torch.library.opcheck(update_conv_state, tuple(arguments.values()))


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_opcheck_of_empty_steps(state_dtype):
    batch = dyadic([], [], channels=8, state_dtype=state_dtype)
    torch.library.opcheck(varlen_short_conv, batch.conv_args)
    torch.library.opcheck(update_conv_state, batch.update_args)
