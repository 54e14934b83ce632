"""Whatever raises inside a pass: the graph comes back, the compile goes on, the report says what happened."""

from __future__ import annotations

import pytest
import torch
from padded_variants import inputs, short_conv
from recorded import eager, record

from ple_inductor.passes import padded_short_conv
from ple_inductor.passes.graph_edit import GraphEdit

FAULT = ZeroDivisionError("injected")


def raising(*args, **kwargs):
    raise FAULT


def raise_after(call):
    """``call``, then the fault: whatever the call edited has to be taken back."""

    def raising_late(*args, **kwargs):
        call(*args, **kwargs)
        raise FAULT

    return raising_late


@pytest.mark.parametrize(
    ("owner", "name", "late"),
    [
        (padded_short_conv, "prove_history", False),
        (padded_short_conv, "prove_uses", True),
        (padded_short_conv, "_emit_shared", True),
        (padded_short_conv, "_emit_write_back", True),
        (padded_short_conv, "_report", False),
        (GraphEdit, "replace", True),
        (GraphEdit, "commit", False),
        (torch.fx.Graph, "lint", True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fault_leaves_graph_and_result(monkeypatch, owner, name, late):
    args = inputs([5, 11, 7])
    expected, expected_args = eager(short_conv(), *args)
    original = getattr(owner, name)

    def once(*args, **kwargs):
        monkeypatch.setattr(owner, name, original)
        (raise_after(original) if late else raising)(*args, **kwargs)

    if owner is torch.fx.Graph:
        # Inductor lints graphs of its own before ours.
        commit = GraphEdit.commit

        def commit_with_fault(self):
            monkeypatch.setattr(owner, name, once)
            commit(self)

        monkeypatch.setattr(GraphEdit, "commit", commit_with_fault)
    else:
        monkeypatch.setattr(owner, name, once)
    recorded = record(short_conv(), *args)
    assert recorded.codes == ["pass_raised"]
    assert recorded.misses[0].found == "ZeroDivisionError: injected"
    assert recorded.after == recorded.before
    torch.testing.assert_close(recorded.output, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(args[4], expected_args[4], rtol=2e-2, atol=2e-2)
