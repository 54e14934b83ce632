"""``backend="ple_inductor"`` end to end: it is found, forwards what is Inductor's, and breaks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config

import ple_inductor
from ple_inductor import graph_pass, recompile_limit, report_store
from ple_inductor.passes.outcome import MemoryCertificate, Miss, Rewrite

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compile caches: the graphs here are reported on by rewrites that do not exist."""
    torch._dynamo.reset()
    monkeypatch.setattr(report_store, "_reports", [])
    with ExitStack() as stack:
        stack.enter_context(config.patch(fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield
    torch._dynamo.reset()


@pytest.fixture
def finds_relu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Rewrites that report each relu, and refuse each sigmoid; what they were told of inference.

    For tests of what is around the rewrites: compiling a padded convolution takes long.
    """
    told: list[bool] = []

    def run(graph: torch.fx.Graph, *, is_inference: bool) -> tuple[list[Rewrite], list[Miss]]:
        told.append(is_inference)
        targets = [str(node.target) for node in graph.nodes]
        memory = MemoryCertificate("T", "T", {"T": "tokens"})
        miss = Miss("padded_short_conv", "activation", "it is SiLU", "", "model.py:1 in f", "SiLU", "sigmoid")
        return (
            [Rewrite("padded_short_conv", "relu", "", memory) for each in targets if "relu" in each],
            [miss for each in targets if "sigmoid" in each],
        )

    monkeypatch.setattr(graph_pass.pipeline, "run", run)
    return told


SHARED_CACHE = """
import json, logging, sys
import torch
from padded_variants import inputs, short_conv

logging.getLogger("ple_inductor").addHandler(logging.StreamHandler(sys.stderr))
logging.getLogger("ple_inductor").setLevel(logging.INFO)
args, again = inputs([5, 0, 11]), inputs([5, 0, 11])

def fn(*args):
    return short_conv()(*args)[0], args[0] + float(sys.argv[1])

assert "ple_inductor" not in sys.modules
out, _ = torch.compile(fn, backend="ple_inductor", dynamic=True)(*args)
expected, _ = fn(*again)
same = torch.equal(out, expected) and torch.equal(args[4], again[4])

from torch._dynamo.utils import counters
import ple_inductor

torch._dynamo.reset()
print(json.dumps({
    "same": same,
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "reports": [report.to_dict() for report in ple_inductor.reports()],
    "count": counters["ple_inductor"]["padded_short_conv"],
}))
"""


def test_a_second_process_reports_what_the_first_one_cached() -> None:
    """And: the backend is found by its name alone, with nothing imported.

    A number in the graph that no run had before makes it new to the cache; the rest of the cache may be old.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPO / "tests")}
    command = [sys.executable, "-c", SHARED_CACHE, str(time.time())]
    found = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("padded_short_conv rewritten at") == 1, done.stderr
        found.append(json.loads(done.stdout))
    cold, warm = found
    assert cold["same"]
    assert warm["same"]
    assert (cold["hits"], warm["hits"]) == (0, 1)
    assert cold["count"] == warm["count"] == 1
    (first,), (second,) = cold["reports"], warm["reports"]
    assert first["from_cache"] is False
    assert second == {**first, "from_cache": True}
    assert first["rewrites"][0]["name"] == "padded_short_conv"
    assert first["function"].startswith("fn (")
    assert first["compile_id"] == "0/0"


def test_a_typing_error_in_the_name_lists_the_right_one() -> None:
    with pytest.raises(InvalidBackend):
        torch.compile(torch.relu, backend="ple-inductor")(torch.ones(3))
    assert "ple_inductor" in torch._dynamo.list_backends()


def test_an_unknown_option_is_one_line() -> None:
    compiled = torch.compile(torch.relu, backend="ple_inductor", options={"max_autotun": True})
    with pytest.raises(
        BackendCompilerFailed, match=r"unknown option 'max_autotun'.*did you mean 'max_autotune'"
    ):
        compiled(torch.ones(3))


def test_strict_raises_while_compiling(finds_relu: list[bool]) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x), torch.sigmoid(x)

    strict = torch.compile(both, backend="ple_inductor", options={"ple_inductor.strict": True})
    hook = config.post_grad_custom_pre_pass
    with pytest.raises(Exception, match=r"(?s)not everything was rewritten.*model.py:1 in f.*found +sigmoid"):
        strict(torch.ones(3))
    assert config.post_grad_custom_pre_pass is hook
    assert len(ple_inductor.reports()[0].misses) == 1


def theirs(graph: torch.fx.Graph) -> None:
    """A pass of the user's that leaves a trace."""
    counters["tests"]["theirs"] += 1


@pytest.mark.parametrize(
    "option", [theirs, [theirs], (theirs,), None], ids=["one", "list", "tuple", "ambient"]
)
def test_a_pass_of_the_users_runs_as_well(option: Any, finds_relu: list[bool]) -> None:
    counters.clear()
    ambient = [theirs] if option is None else None
    options = {} if option is None else {"post_grad_custom_pre_pass": option}
    with config.patch(post_grad_custom_pre_pass=ambient):
        compiled = torch.compile(torch.relu, backend="ple_inductor", options=options)
        assert compiled(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
        assert config.post_grad_custom_pre_pass is ambient
    assert counters["tests"]["theirs"] == 1
    assert finds_relu == [True]


def test_enabled_and_named_run_it_once(finds_relu: list[bool]) -> None:
    with ple_inductor.enabled():
        torch.compile(torch.relu, backend="ple_inductor")(torch.ones(3))
        assert finds_relu == [True]
        torch.compile(torch.neg)(torch.ones(3))
        assert finds_relu == [True, True]
    torch.compile(torch.abs)(torch.ones(3))
    assert finds_relu == [True, True]


def test_off_runs_nothing(monkeypatch: pytest.MonkeyPatch, finds_relu: list[bool]) -> None:
    monkeypatch.setenv("PLE_INDUCTOR", "0")
    options = {"ple_inductor.strict": True, "max_autotune": False}
    compiled = torch.compile(torch.relu, backend="ple_inductor", options=options)
    assert compiled(torch.tensor([-1.0])).tolist() == [0]
    assert finds_relu == []
    assert ple_inductor.reports() == []


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_modes(mode: str, finds_relu: list[bool]) -> None:
    compiled = torch.compile(torch.relu, backend="ple_inductor", mode=mode, dynamic=False)
    assert compiled(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
    assert len(ple_inductor.reports()[0].rewrites) == 1


def test_training(finds_relu: list[bool]) -> None:
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    torch.compile(torch.relu, backend="ple_inductor")(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1]
    assert set(finds_relu) == {False}


def test_no_tensors() -> None:
    def numbers(x: int, y: float) -> float:
        return x * y

    assert torch.compile(numbers, backend="ple_inductor", dynamic=True)(3, 0.5) == 1.5

    def made(n: int) -> torch.Tensor:
        return torch.arange(n) + n

    compiled = torch.compile(made, backend="ple_inductor", dynamic=True)
    assert [compiled(n).tolist() for n in (3, 2)] == [[3, 4, 5], [2, 3]]


def test_nothing_of_ours_that_raises_breaks_a_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    x = torch.tensor([-1.0, 2.0])
    monkeypatch.setattr(graph_pass.pipeline, "run", broken)
    assert torch.compile(torch.relu, backend="ple_inductor")(x).tolist() == [0, 2]
    assert ple_inductor.reports()[0].misses[0].found == "RuntimeError: broken"
    torch._dynamo.reset()
    monkeypatch.setattr(report_store, "_announce", broken)
    assert torch.compile(torch.relu, backend="ple_inductor")(x).tolist() == [0, 2]
    assert "a report cannot be read: broken" in caplog.text


def test_the_recompile_limit_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, finds_relu: list[bool]
) -> None:
    monkeypatch.setattr(recompile_limit, "_warned", set())

    def rewritten(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)

    with torch._dynamo.config.patch(recompile_limit=1):
        for fn in (rewritten, other):
            compiled = torch.compile(fn, backend="ple_inductor", dynamic=False)
            for size in (2, 3, 4, 5):
                assert torch.equal(compiled(torch.ones(size)), fn(torch.ones(size)))
    ours = [record.getMessage() for record in caplog.records if record.name == "ple_inductor.recompile_limit"]
    torchs = [record for record in caplog.records if "torch._dynamo hit config" in record.getMessage()]
    assert len(torchs) == 2
    assert len(ours) == 1
    assert f"rewritten ({__file__}:" in ours[0]
    assert "recompile_limit (1)" in ours[0]
    assert "dynamic=True" in ours[0]
