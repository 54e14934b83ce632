"""Says so when Dynamo stops compiling a function that was rewritten.

After ``torch._dynamo.config.recompile_limit`` variants of a function, Dynamo runs each further one eager:
the padded tensors are back. torch offers no callback for it, but logs it in one place, with the function as
an argument of the record. A filter on that logger reads the record and lets it pass; torch's own log
settings may replace handlers, but leave filters alone.
"""

from __future__ import annotations

import logging

from ple_inductor import report_store

log = logging.getLogger(__name__)

_DYNAMO = "torch._dynamo.convert_frame"
_warned: set[str] = set()


def watch() -> None:
    """Start to watch; any number of calls have the effect of one."""
    logging.getLogger(_DYNAMO).addFilter(_look_at)


def _look_at(record: logging.LogRecord) -> bool:
    try:
        if "torch._dynamo hit config." in str(record.msg) and isinstance(record.args, tuple):
            limit, value, function, reason, *_ = map(str, record.args)
            _warn(limit, value, function.replace("'", ""), reason)
    except Exception:
        log.debug("Dynamo's message about its recompile limit was not understood", exc_info=True)
    return True


def _warn(limit: str, value: str, function: str, reason: str) -> None:
    rewritten = {report.function.replace("'", "") for report in report_store.reports() if report.rewrites}
    if function not in rewritten or function in _warned:
        return
    _warned.add(function)
    log.warning(
        "%s was compiled torch._dynamo.config.%s (%s) times and is not compiled for further sizes: these run "
        "eager, with padded tensors. Use torch.compile(..., dynamic=True), or raise the limit. The last "
        "recompile's reason: %s",
        function,
        limit,
        value,
        reason,
    )
