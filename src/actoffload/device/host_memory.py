"""How much host memory a process may use, and whether there is room for more pinned memory.

Pinned memory cannot be swapped out, and a system that runs out of memory ends a process, often without a word of why.
So a part of the memory is left to everything else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..schedule.timeline import size

__all__ = ["HostMemory", "check_room", "host_memory"]

resource: Any = import_module("resource") if find_spec("resource") else None  # not on Windows

RESERVE = 0.1  # of the host memory
UNLIMITED = 2**60  # control groups write "no limit" as a number near 2**63


@dataclass(frozen=True)
class HostMemory:
    """Host memory of this process.

    Parameters
    ----------
    total, available : int
        Bytes of the machine, or of the control group of the process where that is less, as in a container.
    memlock : int or None
        Limit of the process for locked memory in bytes, which ``ulimit -l`` sets; None is no limit.
    """

    total: int
    available: int
    memlock: int | None


def check_room(nbytes: int) -> None:
    """Raise a `MemoryError` if pinning `nbytes` more leaves less than `RESERVE` of the host memory available."""
    memory = host_memory()
    reserve = int(RESERVE * memory.total)
    if memory.total and memory.available - nbytes < reserve:  # [guard: host memory for everything else]
        raise MemoryError(
            f"{size(memory.available)} of {size(memory.total)} of host memory are available, and {size(reserve)} are "
            f"left to everything else, so {size(nbytes)} more are not pinned"
        )


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the host memory that this process may use; `root` is where ``proc`` and ``sys`` are mounted."""
    names = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if line.count(":") == 1)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    total = _kibibytes(names.get("MemTotal")) or pages
    available = _kibibytes(names.get("MemAvailable")) or total
    groups = root / "sys/fs/cgroup"
    for limit, used, statistics, caches in (
        ("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            ("total_active_file", "total_inactive_file"),
        ),
    ):
        most = _read(groups / limit).strip()
        if most.isdigit() and int(most) < UNLIMITED:
            lines = map(str.split, _read(groups / statistics).splitlines())
            entries = {line[0]: line[1] for line in lines if len(line) == 2}
            cached = sum(int(entries.get(name, 0)) for name in caches)  # files, which the system drops when it has to
            taken = max(int(_read(groups / used).strip() or 0) - cached, 0)
            total, available = min(total, int(most)), min(available, int(most) - taken)
    return HostMemory(total, available, _memlock())


def _memlock() -> int | None:
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _kibibytes(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0
