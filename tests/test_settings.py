"""The environment variable and the backend's options."""

from __future__ import annotations

from typing import Any

import pytest
import torch._inductor.compile_fx

from ple_inductor import settings
from ple_inductor.backend import ple_inductor as backend
from ple_inductor.settings import is_off, read_options


@pytest.mark.parametrize("value", ["0", "false", "off", "OFF", " 0 "])
def test_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PLE_INDUCTOR", value)
    assert is_off()


@pytest.mark.parametrize("value", [None, "", "1", "true", "On"])
def test_on_and_unset(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("PLE_INDUCTOR", raising=False)
    else:
        monkeypatch.setenv("PLE_INDUCTOR", value)
    assert not is_off()
    assert caplog.records == []


def test_other_values_warn_once_and_count_as_unset(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("PLE_INDUCTOR", "maybe")
    assert not is_off()
    assert not is_off()
    assert [record.getMessage() for record in caplog.records] == [
        "PLE_INDUCTOR=maybe is ignored; expected one of 1, true, on, 0, false, off"
    ]


def test_options_are_sorted() -> None:
    options = {"ple_inductor.strict": True, "max_autotune": False, "epilogue-fusion": True}
    read = read_options(options)
    assert read.strict is True
    assert read.inductor == {"max_autotune": False, "epilogue-fusion": True}
    assert len(options) == 3  # the caller's dict is not taken apart
    assert read_options({"ple-inductor.strict": False}) == settings.Options(False, {})
    assert read_options(None) == settings.Options(None, {})


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("max_autotun", "did you mean 'max_autotune'?"),
        ("max-autotun", "did you mean 'max_autotune'?"),
        ("strict", "did you mean 'ple_inductor.strict'?"),
        ("ple_inductor.strikt", "did you mean 'ple_inductor.strict'?"),
        ("cudagraphs", "did you mean 'triton.cudagraphs'?"),
        ("qqqqqqqqqqqq", "torch._inductor.list_options() lists Inductor's"),
    ],
)
def test_unknown_option_suggests_the_nearest(key: str, advice: str) -> None:
    with pytest.raises(ValueError, match="unknown option") as error:
        read_options({key: True})
    assert str(error.value) == f"unknown option {key!r} for backend 'ple_inductor'; {advice}"


def test_strict_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match=r"ple_inductor.strict is 'yes'; expected True or False"):
        read_options({"ple_inductor.strict": "yes"})


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that Inductor is called with, in place of compiling."""
    seen: list[Any] = []

    def record(gm: Any, example_inputs: Any, config_patches: Any = None, **kwargs: Any) -> Any:
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", record)
    return seen


def test_off_is_stock_inductor_to_the_letter(monkeypatch: pytest.MonkeyPatch, patches: list[Any]) -> None:
    options = {"ple_inductor.strict": True, "max_autotune": True}
    monkeypatch.setenv("PLE_INDUCTOR", "0")
    backend(torch.nn.Identity(), [], options=options)
    torch._TorchCompileInductorWrapper(None, {"max_autotune": True}, None)(torch.nn.Identity(), [])
    assert patches[0] == patches[1] == {"max_autotune": True}


def test_the_environment_is_read_at_each_compile(monkeypatch: pytest.MonkeyPatch, patches: list[Any]) -> None:
    for value in ("0", "1", "0"):
        monkeypatch.setenv("PLE_INDUCTOR", value)
        backend(torch.nn.Identity(), [])
    assert ["post_grad_custom_pre_pass" in each for each in patches] == [False, True, False]


def test_modes_and_options_reach_inductor(patches: list[Any]) -> None:
    backend(torch.nn.Identity(), [], mode="max-autotune")
    backend(torch.nn.Identity(), [], options={"epilogue-fusion": False})
    assert patches[0]["coordinate_descent_tuning"] is True
    assert patches[0]["triton.cudagraphs"] is True
    assert patches[1]["epilogue_fusion"] is False
