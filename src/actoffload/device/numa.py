"""Page-locked memory on the NUMA node of the accelerator, on hosts with several nodes.

A copy between a GPU and memory of another node crosses the link between the processors, which all ranks of the host
share.  Linux takes the pages of an allocation from the node that the memory policy of the calling thread prefers.  The
policy is set through system calls, because the C library has no functions for it.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["node_of_device", "node_of_pci", "on_node"]

SYSFS = Path("/sys")
CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
DEFAULT, PREFERRED = 0, 1  # MPOL_DEFAULT, MPOL_PREFERRED
NODES = 1024  # bits of a node mask


def node_of_pci(domain: int, bus: int, device: int, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of a PCI device; None if the host has one node only or does not say.

    Parameters
    ----------
    domain, bus, device : int
        Address of the device.
    sysfs : Path
        Where the system describes its devices.
    """
    try:
        online = (sysfs / "devices/system/node/online").read_text().strip()
        path = sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node"
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    several = "," in online or "-" in online  # "0-1" or "0,2"
    return node if several and 0 <= node < NODES else None  # -1: not known


@lru_cache(maxsize=64)
def node_of_device(index: int) -> int | None:
    """Return the NUMA node of a CUDA device; None if the host has one node only or does not say."""
    found = torch.cuda.get_device_properties(index)
    address = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in address:
        return None
    return node_of_pci(*map(int, address))  # type: ignore[arg-type]


@contextmanager
def on_node(node: int | None) -> Iterator[bool]:
    """Prefer a NUMA node for memory that this thread allocates in a ``with`` block; yield whether that was possible.

    Nothing changes where no node is given, where the thread has a memory policy already, from ``numactl`` say, and
    where the system refuses.

    Parameters
    ----------
    node : int or None
        Number of the node.
    """
    preferred = node is not None and _policy() == DEFAULT and _set_policy(PREFERRED, node)
    try:
        yield preferred
    finally:
        if preferred:
            _set_policy(DEFAULT)


def _policy() -> int | None:
    """Return the memory policy of this thread; None if the system does not say."""
    mode = ctypes.c_int(-1)
    calls = CALLS.get(platform.machine())
    if calls is None or _call(calls[1], ctypes.byref(mode), None, 0, None, 0) != 0:
        return None
    return mode.value


def _set_policy(mode: int, node: int | None = None) -> bool:
    mask = (ctypes.c_ulong * (NODES // 64))()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    bits = 0 if node is None else NODES
    return _call(CALLS[platform.machine()][0], mode, None if node is None else mask, bits) == 0


def _call(number: int, *arguments: object) -> int:
    """Make a system call of Linux; return -1 if it fails or there is none."""
    try:
        function = ctypes.CDLL(None).syscall
    except (OSError, TypeError, AttributeError):
        return -1
    function.restype = ctypes.c_long
    wide = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    return int(function(ctypes.c_long(number), *wide))
