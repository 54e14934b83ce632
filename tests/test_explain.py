"""`explain` tells what a compile would do, without one, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from padded_variants import inputs, short_conv
from torch._dynamo.utils import counters
from torch._inductor import config

import ple_inductor
from ple_inductor import explain, graph_pass
from ple_inductor.passes.outcome import MemoryCertificate, Miss, Rewrite
from ple_inductor.report import Report

LENS = [5, 0, 11]


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    """Whoever calls the C++ compiler finds none."""
    torch._dynamo.reset()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield


@pytest.fixture
def finds_relu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Rewrites that report each relu, and refuse each sigmoid; what they were told of inference.

    For tests of what is around the rewrites: capturing a padded convolution takes seconds.
    """
    told: list[bool] = []

    def run(graph: torch.fx.Graph, *, is_inference: bool) -> tuple[list[Rewrite], list[Miss]]:
        told.append(is_inference)
        targets = [str(node.target) for node in graph.nodes]
        memory = MemoryCertificate("T", "T", {"T": "tokens"})
        return (
            [Rewrite("padded_short_conv", "relu", "", memory) for each in targets if "relu" in each],
            [
                Miss("padded_short_conv", "activation", "", "", "", "", "")
                for each in targets
                if "sigmoid" in each
            ],
        )

    monkeypatch.setattr(graph_pass.pipeline, "run", run)
    return told


def codes(report: Report) -> list[str]:
    return [miss.code for miss in report.misses]


def test_says_what_would_be_rewritten_and_changes_nothing() -> None:
    x, *rest = inputs(LENS)
    args = (x.t().contiguous().t(), *rest)
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    counters.clear()
    known = len(ple_inductor.reports())
    report = explain(short_conv(), *args)
    assert [rewrite.name for rewrite in report.rewrites] == ["padded_short_conv"]
    assert codes(report) == []
    assert report.graphs == 1
    assert report.function.startswith("fn (")
    assert "padded_variants.py" in report.rewrites[0].source
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor))
    assert len(ple_inductor.reports()) == known
    assert not [name for name in counters["inductor"] if "cache" in name]
    assert "autograd_cache_saved" not in counters["aot_autograd"]


def test_says_why_not_and_a_pass_of_the_users_comes_first() -> None:
    seen: list[str] = []

    def theirs(graph: torch.fx.Graph) -> None:
        seen.append(str(graph))

    known = len(ple_inductor.reports())
    with config.patch(post_grad_custom_pre_pass=[theirs]), ple_inductor.enabled(strict=True):
        report = explain(short_conv(activation=torch.nn.functional.gelu), *inputs(LENS))
    assert codes(report) == ["activation"]
    assert report.rewrites == ()
    assert len(seen) == 1
    assert "convolution" in seen[0]
    assert len(ple_inductor.reports()) == known


def test_says_whether_the_graph_is_for_training(finds_relu: list[bool]) -> None:
    x = torch.ones(3, requires_grad=True)
    explain(torch.relu, x)
    forward_and_backward = len(finds_relu)
    with torch.no_grad():
        explain(torch.relu, x)
    assert finds_relu == [False] * forward_and_backward + [True]
    assert x.grad is None


def test_nothing_to_rewrite_is_no_success() -> None:
    report = explain(torch.neg, torch.ones(3))
    assert report.graphs == 1
    assert "no candidate convolution in this graph" in str(report)


def test_graphs_are_merged(finds_relu: list[bool]) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.sigmoid(x)

    report = explain(twice, torch.ones(3))
    assert report.graphs == 2
    assert len(report.rewrites) == 1
    assert codes(report) == ["activation"]
    assert "1 rewritten, 1 not rewritten in these 2 graphs" in " ".join(str(report).split())


def test_a_call_without_a_graph_says_so() -> None:
    report = explain(lambda x: len(x), [1, 2])
    assert report.graphs == 0
    assert "not compiled: no graph was captured" in str(report)


def test_not_compiled_yet() -> None:
    """Compiling is lazy: after ``torch.compile`` there is nothing yet."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="eager")
    report = explain(compiled)
    assert report.graphs == 0
    assert "not compiled yet" in str(report)
    compiled(torch.ones(2))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        explain(compiled)


class Layer(torch.nn.Module):
    """Holds its state, as an engine's layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pool", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pool.add_(x)
        return torch.relu(self.pool)

    @torch.compile(backend="eager")
    def compiled_method(self, x: torch.Tensor) -> Any:
        return self.forward(x)


@pytest.mark.parametrize(
    "form",
    [
        lambda layer: layer,
        lambda layer: layer.forward,
        lambda layer: layer.compiled_method,
        lambda layer: torch.compile(layer, backend="eager"),
        lambda layer: torch.compile(layer.forward, backend="eager"),
        lambda layer: torch.compile(torch.compile(layer.forward, backend="eager"), backend="eager"),
        lambda layer: layer.compile(backend="eager") or layer,
    ],
    ids=["module", "method", "in its class", "compiled module", "compiled method", "twice", "in place"],
)
def test_modules_methods_and_compiled_forms(form: Any, finds_relu: list[bool]) -> None:
    layer = Layer()
    report = explain(form(layer), torch.ones(3))
    assert len(report.rewrites) == 1
    assert report.graphs == 1
    assert layer.pool.tolist() == [0, 0, 0]


def test_what_arguments_share_is_still_shared() -> None:
    layer = Layer()
    seen: list[bool] = []

    def check(layer: Layer, pool: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        seen.append(layer.pool is pool and view.data_ptr() == pool.data_ptr() and view.stride() == (2,))
        return pool

    explain(torch._dynamo.disable(check), layer, layer.pool, view=layer.pool[::2])
    assert seen == [True]


def test_wrong_calls_are_one_line() -> None:
    def needs(x: torch.Tensor) -> torch.Tensor:
        return x

    for call in (lambda: explain(needs), lambda: explain(needs, 1, 2), lambda: explain(3)):  # type: ignore[arg-type]
        with pytest.raises(TypeError) as error:
            call()
        assert "\n" not in str(error.value)


def test_what_cannot_be_copied_is_one_line() -> None:
    computed = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(TypeError, match=r"runs on copies.* cannot be copied") as error:
        explain(torch.relu, computed)
    assert "\n" not in str(error.value)


def test_uses_up_no_recompile_of_the_function() -> None:
    def scaled(x: torch.Tensor, factor: str) -> torch.Tensor:
        return x * len(factor)

    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for factor in ("a", "bb", "ccc"):
            explain(scaled, torch.ones(2), factor)
        compiled = torch.compile(scaled, backend="eager", dynamic=False)
        assert compiled(torch.ones(2), "dddd").tolist() == [4, 4]
        explain(compiled, torch.ones(2), "eeeee")


def test_says_when_everything_is_off(monkeypatch: pytest.MonkeyPatch, finds_relu: list[bool]) -> None:
    monkeypatch.setenv("PLE_INDUCTOR", "off")
    report = explain(torch.relu, torch.ones(3))
    assert report.note == "PLE_INDUCTOR=off is set: the backend rewrites nothing"
    assert len(report.rewrites) == 1


@torch.library.custom_op("ple_inductor_tests::hidden_ple_short_conv", mutates_args=("out",))
def hidden(x: torch.Tensor, out: torch.Tensor) -> None:
    """As an engine's operator: it writes into an argument, so the compiler wraps it."""
    out.copy_(x)


@hidden.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


@pytest.mark.parametrize("second_version", [False, True])
def test_an_operator_that_hides_the_code_is_named(second_version: bool) -> None:
    def engine(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.ple_inductor_tests.hidden_ple_short_conv(x, out)
        return out + 1

    with config.patch(enable_auto_functionalized_v2=second_version):
        report = explain(engine, torch.ones(3))
    assert [each.name for each in report.opaque] == ["ple_inductor_tests::hidden_ple_short_conv"]
    assert "test_explain.py" in report.opaque[0].source
    assert "no candidate convolution in this graph, 1 hidden in operators" in " ".join(str(report).split())


def test_graph_with_a_tensor_constant():
    """The constant lies on the graph's module, which cannot be copied while values are fake."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.tensor(True), x, 0)

    assert explain(fn, torch.ones(3)).graphs == 1
