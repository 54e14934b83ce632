"""Peak memory of a stretch of code, and a limit on what it may take, both for this process.

The peak is the kernel's own high-water mark, reset where the stretch begins; where it cannot be reset a
thread polls instead. The limit counts private writable memory (``RLIMIT_DATA``), which is what tensors
are made of: measured beside ``RLIMIT_AS`` it leaves the bookkeeping of other threads out (64 MiB of
reserved addresses each), so that what is left at a failing request is the tensors' alone. Linux only.
Set the limit after everything was compiled: a compiler started under it would inherit it.
"""

from __future__ import annotations

import ctypes
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.001


class Peak:
    """Bytes above the baseline that were reached, filled in when the stretch ends."""

    bytes: int = 0
    method: str = ""


@contextmanager
def peak_above_here() -> Iterator[Peak]:
    """Measure the peak of resident memory inside the block, above what is resident where it begins."""
    _trim_heap()
    peak = Peak()
    if _reset_high_water_mark():
        baseline = _status("VmRSS")
        try:
            yield peak
        finally:
            peak.method = "high-water mark"
            peak.bytes = max(0, _status("VmHWM") - baseline)
        return
    baseline = highest = _status("VmRSS")
    ended = threading.Event()

    def poll() -> None:
        nonlocal highest
        while not ended.wait(_POLL_SECONDS):
            highest = max(highest, _status("VmRSS"))

    poller = threading.Thread(target=poll, daemon=True)
    poller.start()
    try:
        yield peak
    finally:
        highest = max(highest, _status("VmRSS"))
        ended.set()
        poller.join()
        peak.method = "polled"
        peak.bytes = highest - baseline


class Limit:
    """A limit on private writable memory, ``budget`` bytes above what the process has when it is set."""

    def __init__(self, budget: int) -> None:
        _trim_heap()
        self._ceiling = _status("VmData") + budget
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self._ceiling, self._before[1]))

    def lift(self) -> int:
        """Take the limit away and return how many bytes of it were left.

        Lifts first and reads then: there may be too little left to open a file.
        """
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
        return max(0, self._ceiling - _status("VmData"))


def _trim_heap() -> None:
    """Give freed memory back, so that the baseline holds none that the measured code would reuse unseen."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # a C library other than glibc
        return
    trim(0)


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; replay needs Linux")
