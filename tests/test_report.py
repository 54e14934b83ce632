"""What a report says, and how it survives caches, cleared counters and bad data."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.utils import counters

from ple_inductor import report_store
from ple_inductor.passes.outcome import MemoryCertificate, Miss, Rewrite
from ple_inductor.report import OpaqueOperator, Report

REWRITE = Rewrite(
    name="padded_short_conv",
    node="convolution",
    source="model.py:41 in forward: y = F.conv1d(history, weight, groups=channels, dilation=dilation)",
    memory=MemoryCertificate(
        before="N*C*(3*L + (K - 1)*d)*b + T*C*b",
        after="T*C*b",
        symbols={
            "N": "requests",
            "L": "longest",
            "T": "tokens",
            "C": "channels",
            "K": "taps",
            "d": "dilation",
        }
        | {"b": "bytes an element"},
        known={"C": 10240, "b": 2},
    ),
)
MISS = Miss(
    name="padded_short_conv",
    code="conv_has_bias",
    obligation="the convolution adds no bias",
    node="convolution_1",
    source="",
    expected="no bias",
    found="bf16[10240]",
)
OPAQUE = OpaqueOperator("vllm::qwen4_exp_ple_short_conv", "model.py:7 in forward: call(x)")
REPORT = Report((REWRITE,), (MISS,), (OPAQUE,), function="forward (model.py:30)")


@pytest.fixture(autouse=True)
def fresh_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("_reports", []), ("_seen", {}), ("_warned", set())):
        monkeypatch.setattr(report_store, name, value)
    counters.clear()
    yield
    counters.clear()


def test_text() -> None:
    assert_expected_inline(
        str(REPORT),
        """\
forward (model.py:30): 1 rewritten, 1 not rewritten in this graph, 1 hidden in operators

rewritten       padded_short_conv
  at            model.py:41 in forward: y = F.conv1d(history, weight, groups=channels,
                dilation=dilation)
  bytes before  N*C*(3*L + (K - 1)*d)*b + T*C*b
  bytes after   T*C*b
  where         N requests, L longest, T tokens, C channels = 10240, K taps, d dilation, b bytes an
                element = 2

not rewritten   padded_short_conv
  at            convolution_1
  reason        conv_has_bias: not proven that the convolution adds no bias
  expected      no bias
  found         bf16[10240]

hidden          vllm::qwen4_exp_ple_short_conv, an operator into which a pass cannot look
  at            model.py:7 in forward: call(x)""",
    )
    assert max(map(len, str(REPORT).splitlines())) <= 100


def test_text_stays_narrow() -> None:
    long = replace(MISS, source=f"{'deep/' * 60}model.py:1 in f: x", found="x" * 250, expected="two\nlines")
    lines = str(Report(misses=(long,))).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("x" in line for line in lines) >= 3


@pytest.mark.parametrize(
    ("report", "first_line"),
    [
        (Report(), "ple_inductor: 0 rewritten, no candidate convolution in this graph"),
        (Report(graphs=3), "ple_inductor: 0 rewritten, no candidate convolution in these 3 graphs"),
        (
            Report(opaque=(OPAQUE,)),
            "ple_inductor: 0 rewritten, no candidate convolution in this graph, 1 hidden in operators",
        ),
        (Report(graphs=0, function="f (a.py:1)"), "f (a.py:1): nothing was looked at"),
        (
            Report((REWRITE,), from_cache=True),
            "ple_inductor: 1 rewritten, 0 not rewritten in this graph, from a compile cache",
        ),
    ],
    ids=["nothing", "nothing in three", "hidden", "no graph", "cached"],
)
def test_no_match_never_looks_like_success(report: Report, first_line: str) -> None:
    assert str(report).splitlines()[0] == first_line


def test_dict_survives_json() -> None:
    assert Report.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT
    assert set(REPORT.to_dict()) >= {"rewrites", "misses", "opaque", "from_cache", "graphs"}
    assert REPORT.to_dict()["rewrites"][0]["memory"]["known"] == {"C": 10240, "b": 2}


def test_a_published_report_is_there_once() -> None:
    report_store.publish(REPORT)
    assert report_store.reports() == [REPORT]
    assert report_store.reports() == [REPORT]
    assert counters["ple_inductor"] == {"padded_short_conv": 1, "padded_short_conv.refused": 1}


def test_equal_graphs_give_a_report_each() -> None:
    report_store.publish(REPORT)
    report_store.publish(REPORT)
    assert report_store.reports() == [REPORT, REPORT]


def replay(report: Report) -> None:
    """What torch does with the counters of a graph that it takes out of a cache."""
    counters["inductor"][f"ple_inductor.report {json.dumps(report.to_dict())}"] += 1


def test_a_replayed_counter_is_a_report_from_a_cache() -> None:
    replay(REPORT)
    assert report_store.reports() == [replace(REPORT, from_cache=True)]
    replay(REPORT)
    report_store.publish(REPORT)
    assert [each.from_cache for each in report_store.reports()] == [True, True, False]


def test_cleared_counters_lose_and_repeat_nothing() -> None:
    report_store.publish(REPORT)
    report_store.publish(replace(REPORT, misses=()))
    counters.clear()
    torch._dynamo.reset()
    assert len(report_store.reports()) == 2
    replay(REPORT)
    assert [each.from_cache for each in report_store.reports()] == [False, False, True]


def test_bad_data_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    counters["inductor"]["ple_inductor.report {]"] += 1
    assert report_store.reports() == []
    assert ["a report cannot be read" in record.getMessage() for record in caplog.records] == [True]
    report_store.publish(REPORT)
    assert report_store.reports() == [REPORT]


def test_what_json_does_not_know_is_text() -> None:
    """A size may have stayed symbolic."""
    report_store.publish(Report(misses=(replace(MISS, found=torch.float64),)))  # type: ignore[arg-type]
    assert report_store.reports()[0].misses[0].found == "torch.float64"


def test_log_levels(caplog: pytest.LogCaptureFixture) -> None:
    raised = replace(MISS, code="pass_raised", found="ValueError: x")
    with caplog.at_level(logging.INFO, "ple_inductor"):
        report_store.publish(Report((REWRITE,), (MISS, raised)))
        report_store.publish(Report(misses=(raised,)))
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in found] == ["INFO", "INFO", "WARNING", "INFO"]
    assert "model.py:41" in found[0][1]
    assert REWRITE.memory.before in found[0][1]
    assert "conv_has_bias" in found[1][1]
    assert "ValueError: x" in found[2][1]
