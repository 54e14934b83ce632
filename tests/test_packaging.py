"""The package as users get it: from a wheel, from an sdist and from an editable install.

Each install goes into a virtual environment of its own that sees this one's torch but not this one's
ple_inductor, and is asked from a folder that holds no source. Everything is built from a copy of the
checkout without ignored files, so that a stale build folder cannot lend a module that was deleted.

``PROBE`` may grow: it runs in the fresh environment and prints one JSON object. The layout under test is
the pair of mechanisms of pyproject.toml's ``package-dir`` and the two links in ``ple_inductor/``.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
LINKED = ("passes", "lowerings")
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".cache"
)

PROBE = """
import importlib.metadata, importlib.resources, importlib.util, json, pkgutil
import ple_inductor, ple_inductor.lowerings, ple_inductor.passes, torch._dynamo

print(json.dumps({
    "file": ple_inductor.__file__,
    "modules": sorted(m.name for m in pkgutil.walk_packages(ple_inductor.__path__, "ple_inductor.")),
    "top_level": importlib.metadata.distribution("ple-inductor").read_text("top_level.txt").split(),
    "generic": [name for name in ("passes", "lowerings") if importlib.util.find_spec(name)],
    "typed": importlib.resources.files("ple_inductor").joinpath("py.typed").is_file(),
    "listed": "ple_inductor" in torch._dynamo.list_backends(),
    "backend": torch._dynamo.lookup_backend("ple_inductor").__module__,
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def modules_of(checkout: Path) -> set[str]:
    """Paths inside a wheel of every source file, read from the real folders and not through the links."""
    inside = {"ple_inductor": "ple_inductor", **{name: f"ple_inductor/{name}" for name in LINKED}}
    return {
        f"{target}/{path.relative_to(checkout / folder).as_posix()}"
        for folder, target in inside.items()
        for path in (checkout / folder).rglob("*.py")
        if not (folder == "ple_inductor" and path.relative_to(checkout / folder).parts[0] in LINKED)
    }


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def build_wheel(tree: Path, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, tree, cwd=tree)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree") / "checkout"
    shutil.copytree(REPO, copy, symlinks=True, ignore=IGNORED)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, tree, cwd=tree)
    return next(out.glob("*.tar.gz"))


def install(folder: Path, *what: str | Path) -> Path:
    """A fresh environment with ``what`` installed in it; returns its folder of commands."""
    venv.create(folder, with_pip=False, symlinks=True)
    commands = folder / "bin"
    library = Path(
        run(commands / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    )
    # A folder added by a .pth file has its own .pth files left alone: this checkout's editable install,
    # if there is one, stays out of sight.
    (library / "torch_of_the_tests.pth").write_text("\n".join(site.getsitepackages()))
    pip = (sys.executable, "-m", "pip", "--python", commands / "python", "install", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "--ignore-installed", *what, cwd=folder)
    return commands


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_installed(kind: str, tree: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    what = ("-e", tree) if kind == "editable" else (request.getfixturevalue(kind),)
    commands = install(tmp_path / "env", *what)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    found = json.loads(run(commands / "python", "-c", PROBE, cwd=elsewhere))
    home = tree if kind == "editable" else tmp_path / "env"
    assert Path(found["file"]).is_relative_to(home)
    assert found["top_level"] == ["ple_inductor"]
    assert found["generic"] == []
    assert found["typed"]
    assert found["listed"]
    assert found["backend"] == "ple_inductor.backend"
    expected = {name.removesuffix(".py").replace("/", ".") for name in modules_of(tree)}
    assert set(found["modules"]) == {name.removesuffix(".__init__") for name in expected} - {"ple_inductor"}

    version = PROJECT["project"]["version"]
    assert version in run(commands / "ple-inductor", "--version", cwd=elsewhere)
    # From the checkout the source there comes first, whatever is installed, and must be whole as well.
    at_home = "import ple_inductor.passes, ple_inductor.lowerings as used; print(used.__file__)"
    assert str(tree) in run(commands / "python", "-c", at_home, cwd=tree)


def test_wheel_holds_every_module(tree: Path, wheel: Path) -> None:
    assert contents(wheel) == modules_of(tree) | {"ple_inductor/py.typed"}


def test_wheel_from_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert contents(build_wheel(source, tmp_path / "out")) == contents(wheel)


def test_wheel_without_links_is_the_same(tree: Path, wheel: Path, tmp_path: Path) -> None:
    """A clone with ``core.symlinks=false`` has a one-line text file in the place of each link."""
    plain = tmp_path / "plain"
    shutil.copytree(tree, plain, symlinks=True, ignore=IGNORED)
    for name in LINKED:
        link = plain / "ple_inductor" / name
        link.unlink()
        link.write_text(f"../{name}")
    assert contents(build_wheel(plain, tmp_path / "out")) == contents(wheel)


def test_every_folder_is_listed() -> None:
    """setuptools leaves a folder that is not listed out of the wheel, in silence."""
    mapping = {
        f"ple_inductor{'' if folder == 'ple_inductor' else '.' + folder}": folder
        for folder in ("ple_inductor", *LINKED)
    }
    assert PROJECT["tool"]["setuptools"]["package-dir"] == mapping
    folders = {
        ".".join((package, *path.parent.relative_to(REPO / folder).parts))
        for package, folder in mapping.items()
        for path in (REPO / folder).rglob("*.py")
        if not (folder == "ple_inductor" and path.relative_to(REPO / folder).parts[0] in LINKED)
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


@pytest.mark.parametrize("name", LINKED)
def test_generic_name_is_refused(name: str) -> None:
    """Python finds the folder when started in the checkout; a second copy of each class would follow."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: import ple_inductor.{name}, not '{name}'"


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_committed(name: str) -> None:
    link = REPO / "ple_inductor" / name
    repair = "git config core.symlinks true && git checkout -- ple_inductor"
    assert link.is_symlink(), f"{link} is not a link: type checkers will not look into {name}/; run: {repair}"
    assert os.readlink(link) == f"../{name}"
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout")
    entry = run("git", "ls-files", "--stage", "--", link.relative_to(REPO), cwd=REPO)
    assert entry.startswith("120000 "), f"{link} is not committed as a link: {entry!r}"
