"""What one child process of a replay does: run one form of one step, and say what it took.

Started as ``python -m ple_inductor.replay_child`` with a JSON request on stdin (``Request``); answers on
stdout with JSON lines, ``{"stage": ...}`` while it works and ``{"result": ...}`` (``FormResult``) at the
end. One form per process, so that no form inherits another's heap, caches or compiled code. In order:
compile and warm up on a small step, make the inputs, set the limit, measure one call, lift the limit,
digest and check its result, time more calls. The order is the point of this file: what is counted, and
what the limit binds, is the measured call alone.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from ple_inductor.replay_process import FormResult, Request
from ple_inductor.step import Step

_SLOW_CALL_SECONDS = 2.0
_TIMING_SECONDS = 3.0
_MOST_RUNS = 30


def run_form(request: Request, stage: Callable[[str], None]) -> FormResult:
    """Run one form and measure it.

    Args:
        request: The form, the step, the seed and the limit.
        stage: Told what is being done now, in a few words.
    """
    stage("importing torch")
    from ple_inductor.replay_check import check, digest
    from ple_inductor.replay_inputs import make_inputs, make_pool
    from ple_inductor.replay_memory import Limit, peak_above_here

    step = Step(**{**request.step, "lens": tuple(request.step["lens"])})
    stage("compiling and warming up" if request.form != "eager" else "warming up")
    try:
        call = compiled_form(request.form)
        warm_up(call, step, request.seed)
    except Exception as error:
        return FormResult(request.form, "failed", error=_one_line(error), **_reports())
    stage("making the inputs")
    inputs = make_inputs(step, request.seed)
    stage("measuring")
    failure: Exception | None = None
    left = None
    with peak_above_here() as peak:
        limit = Limit(request.limit_bytes) if request.limit_bytes is not None else None
        started = time.perf_counter()
        try:
            out_TC = call_compiled_code_only(call, inputs)
        except Exception as error:
            failure = error  # kept with its frames: what they hold was in use when memory ran out
        seconds = time.perf_counter() - started
        if limit is not None:
            left = limit.lift()
    if failure is not None:
        return _failed(request.form, failure, left, peak.bytes)

    stage("checking the result")
    output_digest, state_digest = digest(out_TC), digest(inputs.conv_state)
    checked = check(out_TC, inputs.conv_state, make_pool(step, request.seed), inputs)
    del out_TC
    stage("timing")
    times = [seconds] if seconds > _SLOW_CALL_SECONDS else _time(call, inputs)
    return FormResult(
        request.form,
        "ok",
        peak_bytes=peak.bytes,
        peak_method=peak.method,
        seconds=statistics.median(times),
        runs=len(times),
        output_digest=output_digest,
        state_digest=state_digest,
        check=asdict(checked),
        **_reports(),
    )


def compiled_form(form: str) -> Callable[..., Any]:
    """The padded function as the named form calls it: eager, under stock Inductor, or rewritten."""
    import torch

    from ple_inductor.padded_form import padded_short_conv

    if form == "eager":
        return padded_short_conv
    backend = {"stock": "inductor", "rewritten": "ple_inductor"}[form]
    return torch.compile(padded_short_conv, backend=backend, dynamic=True)


def warm_up(call: Callable[..., Any], step: Step, seed: int = 0) -> None:
    """Compile for ``step`` and start the threads, on the small step that stands for it."""
    from ple_inductor.replay_inputs import make_inputs, warm_up_step

    small = make_inputs(warm_up_step(step), seed)
    call(*small)
    call_compiled_code_only(call, small)


def call_compiled_code_only(call: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Call; raise rather than compile again, or the compiler would be measured with it."""
    import torch

    with torch.compiler.set_stance("fail_on_recompile"):
        return call(*inputs)


def _time(call: Callable[..., Any], inputs: tuple[Any, ...]) -> list[float]:
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < _TIMING_SECONDS and len(times) < _MOST_RUNS):
        started = time.perf_counter()
        call(*inputs)
        times.append(time.perf_counter() - started)
    return times


def _failed(form: str, error: Exception, left: int | None, reached: int) -> FormResult:
    text = str(error)
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    out_of_memory = (
        asked is not None
        or isinstance(error, MemoryError)
        or any(sign in text for sign in ("bad_alloc", "Cannot allocate memory", "out of memory"))
    )
    return FormResult(
        form,
        "out of memory" if out_of_memory else "failed",
        reached_bytes=reached,
        asked_bytes=int(asked[1]) if asked else None,
        left_bytes=left,
        error=_one_line(error),
        **_reports(),
    )


def _reports() -> dict[str, Any]:
    """What the pass did in this process."""
    import ple_inductor

    found = [report.to_dict() for report in ple_inductor.reports()]
    return {
        "rewrites": [rewrite for report in found for rewrite in report["rewrites"]],
        "misses": [miss for report in found for miss in report["misses"]],
    }


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()}"


def _answer(stream: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=stream, flush=True)


def main() -> None:
    # What a library prints must not end up between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = Request(**json.load(sys.stdin))
    result = run_form(request, lambda text: _answer(answers, {"stage": text}))
    _answer(answers, {"result": asdict(result)})


if __name__ == "__main__":
    main()
