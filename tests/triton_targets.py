"""Compile the Triton kernels for a GPU that is not here, and read what came out.

The signatures are those a launch with aligned tensors and a channel-contiguous x would produce: pointers and
strides divisible by 16, unit strides folded into constants.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ple_inductor.lowerings import _short_conv_triton as kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_121": GPUTarget("cuda", 121, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
_INDEX_POINTERS = {"query_start_loc": "i32", "state_indices": "i32"}
_FLAG_POINTERS = ("has_initial_state", "valid", "update")
_ALIGNED = ("C", "stride_x_t", "stride_s_slot", "stride_s_col", "stride_s_c")


def compile_conv(
    target: str,
    dtype: str,
    state_dtype: str | None = None,
    *,
    has_state: bool = True,
    channels_last_state: bool = True,
    silu: bool = True,
    taps: int = 4,
    dilation: int = 3,
) -> Any:
    """The convolution kernel for ``target``, with every optional argument or with none."""
    constants = {
        "K": taps,
        "D": dilation,
        "HAS_STATE": has_state,
        "HAS_INITIAL": has_state,
        "HAS_VALID": has_state,
        "SILU": silu,
        "BLOCK_T": kernels.TOKENS_PER_TILE,
        "BLOCK_C": kernels.CHANNELS_PER_TILE,
        "BLOCK_K": triton.next_power_of_2(taps),
        "stride_x_c": 1,
        "stride_w_c": taps,
        "stride_w_k": 1,
        "stride_s_c" if channels_last_state else "stride_s_col": 1,
    }
    if not has_state:
        constants |= dict.fromkeys(("conv_state", "state_indices", "has_initial_state", "valid"))
    return _compile(kernels.varlen_short_conv_kernel, target, dtype, state_dtype or dtype, constants)


def compile_update(
    target: str, dtype: str, state_dtype: str | None = None, *, channels_last_state: bool = True
) -> Any:
    """The write-back kernel for ``target``, with every optional argument."""
    constants = {
        "HAS_INITIAL": True,
        "HAS_UPDATE": True,
        "BLOCK_C": kernels.CHANNELS_PER_UPDATE,
        "stride_x_c": 1,
        "stride_s_c" if channels_last_state else "stride_s_col": 1,
    }
    return _compile(kernels.update_conv_state_kernel, target, dtype, state_dtype or dtype, constants)


def _compile(kernel: Any, target: str, dtype: str, state_dtype: str, constants: dict[str, Any]) -> Any:
    pointers = {"out": dtype, "x": dtype, "weight": dtype, "conv_state": state_dtype}
    pointers |= _INDEX_POINTERS | dict.fromkeys(_FLAG_POINTERS, "i1")
    signature = {
        name: "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i32"
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name in _ALIGNED and kind == "i32")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": kernels.WARPS, "num_stages": 1}
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """``registers`` per thread, and bytes or registers ``spilled`` to memory (0 when nothing is)."""
    if "amdgcn" in compiled.asm:
        found = {
            name: int(value)
            for name, value in re.findall(
                r"\.(vgpr_count|\w+_spill_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]
            )
        }
        return {"registers": found.pop("vgpr_count"), "spilled": sum(found.values())}
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    text = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}
