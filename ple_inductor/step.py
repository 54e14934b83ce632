"""One scheduler step: the lengths of its requests, and the convolution that runs over them.

A step comes from the command line (``parse_lens``), from a JSON file (``load_step``), or is the default:
the step of the crash that this package was written for. Everything that a person can get wrong is
refused here, in one line that says what is wrong, what was expected and what to do. Needs no torch, so
that a wrong argument costs no import. New properties of a step (and their limits) go here; how a step is
run does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

CRASH_LENS = (31344, 203, 203, 203, 203, 203, 203, 206)
ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LARGEST = 2**62
"""Sizes in elements stay below this, so that their byte counts fit 64 bits in any dtype."""


class StepError(ValueError):
    """A step that cannot be run; the text is one line for a person."""


@dataclass(frozen=True)
class Step:
    """A scheduler step, checked when it is made.

    Args:
        lens: Tokens of each request, 0 or more, not all 0.
        channels: Channels of the convolution, at least 1.
        dtype: One of ``bfloat16``, ``float16``, ``float32``.
        kernel_size: Taps, at least 1.
        dilation: Tokens between two taps, at least 1.

    Raises:
        StepError: A value is out of range.
    """

    lens: tuple[int, ...] = CRASH_LENS
    channels: int = 1024
    dtype: str = "bfloat16"
    kernel_size: int = 4
    dilation: int = 3

    def __post_init__(self) -> None:
        if not self.lens:
            raise StepError("no request lengths; expected at least one, e.g. --lens 31344,203,203")
        for at, length in enumerate(self.lens, 1):
            _check_whole(f"length {at}", length, least=0)
        if not any(self.lens):
            raise StepError("every request length is 0; expected at least one token to run")
        if not isinstance(self.dtype, str) or self.dtype not in ITEM_SIZES:
            raise StepError(f"unknown dtype {_shown(self.dtype)}; expected {', '.join(ITEM_SIZES)}")
        for name in ("channels", "kernel_size", "dilation"):
            _check_whole(name.replace("_", " "), getattr(self, name), least=1)
        if max(self.padded_elements, self.channels * self.kernel_size, self.state_len) >= _LARGEST:
            raise StepError("the step has more than 2**62 elements; give smaller lengths or sizes")

    @property
    def requests(self) -> int:
        return len(self.lens)

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    @property
    def longest(self) -> int:
        return max(self.lens)

    @property
    def state_len(self) -> int:
        return (self.kernel_size - 1) * self.dilation

    @property
    def padded_elements(self) -> int:
        """Elements of one padded tensor with its history, ``N*C*(S+L)``."""
        return self.requests * self.channels * (self.state_len + self.longest)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the tokens alone, ``T*C*itemsize``: the input, and the output."""
        return self.tokens * self.channels * ITEM_SIZES[self.dtype]

    @property
    def padded_bytes(self) -> int:
        """Bytes of one padded tensor, ``N*L*C*itemsize``."""
        return self.requests * self.longest * self.channels * ITEM_SIZES[self.dtype]

    @property
    def history_bytes(self) -> int:
        """Bytes of the state of all requests, ``N*S*C*itemsize``."""
        return self.requests * self.state_len * self.channels * ITEM_SIZES[self.dtype]

    @property
    def rows_per_token(self) -> float:
        """Padded rows for each token, ``N*L/T``; 1.0 means that nothing is padded."""
        return self.requests * self.longest / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """The fields, as ``load_step`` reads them back."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"lens": list(self.lens)}


def parse_lens(text: str) -> tuple[int, ...]:
    """Lengths from ``31344,203,206``; blanks around a number are allowed.

    Raises:
        StepError: A part is not a whole number of 0 or more.
    """
    parts = [part.strip() for part in text.split(",")]
    for at, part in enumerate(parts, 1):
        if not re.fullmatch("[0-9]{1,18}", part):
            raise StepError(
                f"length {at} is {_shown(part)}; expected whole numbers of 0 or more with commas between, "
                "e.g. --lens 31344,203,203"
            )
    return tuple(int(part) for part in parts)


def load_step(path: Path, given: Mapping[str, Any]) -> Step:
    """A step from a JSON object with ``lens`` and, where they differ from the defaults, other fields.

    Args:
        path: The file, UTF-8.
        given: Fields that take precedence over the file's.

    Raises:
        StepError: The file cannot be read, is not such an object, or holds a value out of range.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise StepError(f"cannot read the step file {path}: {error.strerror}; check the path") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise StepError(f"{path} is not valid JSON ({reason}); {_EXPECTED_FILE}") from None
    if not isinstance(found, dict):
        raise StepError(f"{path} holds a JSON {_json_kind(found)}, not an object; {_EXPECTED_FILE}")
    names = [field.name for field in fields(Step)]
    for name in found:
        if name not in names:
            raise StepError(f"{path} has an unknown field {_shown(name)}; expected {', '.join(names)}")
    if not isinstance(found.get("lens"), list):
        raise StepError(f"{path} has no list of lengths in its field 'lens'; {_EXPECTED_FILE}")
    try:
        return Step(**{**found, "lens": tuple(found["lens"]), **given})
    except StepError as error:
        raise StepError(f"{path}: {error}") from None


_EXPECTED_FILE = 'expected e.g. {"lens": [31344, 203], "channels": 1024}'


def _check_whole(name: str, value: object, *, least: int) -> None:
    # A bool is an int to Python, but true is no length.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise StepError(f"{name} is {_shown(value)}; expected a whole number of {least} or more")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _json_kind(value: object) -> str:
    kinds = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
