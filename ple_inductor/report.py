"""What became of the candidates of one compiled graph, for a person and for a program.

A `Report` is plain data and knows nothing of where it is kept. Its text says outright when there was
nothing to rewrite, so that no match never looks like success. A new fact is a field here; ``to_dict`` and
``from_dict`` follow the dataclasses by themselves, ``_lines`` does not.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ple_inductor.passes.outcome import MemoryCertificate, Miss, Rewrite

_WIDTH = 100
_LABEL = 15


@dataclass(frozen=True)
class OpaqueOperator:
    """An operator that holds a candidate by its name, and into which no pass can look.

    Args:
        name: Its qualified name, e.g. ``vllm::qwen4_exp_ple_short_conv``.
        source: The user's line that calls it, ``file:line in function: code``, or "".
    """

    name: str
    source: str


@dataclass(frozen=True)
class Report:
    """What was rewritten, what was not, and why.

    ``str(report)`` is a short table, at most 100 columns wide.

    Args:
        rewrites: Subgraphs that were replaced.
        misses: Candidates that were left as they were, each with its reason.
        opaque: Operators that hide a candidate.
        function: The function that was compiled, ``name (file:line)``, or "" where torch does not say.
        compile_id: torch's name for the compile, e.g. ``0/1``, or "".
        from_cache: Whether the compiled graph came out of a cache, so that the pass did not run.
        graphs: How many graphs this report is about; 0 if there was none.
        note: Something to know about the whole report, or "".
    """

    rewrites: tuple[Rewrite, ...] = ()
    misses: tuple[Miss, ...] = ()
    opaque: tuple[OpaqueOperator, ...] = ()
    function: str = ""
    compile_id: str = ""
    from_cache: bool = False
    graphs: int = 1
    note: str = ""

    @property
    def has_candidates(self) -> bool:
        """Whether there was anything that could have been rewritten."""
        return bool(self.rewrites or self.misses or self.opaque)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, ready for JSON; `from_dict` reads it back."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` gave ``data`` for, through JSON or not.

        Raises:
            TypeError, KeyError: ``data`` is no such dict.
        """
        parts = {
            "rewrites": tuple(
                Rewrite(**{**rewrite, "memory": MemoryCertificate(**rewrite["memory"])})
                for rewrite in data["rewrites"]
            ),
            "misses": tuple(Miss(**miss) for miss in data["misses"]),
            "opaque": tuple(OpaqueOperator(**operator) for operator in data["opaque"]),
        }
        return Report(**{**data, **parts})

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    yield from _wrapped(f"{report.function or 'ple_inductor'}: {_summary(report)}", indent=2)
    if report.note:
        yield from _row("note", report.note)
    for rewrite in report.rewrites:
        memory = rewrite.memory
        yield ""
        yield from _row("rewritten", rewrite.name)
        yield from _row("  at", rewrite.source or rewrite.node)
        yield from _row("  bytes before", memory.before)
        yield from _row("  bytes after", memory.after)
        yield from _row("  where", ", ".join(_sizes(memory)))
    for miss in report.misses:
        yield ""
        yield from _row("not rewritten", miss.name)
        yield from _row("  at", miss.source or miss.node or "the whole graph")
        yield from _row("  reason", f"{miss.code}: not proven that {miss.obligation}")
        yield from _row("  expected", miss.expected)
        yield from _row("  found", miss.found)
    for operator in report.opaque:
        yield ""
        yield from _row("hidden", f"{operator.name}, an operator into which a pass cannot look")
        if operator.source:
            yield from _row("  at", operator.source)


def _summary(report: Report) -> str:
    if not report.graphs:
        return "nothing was looked at"
    graphs = "this graph" if report.graphs == 1 else f"these {report.graphs} graphs"
    if not report.rewrites and not report.misses:
        counts = [f"0 rewritten, no candidate convolution in {graphs}"]
    else:
        counts = [f"{len(report.rewrites)} rewritten, {len(report.misses)} not rewritten in {graphs}"]
    if report.opaque:
        counts.append(f"{len(report.opaque)} hidden in operators")
    if report.from_cache:
        counts.append("from a compile cache")
    return ", ".join(counts)


def _sizes(memory: MemoryCertificate) -> Iterator[str]:
    for name, meaning in memory.symbols.items():
        value = f" = {memory.known[name]}" if name in memory.known else ""
        yield f"{name} {meaning}{value}"


def _row(label: str, text: str) -> list[str]:
    return _wrapped(f"{label:<{_LABEL}} {text}", indent=_LABEL + 1)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.splitlines()),
        _WIDTH,
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        drop_whitespace=True,
    )
