"""How a replay is shown to a person: progress on stderr while it runs, one table on stdout at its end.

Where stderr is no terminal, progress is one plain line per stage. Colours repeat what the words say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ple_inductor.replay import Replay, Verdict, human
from ple_inductor.replay_process import FORMS, FormResult

_WIDTH_OF_A_PIPE = 120


@contextmanager
def progress() -> Iterator[Callable[[str, str], None]]:
    """Show what is going on; yields a function of a form and what is being done with it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda form, text: console.print(f"{FORMS[form]}: {text}", highlight=False)
        return
    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {form: bar.add_task(f"{name}: waiting", total=1, start=False) for form, name in FORMS.items()}
        order = list(FORMS)

        def show(form: str, text: str) -> None:
            for earlier in order[: order.index(form)]:
                bar.update(tasks[earlier], description=f"{FORMS[earlier]}: done", completed=1)
            bar.start_task(tasks[form])
            bar.update(tasks[form], description=f"{FORMS[form]}: {text}")

        yield show


def print_replay(replay: Replay) -> None:
    """Print the step, the table of its forms and what follows from it, on stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_A_PIPE)
    for line in _heading(replay):
        console.print(line)
    table = Table()
    table.add_column("form")
    table.add_column("peak above inputs", justify="right")
    table.add_column("x packed", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("verdict", overflow="fold")
    verdicts = replay.verdicts()
    for form, result in replay.forms.items():
        table.add_row(FORMS[form], *_numbers(replay, result), _coloured(verdicts[form]))
    console.print(table)
    for line in _conclusion(replay):
        console.print(line)


def _heading(replay: Replay) -> list[str]:
    step = replay.step
    lines = [
        f"{_counted(step.requests, 'request')}, {_counted(step.tokens, 'token')}, the longest "
        f"{step.longest:,}: {step.rows_per_token:.2f} padded rows per token. "
        f"C={step.channels:,}, {step.dtype}, K={step.kernel_size}, d={step.dilation}.",
        f"packed = the tokens alone = {human(step.packed_bytes)} ({step.packed_bytes:,} bytes); one padded "
        f"tensor = {human(step.padded_bytes)}.",
    ]
    if step.requests * step.longest == step.tokens:
        lines.append(
            "Nothing is padded in this step: unpadding saves no rows, only the extra copies of the data go."
        )
    if replay.limit_bytes is not None:
        lines.append(
            f"Limit: {human(replay.limit_bytes)} above the inputs, what the crashed GPU had free for "
            "10,240 channels, scaled. (--no-limit measures every form to its end.)"
        )
    return lines


def _numbers(replay: Replay, result: FormResult) -> tuple[str, str, str]:
    if result.peak_bytes is None or result.seconds is None:
        return "-", "-", "-"
    return (
        f"{human(result.peak_bytes)} ({result.peak_bytes:,})",
        f"{result.peak_bytes / replay.step.packed_bytes:.2f}",
        f"{result.seconds:.3g}",
    )


def _coloured(verdict: Verdict) -> str:
    text = verdict.text.replace("[", r"\[")
    return f"[green]{text}[/green]" if verdict.good else f"[red]{text}[/red]"


def _conclusion(replay: Replay) -> list[str]:
    rewritten = replay.forms["rewritten"]
    if not replay.ok:
        return ["[bold red]The rewritten form did not pass: see its verdict, and those above it.[/bold red]"]
    names = " and ".join(FORMS[form] for form in replay.compared_with)
    lines = [
        f"Results (output and whole state pool) compared with {names}, and with each request alone."
        if names
        else "No padded form finished: the result was compared with each request computed alone, unpadded."
    ]
    for form in replay.compared_with:
        other = replay.forms[form]
        assert other.peak_bytes is not None
        assert rewritten.peak_bytes is not None
        assert other.seconds is not None
        assert rewritten.seconds is not None
        lines.append(
            f"Against {FORMS[form]}: "
            f"{_times(other.peak_bytes / max(1, rewritten.peak_bytes), 'less memory', 'more memory')}, "
            f"{_times(other.seconds / rewritten.seconds, 'faster', 'slower')}."
        )
    return lines


def _times(ratio: float, better: str, worse: str) -> str:
    return f"{ratio:.1f} x {better}" if ratio >= 1 else f"{1 / ratio:.1f} x {worse}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
