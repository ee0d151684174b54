"""What `python -m actoffload` and ``python -m actoffload demo`` print."""

import re
import subprocess
import sys

import pytest
import torch

from actoffload.__main__ import PART, demo
from actoffload.device import ReferenceDevice
from actoffload.machine import GIB, HostMemory, Machine, measure_machine
from actoffload.measure import DeviceInfo
from actoffload.schedule import Link


def test_table():
    device = DeviceInfo("Some GPU", False, "1.2", "2.13", "3.12")
    host = HostMemory(64 * GIB, 48 * GIB)
    machine = Machine(device, host, 80 * GIB, Link(50e9, 40e9, both=70e9), 500e12, 0.7)
    assert machine.flops_per_byte == 1e4
    assert str(machine).splitlines() == [
        "device                    Some GPU, driver 1.2, torch 2.13, Python 3.12",
        "device memory             80.00 GiB",
        "device to host            50.0 GB/s",
        "host to device            40.0 GB/s",
        "both at once, in sum      70.0 GB/s",
        "bfloat16 matrix products  500 TFLOP/s",
        "1 GiB of pinned memory    0.70 s to allocate",
        "host memory               64.00 GiB, 48.00 GiB available",
        "",
        "- Copies of a layer are hidden behind its forward if that computes 10,000 FLOP for each byte that it saves. A "
        "layer of Llama 8B with 8192 tokens computes 2,500: 25 % of such layers can be offloaded at no cost in time. "
        "Longer sequences and compiled layers compute more.",
    ]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="on the reference device")
def test_without_an_accelerator_no_time_is_shown():
    machine = measure_machine()
    assert machine.link is None
    assert machine.host.total >= machine.host.available > 0
    assert "GB/s" not in str(machine)
    assert "No accelerator found" in str(machine)


def test_the_command():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "actoffload"], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert "host memory" in done.stdout


# The demonstration


def test_demo():
    lines: list[str] = []
    demo(lines.append)
    text = "".join(lines)
    peak = float(re.search(r"Plain training: ([\d.]+) MiB", text)[1])
    limit = float(re.search(r"limited to ([\d.]+) MiB", text)[1])
    assert limit == pytest.approx(PART * peak, abs=0.1)
    assert f"and it has {limit} MiB." in text, "plain training runs out of memory"
    assert "the same bits in all gradients" in text
    expected = float(re.search(r"Expected: peak ([\d.]+) MiB", text)[1])
    assert expected <= limit
    assert "above the limit of" in text
    assert len(lines) <= 28


def test_a_reference_device_with_memory():
    device = ReferenceDevice(memory=2**20)
    with device.counting():
        first = torch.empty(2**18, dtype=torch.uint8)
        assert (device.in_use(), device.memory_limit()) == (2**18, 2**20)
        with pytest.raises(torch.OutOfMemoryError, match=r"1\.2 MiB are needed, and it has 1\.0 MiB"):
            torch.empty(2**20, dtype=torch.uint8)
        assert device.out_of_memory_errors() == 1
        assert device.allocated() == (2**18, 2**20)
        host = device.empty_host(2**22)
        assert device.in_use() == 2**18, "host memory is no device memory"
        del first
    assert host.numel() == 2**22
    assert device.in_use() == 0
    assert ReferenceDevice().memory_limit() is None
