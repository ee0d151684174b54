"""What `python -m actoffload` prints: limits of host memory by control group, and what follows from measurements."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actoffload.machine import GIB, HostMemory, Machine, host_memory, measure_machine
from actoffload.measure import DeviceInfo
from actoffload.schedule import Link

LIMITS = {
    "version 2": ("memory.max", "memory.current"),
    "version 1": ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
}


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB, 48 of them available."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n")
    return tmp_path


def test_memory_of_the_machine(root):
    found = host_memory(root)
    assert (found.total, found.available) == (64 * GIB, 48 * GIB)


@pytest.mark.parametrize("names", LIMITS.values(), ids=LIMITS)
def test_a_container_has_less(root, names):
    write(root, f"sys/fs/cgroup/{names[0]}", f"{16 * GIB}\n")
    write(root, f"sys/fs/cgroup/{names[1]}", f"{6 * GIB}\n")
    found = host_memory(root)
    assert (found.total, found.available) == (16 * GIB, 10 * GIB)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_control_group_without_a_limit(root, limit):
    for names in LIMITS.values():
        write(root, f"sys/fs/cgroup/{names[0]}", limit)
    assert host_memory(root).total == 64 * GIB


def test_memlock(monkeypatch):
    for soft, expected in ((resource.RLIM_INFINITY, None), (65536, 65536)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert host_memory().memlock == expected


def test_table():
    device = DeviceInfo("Some GPU", False, "1.2", "2.13", "3.12")
    host = HostMemory(64 * GIB, 48 * GIB, 65536)
    machine = Machine(device, host, 80 * GIB, Link(50e9, 40e9, both=70e9), 500e12, 0.7)
    assert machine.flops_per_byte == 1e4
    assert str(machine).splitlines() == [
        "device                     Some GPU, driver 1.2, torch 2.13, Python 3.12",
        "device memory              80.0 GiB",
        "device to host             50.0 GB/s",
        "host to device             40.0 GB/s",
        "both at once, in sum       70.0 GB/s",
        "bfloat16 matrix products   500 TFLOP/s",
        "1 GiB of pinned memory     0.70 s to allocate",
        "host memory                64.0 GiB, 48.0 GiB available",
        "locked memory (ulimit -l)  64 KiB",
        "",
        "- All layers can be offloaded at no cost if each computes 10,000 FLOP in forward for each byte that it saves. "
        "With half of that, half of the layers can be.",
    ]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="on the reference device")
def test_without_an_accelerator_no_time_is_shown():
    machine = measure_machine()
    assert machine.link is None
    assert machine.host.total >= machine.host.available > 0
    assert "GB/s" not in str(machine)
    assert "No accelerator found" in str(machine)


def test_the_command():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "actoffload", "--markdown"], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    assert "| host memory" in done.stdout
