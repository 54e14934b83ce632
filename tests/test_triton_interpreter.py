"""The Triton kernels compute what the oracle says, shown without a GPU by Triton's interpreter.

The interpreter has to be chosen before Triton is imported, and a wrong address in it ends the process. So the
cases (``triton_interpreter_cases.py``) run under pytest in a child process; the ones that read 2**31 elements
away from where a tensor starts have a child to themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_interpreter_cases.py")


@pytest.mark.parametrize("which", ["not far", "far"])
def test_interpreted_kernels_match_the_oracle(which: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=CASES.parent.parent,
        capture_output=True,
        text=True,
    )
    ended = f"exit code {child.returncode}"
    if child.returncode < 0:
        ended = (
            f"{signal.Signals(-child.returncode).name}: a load or store left its tensor (the last test below)"
        )
    assert child.returncode == 0, f"{ended}\n{child.stdout[-6000:]}\n{child.stderr[-3000:]}"
    assert "skipped" not in child.stdout
