"""The command line: exit codes, one line for each mistake, and nothing heavy where nothing runs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ple_inductor import cli, machine, replay
from ple_inductor.cli import main


@pytest.fixture(autouse=True)
def _no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input must be found before anything is started."""

    def start(*_: object) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr(replay, "run_child", start)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that must end with exit code 2."""
    try:
        status: object = main(argv)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    assert said.err.startswith("ple-inductor: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--lens", "-5,3"], "length 1 is '-5'; expected whole numbers of 0 or more"),
        (["--lens", "5,-3"], "length 2 is '-3'"),
        (["--lens", "5,3.5"], "length 2 is '3.5'"),
        (["--lens", ""], "length 1 is ''"),
        (["--lens", "0,0"], "every request length is 0"),
        (["--lens"], "expected one argument"),
        (["--channels", "0"], "channels is 0; expected a whole number of 1 or more"),
        (["--channels", "-4"], "channels is -4"),
        (["--channels", "many"], "'many' is not a whole number"),
        (["--kernel-size", "0"], "kernel size is 0"),
        (["--dilation", "0"], "dilation is 0"),
        (["--dtype", "float8"], "unknown dtype 'float8'; expected bfloat16, float16, float32"),
        (["--step", "/no/such/step.json"], "cannot read the step file /no/such/step.json: No such file"),
        (["--lens", "3", "--step", "x.json"], "not allowed with argument --lens"),
        (["--chan", "8"], "unrecognized arguments: --chan 8"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in refused(capsys, "replay", *argv)


def test_a_malformed_step_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text('{"lens": [3,')
    assert f"{path} is not valid JSON" in refused(capsys, "replay", "--step", str(path))


@pytest.mark.parametrize("argv", [[], ["plan"], ["doctor"], ["--nonsense"]])
def test_there_is_one_command(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    refused(capsys, *argv)


def test_a_run_that_needs_more_than_is_free_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda: 2**31)
    said = refused(capsys, "replay", "--no-limit")
    # Five padded tensors of 0.48 GiB and one of scratch, and the output.
    assert "its padded form peaks at 2.93 GiB above the inputs" in said
    assert "2.00 GiB are free" in said
    assert "2.00 GiB are free" in refused(capsys, "replay", "--channels", "10240")


def test_a_missing_compiler_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler: torch.compile needs 'g++' on the PATH" in refused(capsys, "replay")
    monkeypatch.setenv("CXX", "absent-c++")
    assert "'absent-c++'" in refused(capsys, "replay")


def test_an_interrupt_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_replay", interrupted)
    assert main(["replay"]) == 130
    assert capsys.readouterr().err == "ple-inductor: interrupted\n"


@pytest.mark.parametrize(("option", "shown"), [("--help", "replay"), ("--version", version("ple-inductor"))])
def test_help_and_version_import_neither_torch_nor_rich(option: str, shown: str) -> None:
    code = (
        "import sys\n"
        "from ple_inductor.cli import main\n"
        "try:\n"
        f"    main([{option!r}])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'triton', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
