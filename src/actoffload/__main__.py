"""Print what this machine offers for offloading: ``python -m actoffload``; or train a model that does not fit."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ._text import milliseconds, size
from .device import ReferenceDevice, use
from .machine import measure_machine
from .measure import MemoryMeter, describe_device, measure_step_times
from .pipeline import offload

PART = 0.6  # of the peak of plain training, to which the device is limited
PASSES, TIMED = 6, 3  # steps until the plan stands, and steps that are timed


def demo(write: Callable[[str], object] = sys.stdout.write) -> None:
    """Train a model plainly, limit the device so that this fails, and train it with `offload`.

    Runs on the accelerator if there is one.  On a CPU, which plays the device, the limit is simulated.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    place = accelerator or torch.device("cpu")
    blocks, width, tokens, dtype = (12, 2048, 8192, torch.bfloat16) if accelerator else (6, 64, 1024, torch.float32)

    def make() -> tuple[nn.Module, Callable[[], None]]:
        torch.manual_seed(0)
        ends = [(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(blocks)]
        inner = (nn.Sequential(nn.LayerNorm(width), up, nn.SiLU(), down, nn.Tanh()) for up, down in ends)
        model = nn.Sequential(*inner).to(place, dtype)
        x = torch.randn(tokens, width, device=place, dtype=dtype)

        def step() -> None:
            model.zero_grad()
            model(x).float().square().mean().backward()

        return model, step

    def gradients() -> list[torch.Tensor]:
        return [weight.grad.cpu().clone() for weight in model.parameters() if weight.grad is not None]

    with MemoryMeter() as meter:
        model, step = make()
        step()
    want = gradients()
    write(f"{blocks} blocks of {width} features, {tokens} tokens, on {describe_device().name}.\n")
    (seconds,) = measure_step_times({"step": step}, repeats=1, steps=TIMED, warmup=0)["step"]
    write(f"Plain training: {size(meter.peak_bytes)}, {milliseconds(seconds, 0)} a step.\n")
    del model, step
    limit = int(PART * meter.peak_bytes)
    with _limited(accelerator, limit):
        model, step = make()
        write(f"The device is limited to {size(limit)}. Plain training:\n")
        try:
            step()
        except torch.OutOfMemoryError as error:
            write(f"  OutOfMemoryError: {str(error).splitlines()[0].split('. ')[0].rstrip('.')}.\n")
        model.zero_grad()
        write("With one line, actoffload.offload(model):\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = offload(model)
            (seconds,) = measure_step_times({"step": step}, repeats=1, steps=TIMED, warmup=PASSES)["step"]
            same = all(map(torch.equal, gradients(), want))
        bits = "the same bits in all gradients" if same else "OTHER gradients: please report this"
        write(f"  {milliseconds(seconds, 0)} a step, {bits}.\n")
        groups = "\n\n".join(str(handle.report()).split("\n\n")[:2])
        for line in f"The plan\n{handle.plan}\n\nThe latest step, as in print(handle.report())\n{groups}".splitlines():
            write(f"  {line}".rstrip() + "\n")
        handle.remove()


@contextmanager
def _limited(accelerator: torch.device | None, limit: int) -> Iterator[None]:
    """Limit the memory of the device in a ``with`` block."""
    if accelerator is None:
        device = ReferenceDevice(wall_clock=True, memory=limit)
        with use(device), device.counting():
            yield
        return
    module: Any = getattr(torch, accelerator.type)
    module.empty_cache()
    module.set_per_process_memory_fraction(limit / module.mem_get_info()[1])
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(1.0)


def main() -> int:
    """Measure the machine and print the result, or run the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m actoffload",
        description="Measure what offloading of activations depends on: the link between device and host, matrix "
        "products, and the limits of host memory. Takes a few seconds and 1 GiB of host memory.",
    )
    parser.add_argument("demo", nargs="?", choices=["demo"], help="train a model that does not fit instead")
    if parser.parse_args().demo:
        demo()
    else:
        sys.stdout.write(f"{measure_machine()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
