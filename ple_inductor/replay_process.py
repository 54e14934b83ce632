"""Start a child process for one form of a replay, follow it, and say how it ended, whatever the end.

``Request`` and ``FormResult`` are what goes in and comes out, as JSON. A child that dies without an
answer (killed for its memory, aborted by an exception that C++ let through) still becomes a
``FormResult`` with a reason, never a traceback. Nothing here imports torch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any

FORMS = {
    "eager": "padded eager",
    "stock": "padded under stock Inductor",
    "rewritten": "rewritten",
}


@dataclass(frozen=True)
class Request:
    """What a child is asked to run.

    Args:
        form: A key of ``FORMS``.
        step: The step, as ``Step.to_dict`` gives it.
        seed: Seed of the inputs.
        limit_bytes: What the measured call may take beyond what is in use once the inputs exist; None
            for no limit.
    """

    form: str
    step: dict[str, Any]
    seed: int = 0
    limit_bytes: int | None = None


@dataclass(frozen=True)
class FormResult:
    """How one form ran; fields that do not apply to its outcome are None or empty.

    Args:
        form: A key of ``FORMS``.
        outcome: ``ok``, ``out of memory``, ``killed`` or ``failed``.
        peak_bytes: Peak of resident memory above the inputs in one call, when it finished.
        peak_method: How the peak was read.
        seconds: Median seconds of a call.
        runs: Calls behind that median.
        output_digest: SHA-256 of the output.
        state_digest: SHA-256 of the whole state pool after the call.
        check: Comparison with each request computed alone, fields of ``replay_check.Check``.
        reached_bytes: Peak above the inputs when it failed.
        asked_bytes: Size of the request that could not be met.
        left_bytes: What the limit left when it could not be met.
        error: One line on what went wrong.
        rewrites: What the pass rewrote.
        misses: What it left, and why.
    """

    form: str
    outcome: str
    peak_bytes: int | None = None
    peak_method: str = ""
    seconds: float | None = None
    runs: int = 0
    output_digest: str = ""
    state_digest: str = ""
    check: dict[str, Any] | None = None
    reached_bytes: int | None = None
    asked_bytes: int | None = None
    left_bytes: int | None = None
    error: str = ""
    rewrites: list[dict[str, Any]] = field(default_factory=list)
    misses: list[dict[str, Any]] = field(default_factory=list)


def run_child(request: Request, stage: Callable[[str], None]) -> FormResult:
    """Run one form in a process of its own and wait for its end.

    Args:
        request: What to run.
        stage: Told what the child is doing, in a few words.
    """
    command = [sys.executable, "-m", "ple_inductor.replay_child"]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as noise,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise, text=True
        ) as child,
    ):
        try:
            return _follow(child, request, stage) or _died(request.form, child.wait(), noise)
        finally:
            child.kill()


def _follow(
    child: subprocess.Popen[str], request: Request, stage: Callable[[str], None]
) -> FormResult | None:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin:
            json.dump(asdict(request), child.stdin)
    except BrokenPipeError:
        return None
    for line in child.stdout:
        message = json.loads(line)
        if "result" in message:
            return FormResult(**message["result"])
        stage(message["stage"])
    return None


def _died(form: str, status: int, noise: IO[str]) -> FormResult:
    noise.seek(0)
    said = [line.strip() for line in noise if line.strip()]
    last = said[-1] if said else "it said nothing"
    if status == -signal.SIGKILL:
        return FormResult(form, "killed", error="killed by the system, most likely for want of memory")
    if any("bad_alloc" in line for line in said) or last.startswith("MemoryError"):
        return FormResult(form, "out of memory", error=last)
    if status < 0:
        return FormResult(form, "killed", error=f"killed by {signal.Signals(-status).name}: {last}")
    return FormResult(form, "failed", error=f"its process ended with status {status}: {last}")
