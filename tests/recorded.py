"""Compile a function with the rewrites and keep what a test wants to look at."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from graph_text import graph_text
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code

from ple_inductor.explanation import _run_eager
from ple_inductor.passes.outcome import Miss, Rewrite
from ple_inductor.passes.pipeline import run


@dataclass
class Recorded:
    """Everything one compiled call left behind; one entry a graph in each list."""

    output: Any = None
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    @property
    def codes(self) -> list[str]:
        return [miss.code for miss in self.misses]


def record(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool = True,
    call: Callable[..., Any] | None = None,
    codegen: bool = True,
) -> Recorded:
    """Compile ``fn`` afresh, call it once on the given arguments, and record the graphs and the code.

    ``call(compiled, *args)`` makes the call where the function wants its arguments in another form. Without
    ``codegen`` the graphs are recorded and the original ones run eager, which saves the C++ compiler.
    """
    recorded = Recorded()
    torch._dynamo.reset()
    with recording(recorded):
        backend = "inductor" if codegen else _graphs_only
        compiled = torch.compile(fn, dynamic=dynamic, backend=backend)
        called = compiled if call is None else functools.partial(call, compiled)
        if codegen:
            recorded.output, recorded.code = run_and_get_code(called, *args)
        else:
            recorded.output = called(*args)
    return recorded


def _graphs_only(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    return compile_fx(gm, example_inputs, inner_compile=_run_eager)


@contextmanager
def recording(recorded: Recorded) -> Iterator[None]:
    """A context in which stock Inductor runs the rewrites and ``recorded`` keeps every graph."""
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

    class Recorder(CustomInferenceAwareGraphPass):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
            recorded.before.append(str(graph))
            rewrites, misses = run(graph, is_inference=is_inference)
            recorded.after.append(str(graph))
            recorded.snapshots.append(graph_text(graph))
            recorded.rewrites += rewrites
            recorded.misses += misses

        def uuid(self) -> None:
            return None

    with (
        inductor_config.patch(post_grad_custom_pre_pass=Recorder(), fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def eager(fn: Callable[..., Any], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """The result of ``fn`` on copies of ``args``, and the copies, which it may have written into."""
    copies = copy.deepcopy(args)
    return fn(*copies), copies
