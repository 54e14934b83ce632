"""What a pass says of one candidate: a rewrite with its memory certificate, or a miss with its reason.

Plain data, so that a report can be stored beside a compiled artifact and read back by another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryCertificate:
    """Bytes a rewrite's subgraph holds at its peak before and after, inputs not counted.

    Args:
        before: Expression in the names of ``symbols``, under stock Inductor.
        after: The same, for the rewritten graph.
        symbols: What each name of the two expressions stands for, e.g. ``{"N": "requests"}``.
        known: The names whose value the compiled graph fixes, e.g. ``{"C": 10240, "b": 2}``.
    """

    before: str
    after: str
    symbols: Mapping[str, str]
    known: Mapping[str, int] = field(default_factory=dict)

    def evaluate(self, **values: int) -> tuple[int, int]:
        """Bytes ``(before, after)`` for the given sizes, e.g. ``evaluate(N=8, L=31344, T=32768)``.

        Names in ``known`` may be left out. Raises ``ValueError`` naming what is missing or unknown.
        """
        from sympy import sympify

        unknown = sorted(values.keys() - self.symbols.keys())
        if unknown:
            raise ValueError(f"unknown size {', '.join(unknown)}; expected {', '.join(self.symbols)}")
        sizes = {**self.known, **values}
        missing = [name for name in self.symbols if name not in sizes]
        if missing:
            raise ValueError(
                f"missing size {', '.join(missing)}; give each as a keyword, e.g. {missing[0]}=8"
            )
        before, after = (
            # A name such as N or S is also a function of sympy: bind all of them as plain symbols.
            sympify(text, locals=dict(_plain_symbols(self.symbols))).subs(sizes)
            for text in (self.before, self.after)
        )
        return int(before), int(after)


@dataclass(frozen=True)
class Rewrite:
    """One subgraph that was replaced.

    Args:
        name: Which rewrite, e.g. ``padded_short_conv``.
        node: The anchor's name in the graph that was rewritten.
        source: The user's line that produced the anchor, ``file:line in function: code``, or "".
        memory: Its memory certificate.
    """

    name: str
    node: str
    source: str
    memory: MemoryCertificate


@dataclass(frozen=True)
class Miss:
    """One candidate that was left as it was, and the first obligation that did not hold.

    Args:
        name: Which rewrite, e.g. ``padded_short_conv``.
        code: Stable identifier of the reason, e.g. ``conv_has_bias``.
        obligation: What had to be proven, in words.
        node: The node at which the proof stopped.
        source: The user's line that produced that node, ``file:line in function: code``, or "".
        expected: What the obligation needed.
        found: What the graph has instead.
    """

    name: str
    code: str
    obligation: str
    node: str
    source: str
    expected: str
    found: str


def _plain_symbols(names: Mapping[str, str]) -> dict[str, object]:
    from sympy import Symbol

    return {name: Symbol(name) for name in names}
