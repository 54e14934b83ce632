"""What the Triton kernels become on each GPU, read from the compiler's output; no GPU takes part.

Every target compiles without spilling a register. Offsets are 64 bits wide from the first multiplication on.
Conversions to bf16 round to nearest even, and the sum is rounded before the activation.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import triton_targets as targets
from triton.runtime import driver

from ple_inductor.lowerings import _short_conv_triton as kernels

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)

compile_conv = functools.cache(targets.compile_conv)
compile_update = functools.cache(targets.compile_update)

EVERY_TARGET_IN_BF16 = [(target, "bf16") for target in targets.TARGETS]
ONE_OF_EACH_VENDOR = [(target, dtype) for target in ("sm_90", "gfx942") for dtype in ("fp16", "fp32")]


def check_resources(compiled: Any, folder: Path, registers: int) -> None:
    found = targets.resources(compiled, folder)
    assert found["spilled"] == 0
    assert found["registers"] <= registers


@pytest.mark.parametrize(("target", "dtype"), EVERY_TARGET_IN_BF16 + ONE_OF_EACH_VENDOR)
def test_kernels_fit_the_registers(target: str, dtype: str, tmp_path: Path) -> None:
    check_resources(compile_conv(target, dtype), tmp_path, 128)
    check_resources(compile_update(target, dtype), tmp_path, 64)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_other_forms_fit_the_registers(target: str, dtype: str, tmp_path: Path) -> None:
    check_resources(compile_conv(target, dtype, channels_last_state=False), tmp_path, 128)
    check_resources(compile_conv(target, dtype, has_state=False), tmp_path, 96)
    check_resources(compile_update(target, dtype, channels_last_state=False), tmp_path, 64)


@pytest.mark.parametrize("states", [True, False], ids=["SD", "DS"])
@pytest.mark.parametrize("compile_kernel", [compile_conv, compile_update], ids=["conv", "update"])
def test_offsets_are_64_bits_wide(compile_kernel: Any, states: bool) -> None:
    ttir = compile_kernel("sm_90", "bf16", channels_last_state=states).asm["ttir"]
    products = re.findall(r"= arith\.muli .* : (\S+)", ttir)
    assert products
    assert all(kind.endswith(("i64", "i64>")) for kind in products)
    widths = offset_widths(ttir)
    assert widths.keys() >= {"x", "conv_state", "state_indices"}
    assert compile_kernel is compile_update or widths.keys() >= {"out", "weight"}
    assert set().union(*widths.values()) == {"i64"}, widths


def offset_widths(ttir: str) -> dict[str, set[str]]:
    """Per kernel argument, the integer types that are added to pointers made from it."""
    origin: dict[str, str] = {}
    widths: dict[str, set[str]] = {}
    line = re.compile(r"(%[\w#]+) = tt\.(splat|broadcast|expand_dims|bitcast|addptr) (%[\w#]+)(.*)")
    for value, operation, source, rest in line.findall(ttir):
        origin[value] = origin.get(source, source)
        if operation == "addptr":
            added = re.search(r", (?:tensor<[\dx]*)?(i\d+)>? loc", rest)
            assert added, rest
            widths.setdefault(origin[value].lstrip("%"), set()).add(added[1])
    return widths


def test_sum_is_rounded_before_the_activation() -> None:
    ttir = compile_conv("sm_90", "bf16").asm["ttir"]
    exponential, rounded = ttir.index("math.exp"), ttir.index("arith.truncf", ttir.index("scf.if"))
    assert rounded < exponential
    assert "bf16" in ttir[rounded : ttir.index("\n", rounded)]
    assert "arith.extf" in ttir[rounded:exponential]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_121"])
def test_bf16_rounds_to_nearest_even(target: str) -> None:
    for compiled in (compile_conv(target, "bf16"), compile_update(target, "bf16", "fp32")):
        conversions = re.findall(r"cvt\.(\S*\bbf16\S*)\.f32\b", compiled.asm["ptx"])
        assert conversions
        assert all(conversion.startswith("rn.") for conversion in conversions)


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950"])
def test_bf16_rounds_to_nearest_even_on_rocm(target: str) -> None:
    """gfx950 has an instruction that rounds so; the others add 0x7fff and the lowest bit that stays."""
    code = compile_conv(target, "bf16").asm["amdgcn"]
    assert ("v_cvt_pk_bf16_f32" if target == "gfx950" else "0x7fff") in code


def test_state_is_rounded_through_the_dtype_of_x() -> None:
    """A wider state costs the convolution conversions that a state of x's dtype does not."""
    narrow, wide = (
        len(re.findall(r"cvt\.rn\.\S*bf16", compile_conv("sm_90", "bf16", state).asm["ptx"]))
        for state in ("bf16", "fp32")
    )
    assert wide > narrow


@pytest.mark.parametrize("states", [True, False], ids=["SD", "DS"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_write_back_takes_its_steps_in_order(target: str, states: bool) -> None:
    """The kernel is free of races only as one loop around one store, with loads that are not moved ahead."""
    ttgir = compile_update(target, "bf16", channels_last_state=states).asm["ttgir"]
    before, _, inside = ttgir.partition("scf.for")
    assert "scf.for" not in inside
    assert "tt.store" not in before
    assert inside.count("tt.store") == 1
    assert inside.count("tt.load") == 2
    assert "async" not in ttgir


def test_memory_is_accessed_in_whole_vectors() -> None:
    ptx = compile_conv("sm_90", "bf16").asm["ptx"]
    assert re.search(r"st\.global\.v4\.b32", ptx)
    assert re.search(r"ld\.global\.v4\.b32", ptx)
    assert not re.search(r"(ld|st)\.global\.b16", ptx)


@pytest.mark.parametrize(("x", "state"), [("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "bf16")])
def test_state_may_have_another_dtype(x: str, state: str) -> None:
    assert compile_conv("sm_90", x, state)
    assert compile_update("sm_90", x, state)


class Absent:
    """A driver for a GPU that is not here: enough of one to compile what a launch asks for."""

    def get_current_target(self) -> Any:
        return targets.TARGETS["sm_90"]

    def get_current_device(self) -> int:
        return 99

    def get_current_stream(self, device: int) -> int:
        return 0


class Unlaunched:
    """A kernel that goes through every step of a launch except the last."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.compiled.add(self.kernel.run(*args, grid=grid, warmup=True, **options).hash)

        return launch


def test_steps_of_all_sizes_share_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", Absent())
    conv, update = (
        Unlaunched(kernel) for kernel in (kernels.varlen_short_conv_kernel, kernels.update_conv_state_kernel)
    )
    monkeypatch.setattr(kernels, "varlen_short_conv_kernel", conv)
    monkeypatch.setattr(kernels, "update_conv_state_kernel", update)
    for lens in ([5, 17, 3, 2, 6], [6, 2], [30], [1, 1], [3] * 20, [100, 1], [2] * 16, [1], [16], [256]):
        step = oracle.dyadic(lens, list(range(1, len(lens) + 1)), pool_slots=len(lens) + 1, layout="SD")
        block_table = torch.zeros(len(lens), 3, dtype=torch.int32)
        for column in range(3):
            shifted = step._replace(state_indices=block_table[:, column])
            kernels.conv(*shifted.conv_args)
            kernels.update(*shifted.update_args)
    assert len(conv.compiled) == len(update.compiled) == 1


def test_import_resolves_no_driver() -> None:
    code = (
        "from ple_inductor.lowerings import _short_conv_triton\n"
        "from triton.runtime import driver\n"
        "assert (driver._default, driver._active) == (None, None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
