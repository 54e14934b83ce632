"""A step's sizes against figures of public crash reports, and every way in which a person gets one wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ple_inductor.step import CRASH_LENS, Step, StepError, load_step, parse_lens

GIB = 2**30


def test_the_default_is_the_crash_step() -> None:
    step = Step(channels=10240)
    assert step.lens == CRASH_LENS
    assert (step.requests, step.tokens, step.longest, step.state_len) == (8, 32768, 31344, 9)
    assert step.padded_bytes == 5_135_400_960
    assert f"{step.padded_bytes / GIB:.2f}" == "4.78"  # "Tried to allocate 4.78 GiB"
    assert step.padded_elements == 2_568_437_760
    assert step.packed_bytes == 671_088_640
    assert step.rows_per_token == pytest.approx(7.652, abs=5e-4)


@pytest.mark.parametrize(
    ("lens", "tokens", "packed_gib", "rows_per_token"),
    [
        ((9584, *[966] * 22, 965, 965), 32766, 0.625, 7.312),
        ((16384,) * 6, 98304, 1.875, 1.0),
        ((8000,), 8000, 0.1526, 1.0),
    ],
)
def test_sizes_of_other_reports(
    lens: tuple[int, ...], tokens: int, packed_gib: float, rows_per_token: float
) -> None:
    step = Step(lens, channels=10240)
    assert step.tokens == tokens
    assert step.packed_bytes / GIB == pytest.approx(packed_gib, rel=1e-3)
    assert step.rows_per_token == pytest.approx(rows_per_token, abs=5e-4)


def test_item_size_follows_the_dtype() -> None:
    assert Step((3,), 5, "float32").packed_bytes == 60
    assert Step((3,), 5, "float16").packed_bytes == 30


def test_parse_lens() -> None:
    assert parse_lens("31344, 203,0") == (31344, 203, 0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-5,3", "length 1 is '-5'"),
        ("3,x", "length 2 is 'x'"),
        ("3,1.5", "length 2 is '1.5'"),
        ("3,", "length 2 is ''"),
        ("", "length 1 is ''"),
        ("1_000", "length 1 is '1_000'"),
        ("٣", "length 1 is '٣'"),
        ("9" * 5000, "length 1 is '999"),
    ],
)
def test_parse_lens_says_which_length_is_wrong(text: str, shown: str) -> None:
    with pytest.raises(StepError) as error:
        parse_lens(text)
    message = str(error.value)
    assert shown in message
    assert "expected whole numbers of 0 or more" in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lens": ()}, "no request lengths"),
        ({"lens": (0, 0)}, "every request length is 0"),
        ({"lens": (3, -1)}, "length 2 is -1"),
        ({"lens": (True,)}, "length 1 is True"),
        ({"lens": (2.0,)}, "length 1 is 2.0"),
        ({"channels": 0}, "channels is 0; expected a whole number of 1 or more"),
        ({"kernel_size": 0}, "kernel size is 0"),
        ({"dilation": -3}, "dilation is -3"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; expected bfloat16, float16, float32"),
        ({"dtype": ["bfloat16"]}, "unknown dtype ['bfloat16']"),
        ({"lens": (10**17,), "channels": 10**17}, "the step has more than 2**62 elements"),
    ],
)
def test_a_step_refuses_values_out_of_range(fields: dict[str, object], said: str) -> None:
    with pytest.raises(StepError, match="^" + said.replace("[", r"\[").replace("*", r"\*")):
        Step(**fields)  # type: ignore[arg-type]


def test_load_step_and_what_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"lens": [7, 0, 5], "channels": 24, "dilation": 2}))
    assert load_step(path, {}) == Step((7, 0, 5), 24, dilation=2)
    assert load_step(path, {"channels": 8, "dtype": "float16"}) == Step((7, 0, 5), 8, "float16", dilation=2)


def test_a_step_reads_back_what_it_wrote(tmp_path: Path) -> None:
    step = Step((3, 1), 6, "float32", 2, 5)
    path = tmp_path / "step.json"
    path.write_text(json.dumps(step.to_dict()))
    assert load_step(path, {}) == step


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("\xff\xfe", "is not valid JSON"),
        ("[1, 2]", "holds a JSON list, not an object"),
        ("3", "holds a JSON number, not an object"),
        ("{}", "no list of lengths in its field 'lens'"),
        ('{"lens": "3,4"}', "no list of lengths in its field 'lens'"),
        ('{"lens": [3, "4"]}', "length 2 is '4'"),
        ('{"lens": [[3]]}', "length 1 is [3]"),
        ('{"lens": [3], "chanels": 4}', "unknown field 'chanels'; expected lens, channels"),
        ('{"lens": [3], "channels": null}', "channels is None"),
        ('{"lens": [1e3]}', "length 1 is 1000.0"),
    ],
)
def test_load_step_says_what_is_wrong_with_a_file(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "step.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(StepError) as error:
        load_step(path, {})
    message = str(error.value)
    assert said in message
    assert str(path) in message
    assert "\n" not in message


def test_load_step_from_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="No such file"):
        load_step(tmp_path / "absent.json", {})
    with pytest.raises(StepError, match="Is a directory"):
        load_step(tmp_path, {})
