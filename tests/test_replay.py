"""A replay end to end with its real children on small steps, and each judgement it makes.

The two sessions below run every form, once to its end and once under a limit; the tests read them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ple_inductor import replay as replay_module
from ple_inductor.cli import main
from ple_inductor.replay import Replay, human, predicted_peak
from ple_inductor.replay_process import FORMS, FormResult, Request, run_child
from ple_inductor.step import Step

SKEWED = Step(lens=(6000, 40, 0, 3, 41, 40, 40, 40), channels=96)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """``ple-inductor replay --no-limit --json`` on a step from a file."""
    path = tmp_path_factory.mktemp("step") / "step.json"
    path.write_text(json.dumps(SKEWED.to_dict()))
    argv = ["replay", "--step", str(path), "--no-limit", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "ple_inductor.cli", *argv], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def to_the_end(command: subprocess.CompletedProcess[str]) -> Replay:
    names = [field.name for field in fields(FormResult)]
    forms = [
        FormResult(**{name: form[name] for name in names}) for form in json.loads(command.stdout)["forms"]
    ]
    return Replay(SKEWED, None, {form.form: form for form in forms})


@pytest.fixture(scope="module")
def limited() -> Replay:
    # Two padded tensors fit and three do not.
    limit_bytes = SKEWED.padded_bytes * 5 // 2
    requests = [Request(form, SKEWED.to_dict(), 0, limit_bytes) for form in FORMS]
    return Replay(
        SKEWED, limit_bytes, {request.form: run_child(request, lambda _: None) for request in requests}
    )


def test_all_forms_agree_bit_for_bit(to_the_end: Replay) -> None:
    assert {form: result.outcome for form, result in to_the_end.forms.items()} == dict.fromkeys(FORMS, "ok")
    eager, rewritten = to_the_end.forms["eager"], to_the_end.forms["rewritten"]
    assert rewritten.output_digest == eager.output_digest
    assert rewritten.state_digest == eager.state_digest
    assert rewritten.check == {"different": 0, "wrong": 0, "largest": 0.0, "state_equal": True}
    assert (
        to_the_end.verdicts()["rewritten"].text == "same bits as padded eager and padded under stock Inductor"
    )
    assert to_the_end.ok


def test_memory_follows_the_tokens_only_where_rewritten(to_the_end: Replay) -> None:
    peaks = {form: result.peak_bytes or 0 for form, result in to_the_end.forms.items()}
    assert peaks["eager"] >= 5 * SKEWED.padded_bytes
    assert peaks["eager"] <= 1.1 * predicted_peak(SKEWED)
    assert peaks["stock"] >= 2.9 * SKEWED.padded_bytes
    # A quarter more than the output is the bar at full size; here pages and buffers weigh more.
    assert SKEWED.packed_bytes <= peaks["rewritten"] <= 1.5 * SKEWED.packed_bytes + 2**19


def test_the_report_of_the_pass_comes_with_it(to_the_end: Replay) -> None:
    (rewrite,) = to_the_end.forms["rewritten"].rewrites
    assert rewrite["name"] == "padded_short_conv"
    assert "padded_form.py" in rewrite["source"]
    assert to_the_end.forms["rewritten"].misses == []
    assert to_the_end.forms["stock"].rewrites == []


def test_each_form_says_how_it_was_timed(to_the_end: Replay) -> None:
    for result in to_the_end.forms.values():
        assert result.seconds is not None
        assert result.seconds > 0
        assert result.runs >= 3 or (result.runs == 1 and result.seconds > 2)


def test_under_the_limit_only_the_rewritten_form_passes(limited: Replay) -> None:
    for form in ("eager", "stock"):
        result = limited.forms[form]
        assert result.outcome == "out of memory"
        assert result.asked_bytes is not None
        assert result.left_bytes is not None
        assert result.left_bytes < result.asked_bytes
        assert re.fullmatch(
            r"out of memory at .* MiB: asked for .* more with .* left", limited.verdicts()[form].text
        )
    assert limited.forms["stock"].asked_bytes == pytest.approx(SKEWED.padded_bytes, rel=0.01)
    assert limited.ok
    assert limited.compared_with == []
    assert limited.verdicts()["rewritten"].text == "same bits as each request alone"


def test_the_command_prints_one_json_value(command: subprocess.CompletedProcess[str]) -> None:
    assert command.returncode == 0, command.stderr
    found = json.loads(command.stdout)
    assert found["ok"] is True
    assert found["step"]["tokens"] == SKEWED.tokens
    assert found["step"]["lens"] == list(SKEWED.lens)
    assert found["limit_bytes"] is None
    assert found["compared_with"] == ["eager", "stock"]
    assert [form["form"] for form in found["forms"]] == list(FORMS)
    for form in found["forms"]:
        assert form["good"] is True
        assert form["peak_ratio"] == form["peak_bytes"] / SKEWED.packed_bytes
    assert "rewritten: measuring" in command.stderr
    assert "Traceback" not in command.stderr


def stub(form: str, **fields: object) -> FormResult:
    right = {"different": 0, "wrong": 0, "largest": 0.0, "state_equal": True}
    done = FormResult(form, "ok", 100, "", 1.0, 3, "out", "state", right)
    if form == "rewritten":
        done = replace(done, rewrites=[{"name": "padded_short_conv"}])
    return replace(done, **fields)  # type: ignore[arg-type]


def judged(rewritten: FormResult, step: Step = SKEWED, **others: FormResult) -> Replay:
    forms = {form: others.get(form, stub(form)) for form in ("eager", "stock")}
    return Replay(step, None, {**forms, "rewritten": rewritten})


def test_a_form_that_was_not_rewritten_fails_loudly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    miss = {"code": "conv_has_bias", "expected": "no bias", "found": "a bias"}
    outcome = judged(stub("rewritten", rewrites=[], misses=[miss]))
    monkeypatch.setattr(replay_module, "replay", lambda *_, **__: outcome)
    assert main(["replay"]) == 1
    said = capsys.readouterr().out
    assert "NOT REWRITTEN: conv_has_bias: expected no bias, found a bias" in " ".join(said.split()).replace(
        " │ │ │ │ │ │ ", " "
    )
    assert "The rewritten form did not pass" in said


def test_a_form_that_died_for_want_of_a_rewrite_says_both() -> None:
    miss = {"code": "conv_has_bias", "expected": "no bias", "found": "a bias"}
    died = FormResult("rewritten", "out of memory", asked_bytes=2**20, left_bytes=9, reached_bytes=2**30)
    text = judged(replace(died, misses=[miss])).verdicts()["rewritten"].text
    assert text == (
        "NOT REWRITTEN: conv_has_bias: expected no bias, found a bias; "
        "out of memory at 1.00 GiB: asked for 1.00 MiB more with 9 B left"
    )
    killed = judged(FormResult("rewritten", "killed", error="by the system"))
    assert killed.verdicts()["rewritten"].text == "killed: by the system"
    assert not killed.ok


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ({"wrong": 3}, "WRONG: 3 output values"),
        ({"state_equal": False}, "WRONG: 0 output values; the state pool is wrong"),
    ],
)
def test_a_wrong_result_fails(check: dict[str, object], said: str) -> None:
    right = stub("rewritten").check
    assert right is not None
    outcome = judged(stub("rewritten", check=right | check))
    assert outcome.verdicts()["rewritten"].text == said
    assert not outcome.ok


def test_a_padded_form_that_is_wrong_fails_the_comparison_but_one_that_died_does_not() -> None:
    right = stub("stock").check
    assert right is not None
    assert not judged(stub("rewritten"), stock=stub("stock", check=right | {"wrong": 1})).ok
    assert judged(stub("rewritten"), stock=FormResult("stock", "killed", error="SIGKILL")).ok


def test_other_rounding_is_told_apart_from_the_same_bits() -> None:
    right = stub("eager").check
    assert right is not None
    eager = stub("eager", output_digest="other", check=right | {"different": 2, "largest": 1e-4})
    outcome = judged(stub("rewritten"), eager=eager)
    assert outcome.ok
    assert "but for rounding" in outcome.verdicts()["rewritten"].text


def test_a_step_without_padding_is_not_boasted_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = judged(stub("rewritten"), Step((16384,) * 6, 10240))
    monkeypatch.setattr(replay_module, "replay", lambda *_, **__: outcome)
    assert main(["replay"]) == 0
    said = capsys.readouterr().out
    assert "1.00 padded rows per token" in said
    assert "unpadding saves no rows" in said


@pytest.mark.parametrize(
    ("script", "outcome", "said"),
    [
        ("kill -9 $$", "killed", "most likely for want of memory"),
        ('echo "what():  std::bad_alloc" >&2; kill -6 $$', "out of memory", "std::bad_alloc"),
        ("echo oops >&2; kill -11 $$", "killed", "SIGSEGV: oops"),
        ("echo 'ImportError: no torch' >&2; exit 1", "failed", "status 1: ImportError: no torch"),
        ("exit 0", "failed", "status 0: it said nothing"),
    ],
)
def test_a_child_that_dies_is_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, outcome: str, said: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    result = run_child(Request("eager", SKEWED.to_dict()), lambda _: None)
    assert result.outcome == outcome
    assert said in result.error


def test_the_default_limit_is_a_tenth_of_the_crashed_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []

    def start(request: Request, _: object) -> FormResult:
        seen.append(request)
        return stub(request.form)

    monkeypatch.setattr(replay_module, "run_child", start)
    replay_module.replay(Step(), limited=True, stage=lambda *_: None)
    replay_module.replay(Step(channels=64), limited=False, stage=lambda *_: None)
    assert [request.limit_bytes for request in seen] == [round(1.18 * 2**30)] * 3 + [None] * 3


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (501504, "489.8 KiB"), (2**20, "1.00 MiB"), (5_135_400_960, "4.78 GiB")],
)
def test_human(size: int, shown: str) -> None:
    assert human(size) == shown
