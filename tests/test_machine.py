"""Free memory from the kernel's files: the machine's own, and a container's lower limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ple_inductor import machine

GIB = 2**30
MEMINFO = {"/proc/meminfo": f"MemTotal: {32 * 2**20} kB\nMemAvailable: {20 * 2**20} kB"}


def free(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> int | None:
    monkeypatch.setattr(machine, "_lines", lambda path: files.get(str(path), "").splitlines())
    return machine.free_bytes()


def test_without_a_group_the_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free(monkeypatch, MEMINFO) == 20 * GIB


def test_unknown_where_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free(monkeypatch, {}) is None


def test_the_limit_of_a_parent_group_counts_without_its_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "/sys/fs/cgroup/pod"
    files = MEMINFO | {
        "/proc/self/cgroup": "0::/pod/container",
        f"{group}/container/memory.max": "max",
        f"{group}/container/memory.current": str(3 * GIB),
        f"{group}/memory.max": str(8 * GIB),
        f"{group}/memory.current": str(4 * GIB),
        f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}",
    }
    assert free(monkeypatch, files) == 5 * GIB


def test_a_version_1_group_where_only_its_root_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    files = MEMINFO | {
        "/proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    assert free(monkeypatch, files) == GIB


def test_this_machine_has_some_memory_and_a_name() -> None:
    known = machine.free_bytes()
    assert known is None or known > 2**20
    assert Path("/proc/cpuinfo").exists() is False or machine.describe()["cpu"]
