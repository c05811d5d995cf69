"""Whether a long stage can end: disk and memory it will need against what this host has, before it starts.

Estimates are upper bounds from counts that are known beforehand; they decide nothing but whether to begin. Costs microseconds.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dflash.base.errors import PermanentError
from dflash.base.progress import Progress

RESERVE = 1 << 30
"""Bytes left to others, of disk and of memory."""


def require_room(folder: Path, *, disk: int, memory: int, what: str, progress: Progress) -> None:
    """Says what `what` will need and what there is.

    Args:
        folder: where it will write (it, or a folder above it, exists). disk, memory: bytes needed at most.

    Raises:
        PermanentError: one of them does not suffice, with both numbers.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free, available = shutil.disk_usage(existing).free, available_memory()
    progress.say(
        f"{what}: at most {_size(disk)} of disk ({_size(free)} free) and {_size(memory)} of memory "
        f"({_size(available)} available)"
    )
    for needed, there, kind in ((disk, free, "disk"), (memory, available, "memory")):
        if needed + RESERVE > there:
            raise PermanentError(
                f"{what} needs up to {_size(needed)} of {kind} and {_size(RESERVE)} to spare; {_size(there)} are free",
                where=str(folder),
                remedy="Free some, or run it on a host with more.",
            )


def available_memory() -> int:
    """Bytes of memory a process may still take, by the kernel's own estimate; all of it where the kernel gives none."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
