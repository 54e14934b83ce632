"""What this machine is and how much memory it can still give, read from the kernel's own files.

Linux only in what it reads; elsewhere each function says that it does not know. A container's memory
limit counts where it is lower than what the machine has free. No dependency, no torch.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, str | int]:
    """Names and versions that a measurement needs beside it."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def free_bytes() -> int | None:
    """Bytes that a new process can take without pushing another out; None where unknown."""
    known = [amount for amount in (_available(), *_left_in_groups()) if amount is not None]
    return min(known, default=None)


def _cpu_model() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _available() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups() -> list[int | None]:
    """What each control group that holds this process still allows, of either cgroup version."""
    left = []
    for line in _lines(Path("/proc/self/cgroup")):
        controllers, group = line.split(":", 2)[1:]
        if controllers == "":
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = (
                Path("/sys/fs/cgroup/memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = root / group.strip().lstrip("/")
        # A limit may stand on any parent; in a container the path may be the host's, and only root is there.
        for place in [folder, *folder.parents]:
            if place.is_relative_to(root):
                left.append(_left_in(place, limit, usage))
    return left


def _left_in(folder: Path, limit: str, usage: str) -> int | None:
    allowed, used = ("".join(_lines(folder / name)).strip() for name in (limit, usage))
    if not (allowed.isdigit() and used.isdigit()):
        return None
    # Page cache counts as used but is given back on demand.
    cached = sum(
        int(line.split()[1])
        for line in _lines(folder / "memory.stat")
        if line.split()[0] in ("inactive_file", "total_inactive_file")
    )
    return max(0, int(allowed) - int(used) + cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
