"""Host time for each saved tensor: one that passes through, and one that is offloaded and reloaded.

    PYTHONPATH=src python benchmarks/overhead.py --out benchmarks/results

A layer of many cheap operations, each of which saves one tensor, is timed on the host alone, from the first call to
the return of ``backward``; the device is idle before and its queue short enough not to stop the host.  The same step
without a context is taken away, and the rest divided by the number of tensors.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results_file import RESULTS, write
from torch.autograd.graph import saved_tensors_hooks

import actoffload

HOOKS_ALONE = "autograd's hooks alone, doing nothing"
TENSORS = 64  # few enough that neither kernels nor copies fill the device's queue
SMALL, ELIGIBLE = 256, 256 * 1024  # elements


class HooksAlone(saved_tensors_hooks):
    """Saved-tensor hooks that do nothing: what autograd itself takes to call any hooks at all."""

    def __init__(self) -> None:
        super().__init__(_same, _same)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def chain(x: torch.Tensor, count: int) -> torch.Tensor:
    """Apply operations that save their input each."""
    for _ in range(count):
        x = x.sin()
    return x


def host_seconds(pair: Any, elements: int, where: int, device: torch.device) -> tuple[float, float]:
    """Return host seconds of forward and backward with the chain in layer `where` of three."""
    context, sync_function = pair
    x = torch.ones(elements, device=device, dtype=torch.float16, requires_grad=True) * 0.5
    if device.type != "cpu":
        torch.accelerator.synchronize()
    begun = time.perf_counter()
    for k in range(3):
        with context:
            x = chain(x, TENSORS if k == where else 1)
        x = sync_function(x)
    middle = time.perf_counter()
    loss = x.sum()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    turned = time.perf_counter()
    loss.backward()
    ended = time.perf_counter()
    return middle - begun, ended - turned


def measure(repeats: int, device: torch.device) -> dict[str, Any]:
    """Measure the three cases, each interleaved with the same step without a context."""
    cases = {
        HOOKS_ALONE: (SMALL, 0),
        "passed through, too small": (SMALL, 0),
        "passed through, layer stays": (ELIGIBLE, 2),
        "offloaded and reloaded": (ELIGIBLE, 0),
    }
    nothing = actoffload.get_cpu_offload_context(enabled=False)
    pair = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    rows = []
    offloading = pair
    for name, (elements, where) in cases.items():
        pair = (HooksAlone(), _same) if name == HOOKS_ALONE else offloading
        for _ in range(10):
            host_seconds(pair, elements, where, device)
            host_seconds(nothing, elements, where, device)
        offloading[0].reset_statistics()
        host_seconds(pair, elements, where, device)
        statistics = offloading[0].statistics()
        found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        gc.collect()
        gc.disable()
        for _ in range(repeats):
            found["without"].append(host_seconds(nothing, elements, where, device))
            found["with"].append(host_seconds(pair, elements, where, device))
        gc.enable()
        forward, backward = (
            (median(s[k] for s in found["with"]) - median(s[k] for s in found["without"])) / TENSORS for k in (0, 1)
        )
        rows.append(
            {
                "case": name,
                "tensors": TENSORS,
                "tensors_offloaded": statistics.tensors_offloaded,
                "forward_seconds": forward,
                "backward_seconds": backward,
                "seconds": forward + backward,
            }
        )
    return {"repeats": repeats, "cases": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--rehearse", action="store_true", help="few repeats")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    data = measure(5 if options.rehearse else 200, device)
    path = write(options.out, "overhead", data, "PYTHONPATH=src python benchmarks/overhead.py")
    for row in data["cases"]:
        print(f"{row['case']:<30}{row['seconds'] * 1e6:8.2f} µs for each tensor")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
