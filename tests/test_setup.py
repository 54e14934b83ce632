"""``scripts/setup.sh``, which every make target begins with: what it says, and where it looks for torch.

It runs on a copy with interpreters that only pretend, so nothing is installed and no network is asked. The
stub takes the part of the chosen Python and of the one in ``.venv``; it writes down each pip command.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
SETUP_FILES = ("scripts/setup.sh", "pyproject.toml", "constraints.txt")

STUB = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"-m pip"*) echo "$*" >>pip-commands; case "$*" in {refused}) exit 1 ;; esac ;;
    "-I - "*) cat >/dev/null; exit 1 ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in SETUP_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    return tmp_path


def stub(checkout: Path, text: str) -> str:
    path = checkout / "python-stub"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def setup(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/setup.sh", *arguments],
        cwd=checkout,
        env={**os.environ, "CXX": "true", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def pip_commands(checkout: Path) -> list[str]:
    return (checkout / "pip-commands").read_text().splitlines()


def torch_requests(checkout: Path) -> list[str]:
    return [
        command.partition("constraints.txt ")[2] for command in pip_commands(checkout) if "torch==" in command
    ]


@pytest.mark.parametrize(
    ("environment", "problem", "remedy"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler: 'no-such-compiler' not found", "CXX="),
        ({"PYTHON": "no-such-python"}, "no 'no-such-python' found", "install Python 3.11 or newer"),
        ({"PYTHON": "false"}, "'false' does not start", "PYTHON="),
    ],
    ids=["compiler", "python", "not_a_python"],
)
def test_missing_tool_is_one_line(
    checkout: Path, environment: dict[str, str], problem: str, remedy: str
) -> None:
    done = setup(checkout, **environment)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"setup: error: {problem}")
    assert remedy in line
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("failing", "problem"),
    [
        ("version_info <", "3.11 or newer is needed"),
        ("import venv", "cannot make virtual environments"),
        ("Python.h", "has no Python.h"),
    ],
    ids=["too_old", "no_venv", "no_headers"],
)
def test_unfit_python_is_one_line(checkout: Path, failing: str, problem: str) -> None:
    text = f'#!/bin/sh\ncase "$2" in *"{failing}"*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    done = setup(checkout, PYTHON=stub(checkout, text))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert problem in line
    assert not (checkout / ".venv").exists()


@pytest.mark.skipif(
    sys.platform != "linux"
    or any(Path("/dev").glob("nvidia[0-9]*"))
    or Path("/dev/kfd").exists()
    or shutil.which("nvidia-smi") is not None,
    reason="with a GPU the default build is taken; other systems have one build",
)
@pytest.mark.parametrize(
    ("refused", "attempts"),
    [("never", 1), ("*+cpu", 3), ('*"constraints.txt torch=="*+cpu', 2)],
    ids=["where_pip_looks", "nowhere", "own_index"],
)
def test_cpu_build_is_tried_first(checkout: Path, refused: str, attempts: int) -> None:
    python = stub(checkout, STUB.format(refused=refused, python=sys.executable))
    done = setup(checkout, "dev", PYTHON=python)
    assert done.returncode == 0, done.stderr
    (version,) = (
        line.removeprefix("torch==")
        for line in (checkout / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    requests = torch_requests(checkout)
    assert len(requests) == attempts
    assert requests[0] == f"torch=={version}+cpu"
    assert all("download.pytorch.org/whl/cpu" in request for request in requests[1:2])
    assert requests[2:] in ([], [f"torch=={version}"])


def test_second_run_installs_nothing(checkout: Path) -> None:
    python = stub(checkout, STUB.format(refused="never", python=sys.executable))
    assert setup(checkout, "dev", PYTHON=python).returncode == 0
    before = pip_commands(checkout)

    for level in ("dev", "package"):
        again = setup(checkout, level, PYTHON=python)
        assert (again.returncode, again.stdout) == (0, "")
    assert pip_commands(checkout) == before

    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("# changed\n")
    assert setup(checkout, PYTHON=python).returncode == 0
    assert len(pip_commands(checkout)) > len(before)


def test_failed_install_is_told_and_tried_again(checkout: Path) -> None:
    python = stub(checkout, STUB.format(refused='*" -e "*', python=sys.executable))
    for _ in range(2):
        done = setup(checkout, PYTHON=python)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "setup: error: installing the package failed, see above"
