"""Run one scheduler step in its three forms on this machine and judge what came out.

``replay`` decides whether the machine can carry the run, starts a child per form, and returns a
``Replay``: what ran, under which limit, how each form ended and what that means in words. How a form is
measured is in ``replay_child``; how a replay is shown is in ``replay_table``. Nothing here imports torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ple_inductor import machine
from ple_inductor.replay_process import FORMS, FormResult, Request, run_child
from ple_inductor.step import Step, StepError

CRASH_FREE_BYTES = round(11.8 * 2**30)
"""What the GPU of the crash had free before its step began; at the failing request 3.91 GiB were left."""
CRASH_CHANNELS = 10240

_PADDED_TENSORS = 6
"""Padded tensors at the peak of the eager form: five by their names, one of scratch in the convolution."""
_PROCESS_BYTES = 700 * 2**20
"""A process with torch loaded and Inductor used."""


@dataclass(frozen=True)
class Verdict:
    """What a form's result means.

    Args:
        good: Whether the form ran, and its output and state are right.
        text: The same for a person, with the reason.
    """

    good: bool
    text: str


@dataclass(frozen=True)
class Replay:
    """A step that was run, its forms in the order of ``FORMS``."""

    step: Step
    limit_bytes: int | None
    forms: dict[str, FormResult]

    @property
    def ok(self) -> bool:
        """Whether the rewritten form ran, was rewritten, and agrees with every form that finished."""
        return all(
            verdict.good
            for form, verdict in self.verdicts().items()
            if form == "rewritten" or self.forms[form].outcome == "ok"
        )

    @property
    def compared_with(self) -> list[str]:
        """Finished forms that the rewritten one is compared with; empty if none finished."""
        return [form for form, result in self.forms.items() if form != "rewritten" and result.outcome == "ok"]

    def verdicts(self) -> dict[str, Verdict]:
        return {form: self._verdict(result) for form, result in self.forms.items()}

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values; sizes in bytes, times in seconds."""
        step = self.step
        verdicts = self.verdicts()
        sizes = {
            "requests": step.requests,
            "tokens": step.tokens,
            "longest": step.longest,
            "rows_per_token": step.rows_per_token,
            "packed_bytes": step.packed_bytes,
            "padded_bytes": step.padded_bytes,
        }
        return {
            "ok": self.ok,
            "step": step.to_dict() | sizes,
            "limit_bytes": self.limit_bytes,
            "machine": machine.describe(),
            "compared_with": self.compared_with or ["each request alone"],
            "forms": [
                asdict(result)
                | {
                    "peak_ratio": None
                    if result.peak_bytes is None
                    else result.peak_bytes / step.packed_bytes,
                    "good": verdicts[form].good,
                    "verdict": verdicts[form].text,
                }
                for form, result in self.forms.items()
            ],
        }

    def _verdict(self, result: FormResult) -> Verdict:
        ended = "" if result.outcome == "ok" else _why_it_ended(result)
        if result.form == "rewritten" and _says_it_was_not_rewritten(result):
            return Verdict(False, f"NOT REWRITTEN: {_why_missed(result)}" + (ended and f"; {ended}"))
        if ended:
            return Verdict(False, ended)
        assert result.check is not None
        if result.check["wrong"] or not result.check["state_equal"]:
            state = "" if result.check["state_equal"] else "; the state pool is wrong"
            return Verdict(False, f"WRONG: {result.check['wrong']:,} output values{state}")
        others = [form for form in self.compared_with if form != result.form]
        if result.form == "eager":
            others = []
        names = " and ".join(FORMS[form] for form in others) or "each request alone"
        same = (
            all(_same_bits(result, self.forms[form]) for form in others)
            if others
            else not result.check["different"]
        )
        if same:
            return Verdict(True, f"same bits as {names}")
        return Verdict(
            True,
            f"as {names} but for rounding: {result.check['different']:,} output values are not the bits of "
            f"each request alone, by {result.check['largest']:.1e} at most",
        )


def replay(step: Step, *, limited: bool, stage: Callable[[str, str], None], seed: int = 0) -> Replay:
    """Run the three forms, one child process each.

    Args:
        step: What to run.
        limited: Whether a call may take only what the crashed GPU had free, scaled by the channels.
        stage: Told a form and what is being done with it.
        seed: Seed of the inputs.

    Raises:
        StepError: This machine cannot carry the run.
    """
    limit_bytes = CRASH_FREE_BYTES * step.channels // CRASH_CHANNELS if limited else None
    _need_compiler()
    _need_memory(step, limit_bytes)
    forms = {}
    for form in FORMS:
        request = Request(form, step.to_dict(), seed, limit_bytes)
        forms[form] = run_child(request, lambda text, form=form: stage(form, text))  # type: ignore[misc]
    return Replay(step, limit_bytes, forms)


def predicted_peak(step: Step) -> int:
    """Bytes above the inputs at the peak of the padded eager form, the hungriest of the three.

    Measured peaks are 0.82 to 1.08 of this, over dtypes, taps, long and short requests, skewed or equal.
    """
    return _PADDED_TENSORS * (step.padded_bytes + step.history_bytes) + step.packed_bytes


def human(size: int) -> str:
    """A byte count with a binary unit, three digits or more."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{2 if value < 10 else 1}f} {unit}"


def _need_memory(step: Step, limit_bytes: int | None) -> None:
    free = machine.free_bytes()
    peak = predicted_peak(step)
    call = peak if limit_bytes is None else min(peak, limit_bytes)
    need = call + step.packed_bytes + _PROCESS_BYTES
    if free is None or need <= free:
        return
    remedy = "give fewer --channels" if limit_bytes is None else "give fewer --channels or a smaller step"
    raise StepError(
        f"this step needs about {human(need)} here (its padded form peaks at {human(call)} above the inputs) "
        f"and {human(free)} are free; {remedy}"
    )


def _need_compiler() -> None:
    # Inductor looks no further than these.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise StepError(
            f"no C++ compiler: torch.compile needs {compiler!r} on the PATH; install it (on Debian: "
            "apt-get install g++) or name another in CXX"
        )


def _why_it_ended(result: FormResult) -> str:
    if result.outcome != "out of memory":
        return f"{result.outcome}: {result.error}"
    if result.asked_bytes is None or result.left_bytes is None:
        return f"out of memory: {result.error}"
    reached = f" at {human(result.reached_bytes)}" if result.reached_bytes else ""
    return (
        f"out of memory{reached}: asked for {human(result.asked_bytes)} more with "
        f"{human(result.left_bytes)} left"
    )


def _says_it_was_not_rewritten(result: FormResult) -> bool:
    """Not where the process died, or the warm-up did, before it could tell."""
    told = result.outcome == "ok" or result.reached_bytes is not None or bool(result.misses)
    return told and not result.rewrites


def _why_missed(result: FormResult) -> str:
    if not result.misses:
        return "the pass found no padded convolution in the graph"
    miss = result.misses[0]
    return f"{miss['code']}: expected {miss['expected']}, found {miss['found']}"


def _same_bits(one: FormResult, other: FormResult) -> bool:
    return (one.output_digest, one.state_digest) == (other.output_digest, other.state_digest)
