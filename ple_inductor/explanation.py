"""What would be rewritten in a function, without compiling it to machine code.

The function is captured and taken through Inductor's own graph passes up to the hook in which our pass
stands, so that the rewrites see the graph that a compile would give them. The graph as it was before is
then run eager, so that a function of several graphs goes on to the next one. All of it works on copies of
the arguments, with torch's compile caches off, and in a set of compiled entries of its own: no recompile of
the user's is used up.

The file is not called ``explain``: importing it would put the module in the place of
`ple_inductor.explain`.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule, _debug_get_cache_entry_list, innermost_fn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, fake_tensor_prop
from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

from ple_inductor.graph_pass import examine, without_ours
from ple_inductor.report import Report
from ple_inductor.settings import ENVIRONMENT, is_off


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """See `ple_inductor.explain`."""
    target = _uncompiled(fn)
    if not args and not kwargs and _is_compiled(fn) and _needs_arguments(target) and not _has_run(target):
        return Report(
            function=_name(target),
            graphs=0,
            note="not compiled yet: compiling waits for the first call; give explain() the arguments of one",
        )
    _check_arguments(target, args, kwargs)
    try:
        # All in one, so that what the arguments share is still shared.
        target, args, kwargs = copy.deepcopy((target, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"explain() runs on copies, and {_name(target)} or an argument of it cannot be copied: {error}"
        ) from error
    inspector = _Inspector()
    compiled = torch.compile(  # type: ignore[call-overload]  # torch declares isolate_recompiles only below
        target, backend=inspector.backend, dynamic=True, isolate_recompiles=True
    )
    compiled(*args, **kwargs)
    return inspector.report(_name(target))


@dataclass
class _Inspector:
    """Looks at each graph of one call."""

    found: list[Report] = field(default_factory=list)
    graphs: int = 0

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        patches = {
            "post_grad_custom_pre_pass": (
                *without_ours(config.post_grad_custom_pre_pass),
                _Recorder(self.found),
            ),
            # These need a compiler, or change the caller's module.
            "cpp_wrapper": False,
            "fx_wrapper": False,
            "freezing": False,
        }
        self.graphs += 1
        with functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
            return compile_fx(gm, example_inputs, inner_compile=_run_eager, config_patches=patches)

    def report(self, function: str) -> Report:
        """Everything found, as one."""
        note = "" if self.graphs else "not compiled: no graph was captured"
        if is_off():
            note = f"{ENVIRONMENT}={os.environ[ENVIRONMENT]} is set: the backend rewrites nothing"
        return Report(
            rewrites=tuple(rewrite for each in self.found for rewrite in each.rewrites),
            misses=tuple(miss for each in self.found for miss in each.misses),
            opaque=tuple(operator for each in self.found for operator in each.opaque),
            function=function,
            graphs=self.graphs,
            note=note,
        )


@dataclass
class _Recorder(CustomInferenceAwareGraphPass):
    """Stands where `PlePass` would, and keeps what it would report."""

    found: list[Report]

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        self.found.append(examine(graph, is_inference=is_inference))

    def uuid(self) -> None:
        return None


def _run_eager(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """In place of Inductor's compiler: let the hook see a copy of the graph, and run the original."""
    # Tensor constants stay shared: under Inductor's fake mode they cannot be copied.
    seen = GraphModule(gm, copy.deepcopy(gm.graph))
    seen.meta.update(gm.meta)
    view_to_reshape(seen)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        fake_mode = fake_tensor_prop(seen, example_inputs)
    # Inductor's own patterns run behind the hook: their work would be thrown away.
    with V.set_fake_mode(fake_mode), config.patch(pattern_matcher=False):
        _recursive_post_grad_passes(seen, is_inference=kwargs.get("is_inference", False))
    return make_boxed_func(gm.forward)


def _uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What is inside of ``torch.compile(...)``."""
    if isinstance(fn, OptimizedModule):
        return fn._orig_mod
    if isinstance(fn, MethodType):  # its attributes are those of the function
        return MethodType(_uncompiled(fn.__func__), fn.__self__)
    return innermost_fn(fn)


def _is_compiled(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, torch.nn.Module) and not isinstance(fn, OptimizedModule):
        return fn._compiled_call_impl is not None
    return _uncompiled(fn) != fn


def _python_function(target: Callable[..., Any]) -> Callable[..., Any]:
    function = target.forward if isinstance(target, torch.nn.Module) else target
    return function.__func__ if isinstance(function, MethodType) else function


def _has_run(target: Callable[..., Any]) -> bool:
    function = _python_function(target)
    return inspect.isfunction(function) and bool(_debug_get_cache_entry_list(function.__code__))


def _needs_arguments(target: Callable[..., Any]) -> bool:
    try:
        _check_arguments(target, (), {})
    except TypeError:
        return True
    return False


def _check_arguments(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not callable(target):
        raise TypeError(f"explain() needs a function, method or module; got {type(target).__name__}")
    try:
        signature = inspect.signature(target.forward if isinstance(target, torch.nn.Module) else target)
    except ValueError:  # a builtin that does not tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{_name(target)}: {error}; call explain(fn, ...) with the arguments of one call"
        ) from None


def _name(target: Callable[..., Any]) -> str:
    function = _python_function(target)
    if not inspect.isfunction(function):
        return type(target).__name__
    code = function.__code__
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
