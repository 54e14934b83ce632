"""Put the pass into the stock backend's configuration, and take it out again.

torch keeps this configuration for each thread apart, so what `enable` has to remember is kept for each
thread apart as well: the value that was there before and the one that took its place. If someone has
changed the hook since, only our pass is taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch._dynamo.callback import callback_handler
from torch._inductor import config

from ple_inductor import recompile_limit, report_store
from ple_inductor.graph_pass import PlePass, with_ours, without_ours

# A graph out of a compile cache calls these operators without any pass having run.
from ple_inductor.lowerings import update_conv_state, varlen_short_conv  # noqa: F401
from ple_inductor.settings import is_off

# (what `enable` found in the hook, what it put there)
_exchanged: ContextVar[tuple[Any, Any] | None] = ContextVar("ple_inductor_exchanged", default=None)


def enable(*, strict: bool) -> None:
    """See `ple_inductor.enable`."""
    if is_off():
        return
    found = config.post_grad_custom_pre_pass
    exchanged = _exchanged.get()
    before = exchanged[0] if exchanged is not None and exchanged[1] is found else found
    _exchange(before, with_ours(found, strict=strict))
    recompile_limit.watch()
    # torch._dynamo.reset() drops the callback; reports() then finds what it would have announced.
    if report_store.on_compile_end not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(report_store.on_compile_end)


def disable() -> None:
    """See `ple_inductor.disable`."""
    found = config.post_grad_custom_pre_pass
    exchanged = _exchanged.get()
    if exchanged is not None and exchanged[1] is found:
        config.post_grad_custom_pre_pass = exchanged[0]
    else:
        _take_out(found)
    _exchanged.set(None)


@contextmanager
def enabled(*, strict: bool) -> Iterator[None]:
    """See `ple_inductor.enabled`."""
    found, exchanged = config.post_grad_custom_pre_pass, _exchanged.get()
    enable(strict=strict)
    put = config.post_grad_custom_pre_pass
    try:
        yield
    finally:
        if config.post_grad_custom_pre_pass is put:
            config.post_grad_custom_pre_pass = found
            _exchanged.set(exchanged)
        elif not _has_ours(found):
            disable()


def _exchange(before: Any, after: Any) -> None:
    config.post_grad_custom_pre_pass = after
    _exchanged.set((before, after))


def _take_out(found: Any) -> None:
    if not _has_ours(found):
        return
    theirs = without_ours(found)
    # The kind of container is the user's.
    config.post_grad_custom_pre_pass = type(found)(theirs) if isinstance(found, list | tuple) else None


def _has_ours(found: Any) -> bool:
    passes = found if isinstance(found, list | tuple) else (found,)
    return any(isinstance(each, PlePass) for each in passes)
