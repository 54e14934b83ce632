"""Measure what the rewrite is worth on this CPU: memory, time, growth and small steps, each with its bar.

Run it with ``make bench`` or ``python benchmarks/cpu.py [--json FILE]``. Every figure comes from this one
run. Peak memory is measured in a process per form, by the code behind ``ple-inductor replay``. Times that
are compared are taken in turns in one process, so that a slow minute of the machine slows both. To add a
row: measure, then append a ``Row`` with the bar that it must meet, or None where it only informs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from ple_inductor import machine
from ple_inductor.replay_child import compiled_form, warm_up
from ple_inductor.replay_inputs import Inputs, make_inputs
from ple_inductor.replay_process import FORMS, FormResult, Request, run_child
from ple_inductor.step import Step

CRASH = Step()
SMALL = Step(lens=(4,) * 8, channels=10240)
LONGEST = (4096, 8192, 16384, 32768 - 7 * 16)
FLAT = 1.15
TURNS_SECONDS = 15


@dataclass(frozen=True)
class Row:
    """One measured figure.

    Args:
        section: ``memory``, ``time``, ``growth`` or ``small steps``.
        what: What is compared with what.
        value: A ratio.
        detail: The quantities behind it, with their units.
        most: The ratio must not be above this.
        least: The ratio must not be below this.
    """

    section: str
    what: str
    value: float
    detail: str
    most: float | None = None
    least: float | None = None

    @property
    def passed(self) -> bool | None:
        """Whether it meets its bar; None where there is none."""
        if self.most is None and self.least is None:
            return None
        return (self.most is None or self.value <= self.most) and (
            self.least is None or self.value >= self.least
        )


def memory_rows() -> list[Row]:
    rows = []
    for form, name in FORMS.items():
        result = in_child(form, CRASH)
        assert result.peak_bytes is not None
        rows.append(
            Row(
                "memory",
                f"{name}: peak above inputs / (T*C*itemsize)",
                result.peak_bytes / CRASH.packed_bytes,
                f"{result.peak_bytes:,} bytes",
                most=1.25 if form == "rewritten" else None,
            )
        )
    return rows


def time_rows() -> list[Row]:
    inputs = make_inputs(CRASH)
    ((eager,), (stock,), (rewritten,)) = (ready(form, CRASH, inputs) for form in FORMS)
    say("time: padded forms in turns, then the rewritten one and silu in turns")
    eager_s, stock_s, *_ = in_turns([eager, stock, rewritten])
    rewritten_s, silu_s = in_turns([rewritten, partial(F.silu, inputs.x_TC)])
    return [
        Row(
            "time",
            "padded eager / rewritten",
            eager_s / rewritten_s,
            seconds(eager_s, rewritten_s),
            least=50,
        ),
        Row(
            "time",
            "padded under stock Inductor / rewritten",
            stock_s / rewritten_s,
            seconds(stock_s, rewritten_s),
            least=30,
        ),
        Row("time", "rewritten / silu(x)", rewritten_s / silu_s, seconds(rewritten_s, silu_s), most=3),
    ]


def growth_rows() -> list[Row]:
    steps = [Step(lens=skewed(longest)) for longest in LONGEST]
    results = [in_child("rewritten", step) for step in steps]
    peaks = [result.peak_bytes or 0 for result in results]
    calls = ready("rewritten", steps[0], *(make_inputs(step) for step in steps))
    say("growth: four skews in turns")
    times = in_turns(calls)
    rows = [
        Row(
            "growth",
            "rewritten: largest / smallest peak over the skews",
            max(peaks) / min(peaks),
            ", ".join(f"{peak:,}" for peak in peaks) + " bytes",
            most=FLAT,
        ),
        Row("growth", "rewritten: slowest / fastest", max(times) / min(times), seconds(*times), most=FLAT),
    ]
    for form in ("eager", "stock"):
        # Both ends scale with C alike: a quarter of it, to spare minutes.
        equal, skew = (in_child(form, replace(step, channels=256)) for step in (steps[0], steps[-1]))
        assert equal.peak_bytes is not None
        assert skew.peak_bytes is not None
        assert equal.seconds is not None
        assert skew.seconds is not None
        rows += [
            Row(
                "growth",
                f"{FORMS[form]}: peak at C=256, most skewed / equal",
                skew.peak_bytes / equal.peak_bytes,
                f"{skew.peak_bytes:,}, {equal.peak_bytes:,} bytes",
            ),
            Row(
                "growth",
                f"{FORMS[form]}: time at C=256, most skewed / equal",
                skew.seconds / equal.seconds,
                seconds(skew.seconds, equal.seconds),
            ),
        ]
    return rows


def small_rows() -> list[Row]:
    inputs = make_inputs(SMALL)
    ((eager,), (rewritten,)) = (ready(form, SMALL, inputs) for form in ("eager", "rewritten"))
    say("small steps: two codes in turns")
    eager_s, rewritten_s = in_turns([eager, rewritten])
    what = "8 requests x 4 tokens, C=10,240: rewritten / padded eager"
    return [Row("small steps", what, rewritten_s / eager_s, seconds(rewritten_s, eager_s), most=1)]


def skewed(longest: int, tokens: int = 32768, requests: int = 8) -> tuple[int, ...]:
    """Lengths that add up to ``tokens``: one of ``longest``, the rest shared evenly."""
    rest = tokens - longest
    return (longest, *(rest // (requests - 1) + (at < rest % (requests - 1)) for at in range(requests - 1)))


def in_child(form: str, step: Step) -> FormResult:
    result = run_child(
        Request(form, step.to_dict()), lambda text: say(f"{FORMS[form]}, L={step.longest}: {text}")
    )
    right = result.check is not None and not result.check["wrong"] and result.check["state_equal"]
    if not right or (form == "rewritten" and not result.rewrites):
        raise SystemExit(f"{FORMS[form]} is not measurable: {result}")
    return result


def ready(form: str, step: Step, *batches: Inputs) -> list[Callable[[], object]]:
    """A call of the form for each batch, all of one compile."""
    say(f"{FORMS[form]}: compiling and warming up")
    call = compiled_form(form)
    warm_up(call, step)
    return [partial(call, *inputs) for inputs in batches]


def in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each call, all called once in each of 2 to 15 rounds."""
    began = time.perf_counter()
    times: list[list[float]] = [[] for _ in calls]
    with torch.compiler.set_stance("fail_on_recompile"):
        for done in range(15):
            if done >= 2 and time.perf_counter() - began > TURNS_SECONDS:
                break
            for call, taken in zip(calls, times, strict=True):
                started = time.perf_counter()
                call()
                taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]


def seconds(*times: float) -> str:
    return ", ".join(f"{taken:.3g}" for taken in times) + " s"


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def show(rows: Sequence[Row], about: str) -> None:
    table = Table(title=about, title_justify="left")
    for name in ("", "ratio of", "value", "bar", "", "measured"):
        table.add_column(name, justify="right" if name in ("value", "bar") else "left", overflow="fold")
    for row in rows:
        bar = (
            f"<= {row.most:g}"
            if row.most is not None
            else f">= {row.least:g}"
            if row.least is not None
            else "-"
        )
        verdict = {True: "[green]pass[/green]", False: "[bold red]FAIL[/bold red]", None: ""}[row.passed]
        table.add_row(row.section, row.what, f"{row.value:.3g}", bar, verdict, row.detail)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=140)).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure memory, time, growth and small steps on this CPU.")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well")
    arguments = parser.parse_args()
    began = time.perf_counter()
    load = os.getloadavg()[0]
    rows = [*memory_rows(), *time_rows(), *growth_rows(), *small_rows()]
    here = machine.describe()
    # Another busy process slows the padded forms most (their threads wait for each other): it must show.
    about = (
        f"{here['cpu']}, {here['cores']} cores, {torch.get_num_threads()} threads, torch {here['torch']}, "
        f"load {load:.1f} before the run"
    )
    show(rows, about)
    say(f"took {time.perf_counter() - began:.0f} s")
    if arguments.json is not None:
        found = {
            "machine": here | {"load": load},
            "rows": [asdict(row) | {"passed": row.passed} for row in rows],
        }
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
