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
torch.zeros(1, device="cuda")
begun = time.perf_counter()
held = [torch.empty(2**30, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
print(time.perf_counter() - begun)
"""


def test_several_threads_pin_memory_faster() -> None:
    """The guide says so."""
    seconds = []
    for settings in ("", "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"):
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
        done = subprocess.run(
            [sys.executable, "-c", PINNED], capture_output=True, text=True, check=False, env=environment
        )
        assert not done.returncode, done.stderr
        seconds.append(float(done.stdout))
    print(seconds)
    assert seconds[1] < (0.8 if (os.cpu_count() or 1) >= 8 else 1.2) * seconds[0]
