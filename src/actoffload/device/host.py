"""Host memory: how much of it a process may pin, how it is pinned, and on which NUMA node it lies.

A system that runs out of memory ends a process, so a part of the memory is left to everything else.  Copies to memory
of another node cross the link between the processors, which all ranks share; Linux takes a page from the node of the
thread that touches it first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from .._text import size

# How much host memory there is

RESERVE = 0.1  # of the host memory
UNLIMITED = 2**60  # control groups write "no limit" as a number near 2**63


@dataclass(frozen=True)
class HostMemory:
    """Host memory of this process.

    Parameters
    ----------
    total, available : int
        Bytes of the machine, or of the control group of the process where that is less, as in a container.
    """

    total: int
    available: int


def room() -> int:
    """Return the bytes that this process may still pin: its part, by ``LOCAL_WORLD_SIZE``, of what `RESERVE` leaves."""
    memory, processes = host_memory(), os.environ.get("LOCAL_WORLD_SIZE", "")
    left = max(memory.available - int(RESERVE * memory.total), 0)
    return left // max(int(processes) if processes.isdigit() else 1, 1)


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
    for group, limit, used, prefix in _control_groups(root):
        most = _read(group / limit).strip()
        if most.isdigit() and int(most) < UNLIMITED:
            lines = map(str.split, _read(group / "memory.stat").splitlines())
            entries = {line[0]: line[1] for line in lines if len(line) == 2}
            # Cached files, which the system drops when it has to.
            cached = sum(int(entries.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            taken = max(int(_read(group / used).strip() or 0) - cached, 0)
            total, available = min(total, int(most)), min(available, int(most) - taken)
    return HostMemory(total, available)


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the control groups of this process and their parents, with the names of the limit, the use and statistics.

    A container sees its own group at the root; elsewhere the path in ``/proc/self/cgroup`` leads to it.
    """
    mounted = root / "sys/fs/cgroup"
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path.strip("/")
    for controller, folder, limit, used, prefix in (
        ("", mounted, "memory.max", "memory.current", ""),
        ("memory", mounted / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        own = PurePosixPath(paths.get(controller, ""))
        for place in (own, *own.parents):
            yield folder / place, limit, used, prefix


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _kibibytes(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0


# Pinned memory

PIECE = 1 << 26  # bytes that are worth a thread


class PinnedPages(NamedTuple):
    """Pages that a driver has locked, mapped until it has unlocked them: it refuses an address that it still knows."""

    used: weakref.ref[memoryview]  # by a tensor, as long as it lives
    pages: mmap.mmap
    unregister: Callable[[int], object]


_pinned: dict[int, PinnedPages] = {}  # by address
_inherited: list[PinnedPages] = []


def _inherit() -> None:
    """Leave the pages of the process from which this one was forked alone: something else may be at their addresses."""
    _inherited.extend(_pinned.values())
    _pinned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)  # [guard: pages after a fork]


def pin(
    nbytes: int,
    register: Callable[[int, int, int], object],
    unregister: Callable[[int], object],
    cpus: Set[int] = frozenset(),
) -> torch.Tensor | None:
    """Return pinned memory of Linux as a tensor of `nbytes` bytes; None if the system or the driver refuses.

    A driver that allocates and locks 1 GiB takes 0.40 s (H100), nearly all of it to have small pages zeroed by one
    core.  Huge pages that threads on the processors `cpus` touch first, and the driver only locks, take 0.06 s.
    Forked processes do not get them: of a page that two processes share, the device would use the other copy.
    """
    unpin()
    try:
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(advice)
    view = memoryview(pages)
    memory = torch.frombuffer(view, dtype=torch.uint8)
    address = memory.data_ptr()
    pieces = range(0, nbytes, PIECE)
    count = min(len(pieces), len(cpus or os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count, initializer=_run_on, initargs=(cpus,)) as threads:
        list(threads.map(lambda start: ctypes.memset(address + start, 0, min(PIECE, nbytes - start)), pieces))
    if int(register(address, nbytes, 0)):  # type: ignore[call-overload]
        return None
    _pinned[address] = PinnedPages(weakref.ref(view), pages, unregister)  # [guard: pages that are unlocked]
    return memory


def unpin() -> None:
    """Unlock and unmap pages whose tensors are gone."""
    for address, pinned in list(_pinned.items()):
        # None if another thread was faster.
        if pinned.used() is None and _pinned.pop(address, None) is not None:
            pinned.unregister(address)


# The NUMA node of the device

SYSFS = Path("/sys")


def cpus_near(domain: int, bus: int, device: int, sysfs: Path = SYSFS) -> set[int]:
    """Return the processors on the NUMA node of a PCI device; none if the host has one node only or does not say."""
    try:
        online = (sysfs / "devices/system/node/online").read_text()
        path = sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0"
        if int((path / "numa_node").read_text()) < 0 or len(_numbers(online)) < 2:
            return set()
        return _numbers((path / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


@lru_cache(maxsize=64)
def cpus_near_device(index: int) -> set[int]:
    """Return the processors on the NUMA node of a CUDA device; none if the host has one node only or does not say."""
    found = torch.cuda.get_device_properties(index)
    address = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return set() if None in address else cpus_near(*map(int, address))  # type: ignore[arg-type]


def _run_on(cpus: Set[int]) -> None:
    """Let the calling thread run on some processors, if the system allows it."""
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
