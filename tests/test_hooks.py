"""enable, disable and enabled: the hook holds our pass while it should, and the user's value otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._inductor import config

from ple_inductor import disable, enable, enabled, report_store, reports
from ple_inductor.graph_pass import PlePass
from ple_inductor.report import Report


def theirs(graph: torch.fx.Graph) -> None:
    """A pass of the user's."""


VALUES = [None, theirs, [theirs], (theirs,), [], [theirs, theirs]]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with config.patch(post_grad_custom_pre_pass=None):
        yield
        disable()


def hook() -> Any:
    return config.post_grad_custom_pre_pass


def ours() -> list[PlePass]:
    value = hook() if isinstance(hook(), list | tuple) else [hook()]
    return [each for each in value if isinstance(each, PlePass)]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_enable_and_disable_restore_the_same_object(value: Any) -> None:
    config.post_grad_custom_pre_pass = value
    enable()
    assert ours() == [PlePass()]
    enable(strict=True)
    assert ours() == [PlePass(strict=True)]
    disable()
    assert hook() is value


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_enabled_restores_after_an_exception(value: Any) -> None:
    config.post_grad_custom_pre_pass = value
    inside: list[PlePass] = []

    @enabled()
    def fail() -> None:
        inside.extend(ours())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [PlePass()]
    assert hook() is value


def test_contexts_nest() -> None:
    config.post_grad_custom_pre_pass = value = [theirs]
    with enabled():
        with enabled(strict=True):
            assert ours() == [PlePass(strict=True)]
        assert ours() == [PlePass()]
        with enabled():
            assert ours() == [PlePass()]
        assert ours() == [PlePass()]
    assert hook() is value


def test_a_context_inside_of_enable_leaves_it_enabled() -> None:
    config.post_grad_custom_pre_pass = value = (theirs,)
    enable()
    with enabled(strict=True):
        pass
    assert ours() == [PlePass()]
    disable()
    assert hook() is value


def test_disable_without_enable_is_harmless() -> None:
    config.post_grad_custom_pre_pass = value = [theirs]
    disable()
    disable()
    assert hook() is value


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ([theirs], [theirs]),
        ([theirs, PlePass()], [theirs]),
        ((PlePass(), theirs), (theirs,)),
        (PlePass(), None),
    ],
)
def test_a_hook_that_the_user_changed_since_keeps_the_change(changed: Any, left: Any) -> None:
    enable()
    config.post_grad_custom_pre_pass = changed
    disable()
    assert hook() == left
    with enabled():
        config.post_grad_custom_pre_pass = changed
    assert hook() == left


def test_works_as_a_decorator() -> None:
    @enabled()
    def inside() -> list[PlePass]:
        return ours()

    assert inside() == inside() == [PlePass()]
    assert ours() == []


def test_off_enables_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLE_INDUCTOR", "0")
    enable()
    with enabled():
        assert hook() is None
    assert hook() is None


def test_another_thread_is_not_affected() -> None:
    """torch keeps its configuration for each thread apart."""
    seen: list[Any] = []

    def other() -> None:
        seen.append(hook())
        with enabled():
            seen.append(ours())

    enable()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None, [PlePass()]]
    assert ours() == [PlePass()]


def test_reports_of_cached_graphs_come_at_the_end_of_a_compile() -> None:
    """Without being asked for; torch._dynamo.reset() takes the callback away, `reports` finds them still."""
    import json

    enable()
    enable()
    assert callback_handler.end_callbacks.count(report_store.on_compile_end) == 1
    replayed = f"ple_inductor.report {json.dumps(Report(function='f (a.py:1)').to_dict())}"
    counters["inductor"][replayed] += 1
    before = len(report_store._reports)
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    assert len(report_store._reports) == before + 1
    assert report_store._reports[-1].from_cache
    torch._dynamo.reset()
    counters["inductor"][replayed] += 1
    assert len(reports()) == before + 2
