"""`python -m actoffload` on a GPU, and pinned memory under a limit for locked memory."""

import os
import subprocess
import sys

from gpu_harness import gpu

from actoffload.machine import measure_machine

pytestmark = gpu


def test_measured() -> None:
    machine = measure_machine()
    print(machine)
    # Both directions at once are faster than one alone, and no faster than both alone.
    assert max(machine.link.d2h, machine.link.h2d) < machine.link.both <= machine.link.d2h + machine.link.h2d
    assert (machine.flops or 0) > 1e12
    assert (machine.device_bytes or 0) > 2**30


LOCKED = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
import torch, actoffload
assert torch.empty(2**28, dtype=torch.uint8, pin_memory=True).is_pinned()
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]).cuda()
handle = actoffload.offload(model, num_layers=4)
model(torch.randn(16384, 1024, device="cuda")).square().mean().backward()
assert handle.statistics().bytes_offloaded > 0, handle.report()
"""


def test_locked_memory_is_no_limit_for_pinned_memory() -> None:
    """The guide says so: the driver does not count pinned memory against `ulimit -l`."""
    done = subprocess.run([sys.executable, "-c", LOCKED], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


PINNED = """
import time
import torch
from actoffload.device import backend
torch.zeros(1, device="cuda")
seconds = []
ours = backend().empty_host
# Twice: a host that was idle has no huge pages ready the first time.
for empty in (lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True), ours, ours):
    begun = time.perf_counter()
    kept = [empty(2**30) for _ in range(4)]
    seconds.append(time.perf_counter() - begun)
    assert all(each.is_pinned() for each in kept)
source = torch.randint(256, (2**30,), dtype=torch.uint8, device="cuda")
for host in kept:
    host.copy_(source, non_blocking=True)
    back = torch.empty_like(source).copy_(host, non_blocking=True)
    assert torch.equal(back, source)
print(seconds[0], min(seconds[1:]))
"""


def test_pinning_is_faster_than_with_pytorch() -> None:
    """The guide says so."""
    done = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    with_torch, ours = map(float, done.stdout.split())
    print(with_torch, ours)
    assert ours < (0.5 if (os.cpu_count() or 1) >= 8 else 1.2) * with_torch


REFUSED = """
import torch
from actoffload.device import backend
import actoffload.device.accelerator as accelerator
accelerator.pin = lambda nbytes, register, unregister, cpus: int(register(8, nbytes, 0)) and None
assert backend().empty_host(4096).is_pinned()
assert (torch.ones(8, device="cuda") + 1).sum().item() == 16
"""


def test_a_refusal_of_the_driver_is_no_error_of_a_later_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
