"""What importing the package costs and needs: almost nothing.

Every test runs in a fresh interpreter, because this one has long imported everything. The compiler and
Triton are looked for among the modules that an import added, not among all: torch may load what it likes.

``BROKEN_TRITON`` stands for the machines seen in reports: no Triton, and a Triton that raises while it is
imported because it finds no GPU driver, or two. The text of each is what a user of that machine sees.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
HEAVY = ("torch._inductor", "triton", "rich", "ple_inductor.lowerings", "ple_inductor.passes")
PLAIN_DATA = ("ple_inductor.passes", "ple_inductor.passes.outcome")
CONTRACTS = (
    "ple_inductor.passes.pipeline",
    "ple_inductor.lowerings.varlen_short_conv",
    "ple_inductor.lowerings.update_conv_state",
)
BROKEN_TRITON = {
    "absent": "raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')",
    "no_driver": "raise RuntimeError('0 active drivers ([]). There should only be one.')",
    "two_drivers": "raise RuntimeError('2 active drivers. There should only be one.')",
}

ADDED = """
import json, sys, time
import torch

before = set(sys.modules)
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "modules": sorted(set(sys.modules) - before)}}))
"""

COMPILE = """
import torch
from ple_inductor import reports
from ple_inductor.padded_form import padded_short_conv

torch.manual_seed(0)
lens, channels, taps, dilation = [5, 0, 9, 2], 16, 3, 2
starts = torch.tensor([0, 5, 5, 14, 16], dtype=torch.int32)
x, weight = torch.randn(16, channels), torch.randn(channels, taps)
slots, has_initial = torch.tensor([3, 1, 2, 4], dtype=torch.int32), torch.tensor([True, False, True, False])
pools = [torch.arange(5.0 * channels * 4).reshape(5, channels, 4).clone() for _ in range(2)]
compiled = torch.compile(padded_short_conv, backend="ple_inductor", dynamic=True)
forms = (padded_short_conv, compiled)
outs = [f(x, weight, starts, pool, slots, has_initial, 4, 9, dilation) for f, pool in zip(forms, pools)]
torch.testing.assert_close(outs[0], outs[1])
assert torch.equal(pools[0], pools[1])
print([rewrite.name for report in reports() for rewrite in report.rewrites])
"""


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def heavy(modules: list[str]) -> list[str]:
    """Those of ``modules`` that stand for, or lie in, something that a light import must not bring."""
    return [
        name
        for name in modules
        if name not in PLAIN_DATA and any(name == root or name.startswith(f"{root}.") for root in HEAVY)
    ]


@pytest.fixture(params=sorted(BROKEN_TRITON))
def broken_triton(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Environment variables under which ``import triton`` fails, in child processes too."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(BROKEN_TRITON[request.param])
    return {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_import_is_light() -> None:
    """Under 5 ms above torch, in the best of a few interpreters: the others shared the machine."""
    best = float("inf")
    for _ in range(7):
        found = json.loads(python(ADDED.format(module="ple_inductor")))
        assert heavy(found["modules"]) == []
        best = min(best, found["seconds"])
        if best < 0.005:
            break
    assert best < 0.005, f"import ple_inductor took {best * 1e3:.1f} ms at best"


@pytest.mark.parametrize("module", CONTRACTS)
def test_contracts_bring_no_compiler(module: str) -> None:
    added = json.loads(python(ADDED.format(module=module)))["modules"]
    assert module in added
    compilers = [
        name for name in added if name.split(".")[0] == "triton" or name.startswith("torch._inductor")
    ]
    assert compilers == []


def test_imports_and_command_need_no_triton(broken_triton: dict[str, str]) -> None:
    imports = "; ".join(f"import {module}" for module in ("ple_inductor", *CONTRACTS))
    python(imports, **broken_triton)
    command = "import sys; from ple_inductor.cli import main; sys.argv[1:] = ['--version']; sys.exit(main())"
    assert python(command, **broken_triton).strip()


@pytest.mark.parametrize("broken_triton", ["absent"], indirect=True)
def test_compiles_for_the_cpu_without_triton(broken_triton: dict[str, str]) -> None:
    """The compile workers start without Triton as well. (torch itself needs one that imports, or none.)"""
    assert python(COMPILE, **broken_triton).strip() == "['padded_short_conv']"


def test_arrows_point_one_way() -> None:
    """ple_inductor -> passes -> lowerings, and what a pass says of the code above it is nothing."""
    allowed = {
        "lowerings": ("ple_inductor.lowerings",),
        "passes": ("ple_inductor.lowerings", "ple_inductor.passes"),
    }
    wrong = []
    for folder, packages in allowed.items():
        for path in sorted((REPO / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{path.relative_to(REPO)}:{node.lineno}: import absolutely"
                    # `from ple_inductor import x` may name a package: look at what it names.
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                wrong += [
                    f"{path.relative_to(REPO)}:{node.lineno}: {name}"
                    for name in names
                    if name.split(".")[0] == "ple_inductor"
                    and not f"{name}.".startswith(tuple(p + "." for p in packages))
                ]
    assert wrong == []
