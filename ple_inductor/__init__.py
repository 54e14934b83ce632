"""A ``torch.compile`` backend that replaces padded ragged-batch code with varlen operators.

``torch.compile(fn, backend="ple_inductor", dynamic=True)`` needs no import of this package. The functions
here add the rewrites to the stock backend, tell what they would do, and tell what they did.

Nothing heavy may be imported here, torch included: each function imports what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ple_inductor.report import Report as Report

    __version__: str

__all__ = ["Report", "__version__", "disable", "enable", "enabled", "explain", "reports"]


def enable(*, strict: bool = False) -> None:
    """Add the rewrites to Inductor, for all that is compiled from now on in this thread.

    torch keeps Inductor's configuration for each thread apart: a function that another thread compiles is
    not affected. What was compiled before is not compiled again. Passes that are already in Inductor's
    ``post_grad_custom_pre_pass`` keep their place and run first. Calling it again changes only ``strict``.
    Does nothing under ``PLE_INDUCTOR=0``.

    Args:
        strict: Raise while compiling when a padded convolution is left as it is, instead of reporting it.
    """
    from ple_inductor.hooks import enable as call

    call(strict=strict)


def disable() -> None:
    """Take the rewrites out of Inductor again, in this thread; harmless where they are not in it.

    What was in ``post_grad_custom_pre_pass`` before `enable` is put back, the same object.
    """
    from ple_inductor.hooks import disable as call

    call()


def enabled(*, strict: bool = False) -> AbstractContextManager[None]:
    """A context, or a decorator, in which the rewrites are in Inductor; see `enable`.

    Compiling is lazy: what counts is where a compiled function is called first, not where
    ``torch.compile`` is. The configuration is put back on leaving, after an exception too; contexts nest.
    """
    from ple_inductor.hooks import enabled as call

    return call(strict=strict)


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """What would be rewritten if ``fn(*args, **kwargs)`` were compiled, what would not, and why.

    Calls ``fn`` once, with eager operators, on deep copies of the arguments (and of the object whose method
    ``fn`` is, or of the module that it is); what ``fn`` reaches in other ways, globals for example, it may
    change as any call does. Needs no C++ compiler and no Triton, and reads and writes no compile cache.

    Args:
        fn: A function, method or module, compiled already or not.
        args: The arguments of one call; they need the memory that this call needs, twice.
        kwargs: Its keyword arguments.

    Returns:
        One report over all graphs that the call gives. ``report.graphs`` is 0, and the report says so, where
        there was none.

    Raises:
        TypeError: ``fn`` cannot be called, not with these arguments, or an argument cannot be copied.
    """
    from ple_inductor.explanation import explain as call

    return call(fn, *args, **kwargs)


def reports() -> list[Report]:
    """What was rewritten, and what was left as it is, in this process so far.

    One report for each compiled graph that holds a candidate, in the order of compiling; a graph that came
    out of one of torch's compile caches counts as well, with ``from_cache`` set. A graph without a candidate
    gives none: `explain` says so.
    """
    from ple_inductor.report_store import reports as call

    return call()


def __getattr__(name: str) -> Any:
    if name == "Report":
        from ple_inductor.report import Report

        return Report
    if name == "__version__":
        from importlib.metadata import version

        return version("ple-inductor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
