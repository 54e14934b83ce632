"""The reports of this process, those of graphs that came out of a compile cache included.

On a cache hit no pass runs. What does happen is that torch replays the increments which compiling made to
its counters: they are part of the cached artifact. So a report travels as the *name* of a counter, and the
live and the cached report take one path, wherever the artifact was copied to. `harvest` turns counters into
reports and must be called often enough that nobody clears the counters in between: the pass, the backend
and the end of each compile do. A counter is only read, never removed, because the compile that made it may
not be finished.

Nothing here may raise: a user's compile does not fail for a report's sake.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import replace
from typing import Any

from ple_inductor.report import Report

log = logging.getLogger(__name__)

_PREFIX = "ple_inductor.report "

_lock = threading.RLock()
_reports: list[Report] = []
_seen: dict[str, int] = {}
_warned: set[str] = set()


def reports() -> list[Report]:
    """All reports so far, oldest first."""
    harvest()
    with _lock:
        return list(_reports)


def publish(report: Report) -> None:
    """Put the report of a graph that is being compiled where a cached artifact takes it along."""
    from torch._dynamo.utils import counters

    try:
        counter = _PREFIX + json.dumps(report.to_dict(), default=str)
        with _lock:
            counters["inductor"][counter] += 1
            harvest(live=counter)
    except Exception as error:
        log.warning("a report is lost: %s", error)


def harvest(*, live: str = "", compile_id: str = "") -> None:
    """Turn counters that are new since the last call into reports, and announce these.

    Args:
        live: The counter of which one increment was made by a pass in this process.
        compile_id: torch's name for the compile, where the current context does not tell.
    """
    if "torch._dynamo.utils" not in sys.modules:
        return
    from torch._dynamo.utils import counters

    try:
        with _lock:
            counts = {
                name: count for name, count in list(counters["inductor"].items()) if name.startswith(_PREFIX)
            }
            for name in _seen.keys() - counts.keys():  # somebody cleared the counters
                del _seen[name]
            for name, count in counts.items():
                before = _seen.get(name, 0)
                _seen[name] = count
                for nth in range(before if before <= count else 0, count):
                    is_live = name == live and nth == count - 1
                    _add(Report.from_dict(json.loads(name.removeprefix(_PREFIX))), is_live, compile_id)
    except Exception as error:
        log.warning("a report cannot be read: %s", error)


def _add(report: Report, is_live: bool, compile_id: str) -> None:
    function, current_id = current_compile()
    report = replace(
        report,
        function=function or report.function,
        compile_id=current_id or compile_id,
        from_cache=not is_live,
    )
    _reports.append(report)
    _announce(report)


def current_compile() -> tuple[str, str]:
    """The function that is being compiled, ``name (file:line)``, and the compile's name; "" for unknown."""
    from torch._guards import CompileContext, TracingContext

    context = TracingContext.try_get()
    function = ""
    if context is not None and context.traced_code:
        code = context.traced_code[0]
        function = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    return function, str(CompileContext.current_compile_id() or "")


def _announce(report: Report) -> None:
    """Log, count and trace a new report."""
    from torch._dynamo.utils import counters
    from torch._logging._internal import trace_structured

    suffix = " (from a compile cache)" if report.from_cache else ""
    for rewrite in report.rewrites:
        counters["ple_inductor"][rewrite.name] += 1
        log.info(
            "%s rewritten at %s; bytes before: %s; after: %s%s",
            rewrite.name,
            rewrite.source or rewrite.node,
            rewrite.memory.before,
            rewrite.memory.after,
            suffix,
        )
    for miss in report.misses:
        counters["ple_inductor"][f"{miss.name}.refused"] += 1
        raised = miss.code == "pass_raised" and miss.found not in _warned
        if raised:
            _warned.add(miss.found)
        log.log(
            logging.WARNING if raised else logging.INFO,
            "%s left as it was at %s; %s: expected %s, found %s%s",
            miss.name,
            miss.source or miss.node or "the whole graph",
            miss.code,
            miss.expected,
            miss.found,
            suffix,
        )
    for operator in report.opaque:
        log.info("%s hides what it computes from the rewrites%s", operator.name, suffix)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "ple_inductor_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(report.to_dict()),
    )


def on_compile_end(arguments: Any) -> None:
    """Called by torch at the end of a compile: reports of cached graphs appear without being asked for."""
    harvest(compile_id=arguments.compile_id)
