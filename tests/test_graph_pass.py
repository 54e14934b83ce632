"""`PlePass` as Inductor's configuration and caches treat it, and what it does when things go wrong."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import ple_inductor
from ple_inductor import graph_pass, report_store
from ple_inductor.graph_pass import PlePass, StrictError, examine, with_ours, without_ours
from ple_inductor.passes.outcome import MemoryCertificate, Miss, Rewrite

MISS = Miss("padded_short_conv", "conv_padded", "nothing is padded", "conv", "a.py:1 in f", "0", "1")
REWRITE = Rewrite("padded_short_conv", "conv", "a.py:1 in f", MemoryCertificate("N*L", "T", {"T": "tokens"}))


@pytest.fixture
def graph() -> torch.fx.Graph:
    return make_fx(lambda x: torch.relu(x) + 1)(torch.ones(3)).graph


@pytest.fixture(autouse=True)
def fresh_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_store, "_reports", [])


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the rewrites find, and how they were called."""
    found: dict[str, Any] = {"rewrites": [], "misses": [], "calls": []}

    def run(graph: torch.fx.Graph, *, is_inference: bool) -> tuple[list[Rewrite], list[Miss]]:
        found["calls"].append(is_inference)
        return found["rewrites"], found["misses"]

    monkeypatch.setattr(graph_pass.pipeline, "run", run)
    return found


def test_is_plain_data() -> None:
    mine = PlePass(strict=True)
    assert pickle.loads(pickle.dumps(mine)) == copy.deepcopy(mine) == mine
    assert all(isinstance(value, bool) for value in dataclasses.asdict(mine).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.strict = False  # type: ignore[misc]


@pytest.mark.parametrize(
    "value", [PlePass(), [PlePass(), print], (print, PlePass())], ids=["one", "list", "tuple"]
)
def test_survives_the_configuration(value: object) -> None:
    with config.patch(post_grad_custom_pre_pass=value):
        config.save_config()
        pickle.dumps(config.get_config_copy())
        config.get_hash()
        assert config.get_config_copy()["post_grad_custom_pre_pass"] == value


def test_both_signatures(outcome: dict[str, Any], graph: torch.fx.Graph) -> None:
    PlePass()(graph)
    PlePass()(graph, is_inference=False)
    assert outcome["calls"] == [True, False]


def test_off_does_nothing(
    monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Any], graph: torch.fx.Graph
) -> None:
    on = PlePass().uuid()
    monkeypatch.setenv("PLE_INDUCTOR", "0")
    PlePass()(graph)
    assert outcome["calls"] == []
    assert PlePass().uuid() != on


def test_without_a_candidate_nothing_is_kept(graph: torch.fx.Graph) -> None:
    PlePass(strict=True)(graph)
    assert report_store.reports() == []


def test_strict_raises_with_the_report(outcome: dict[str, Any], graph: torch.fx.Graph) -> None:
    outcome["rewrites"] = [REWRITE]
    PlePass(strict=True)(graph)
    outcome["misses"] = [MISS]
    PlePass()(graph)
    with pytest.raises(StrictError, match="conv_padded") as error:
        PlePass(strict=True)(graph)
    assert str(report_store.reports()[-1]) in str(error.value)
    assert [len(report.misses) for report in report_store.reports()] == [0, 1, 1]


def test_a_pass_that_raises_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graph: torch.fx.Graph
) -> None:
    def broken(graph: torch.fx.Graph, **kwargs: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(report_store, "_warned", set())
    monkeypatch.setattr(graph_pass.pipeline, "run", broken)
    before = str(graph)
    PlePass()(graph)
    PlePass()(graph)
    assert str(graph) == before
    assert [report.misses[0].code for report in report_store.reports()] == ["pass_raised"] * 2
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("ple_inductor")]
    assert warnings == [
        "ple_inductor left as it was at the whole graph; pass_raised: expected no exception, "
        "found KeyError: 'gone'"
    ]


@torch.library.custom_op("ple_inductor_tests::fake_ple_short_conv", mutates_args=())
def hides(x: torch.Tensor) -> torch.Tensor:
    """Named as an engine's operator that holds the padded code."""
    return x.clone()


@hides.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_that_hides_the_code_is_named() -> None:
    graph = make_fx(lambda x: hides(x) + hides(x))(torch.ones(3)).graph
    report = examine(graph, is_inference=True)
    assert [each.name for each in report.opaque] == ["ple_inductor_tests::fake_ple_short_conv"] * 2
    with pytest.raises(StrictError, match="fake_ple_short_conv"):
        PlePass(strict=True)(graph)


def test_own_operators_hide_nothing() -> None:
    import ple_inductor.lowerings.varlen_short_conv  # noqa: F401

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(
        torch.ops.ple_inductor.varlen_short_conv.default, (x, x, x, None, None, None, None, 1, "none")
    )
    graph.output(x)
    assert not examine(graph, is_inference=True).has_candidates


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (None, PlePass()),
        ([], PlePass()),
        (PlePass(), PlePass()),
        (print, (print, PlePass())),
        ([print, repr], (print, repr, PlePass())),
        ((PlePass(), print), (print, PlePass())),
    ],
)
def test_the_hook_holds_it_once_and_last(current: Any, expected: Any) -> None:
    assert with_ours(current, strict=False) == expected
    assert with_ours(with_ours(current, strict=False), strict=None) == expected
    assert without_ours(expected) == tuple(each for each in without_ours(current))


def test_strict_is_kept_where_it_is_not_given() -> None:
    assert with_ours([PlePass(strict=True)], strict=None) == PlePass(strict=True)
    assert with_ours([PlePass(strict=True)], strict=False) == PlePass(strict=False)


class TestUuid:
    """On copies of the three packages' folders, which do not lie in one another."""

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
        packages: dict[str, ModuleType] = {
            "root": ple_inductor,
            "passes": ple_inductor.passes,
            "lowerings": ple_inductor.lowerings,
        }
        folders = {}
        for name, package in packages.items():
            folders[name] = tmp_path / name
            folders[name].mkdir()
            (folders[name] / "module.py").write_text("one")
            monkeypatch.setattr(package, "__path__", [str(folders[name])])
        for name in ("passes", "lowerings"):  # as in a checkout
            (folders["root"] / name).symlink_to(folders[name])
        graph_pass._sources_digest.cache_clear()
        yield folders
        graph_pass._sources_digest.cache_clear()

    @staticmethod
    def uuid() -> str | None:
        graph_pass._sources_digest.cache_clear()  # a process reads its sources once
        return PlePass().uuid()

    def test_repeats(self) -> None:
        assert self.uuid() == self.uuid() is not None
        assert PlePass(strict=True).uuid() != PlePass().uuid()

    @pytest.mark.parametrize("name", ["root", "passes", "lowerings"])
    def test_follows_every_package(self, folders: dict[str, Path], name: str) -> None:
        seen = {self.uuid()}
        (folders[name] / "module.py").write_text("two")
        seen.add(self.uuid())
        (folders[name] / "other.py").touch()
        seen.add(self.uuid())
        (folders[name] / "deeper").mkdir()
        (folders[name] / "deeper" / "data.json").write_text("1")
        seen.add(self.uuid())
        (folders[name] / "other.py").rename(folders[name] / "renamed.py")
        seen.add(self.uuid())
        assert len(seen) == 5

    def test_ignores_compiled_files(self, folders: dict[str, Path]) -> None:
        before = self.uuid()
        (folders["passes"] / "__pycache__").mkdir()
        (folders["passes"] / "__pycache__" / "module.pyc").write_text("x")
        assert self.uuid() == before

    def test_follows_torch_and_triton(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = {self.uuid()}
        for release in ("3.7.1", "3.8.0"):
            (tmp_path / "triton.py").write_text(f"__version__ = {release!r}")
            monkeypatch.setattr(graph_pass, "_triton_version_file", lambda: iter([tmp_path / "triton.py"]))
            seen.add(self.uuid())
        monkeypatch.setattr(torch, "__version__", "2.99")
        seen.add(self.uuid())
        assert len(seen) == 4

    def test_unreadable_sources_turn_caches_off(
        self, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Rather a compile each time than an artifact of other sources."""
        (folders["passes"] / "module.py").unlink()
        assert self.uuid() is None
        assert "no files in ple_inductor.passes" in caplog.text
