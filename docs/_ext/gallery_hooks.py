"""Hooks of sphinx-gallery: the memory column, the order of the pages and the alternatives of their figures."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from sphinx_gallery.sorting import ExplicitOrder

MB = 1e6  # sphinx-gallery prints the number followed by "MB"
TEACHING_ORDER = ExplicitOrder(
    [
        "never_slower.py",
        "fit_a_budget.py",
        "keep_offload_recompute.py",
        "hugging_face_llama.py",
        "not_freed.py",
        "offload_beside_checkpointing.py",
        "moe_groups.py",
        "moe_routing.py",
        "pipelines.py",
        # Above, whole models; below, a training loop with a context around each layer.
        "basic.py",
        "manual_synchronization.py",
        "cuda_graphs.py",
        "*",
    ]
)

# What each figure of an example shows, in their order; the first one is the example's thumbnail.
FIGURES = {
    "never_slower": (
        "Bars: peak memory of the Trainer without offloading and with offload(model), with step times",
        "Step time and peak memory of each step, for long and for short sequences, without offloading and with it",
    ),
    "fit_a_budget": ("Bars: peak memory and step time without a limit, with offload(model) and with budgets",),
    "keep_offload_recompute": (
        "Bars: peak memory and step time of keeping, checkpointing, offloading, and offloading with recomputation",
        "Curve: time of forward and backward against peak memory for other budgets",
    ),
    "hugging_face_llama": (
        "Bars: peak memory and step time by the number of offloaded layers of a Llama",
        "Timeline of a step: compute, copies to the host and back, stalls, and activations on the device",
    ),
    "not_freed": ("Curves: memory over a step without offloading, with a reference that is not freed, and fixed",),
    "offload_beside_checkpointing": (
        "Bars: peak memory and step time of keeping, checkpointing, offloading, and both together",
    ),
    "moe_groups": ("Bars: peak memory and step time with attention, dense MLPs, mixtures or all of them offloaded",),
    "moe_routing": ("Lines: tokens of each expert in each layer, beside an even distribution",),
    "pipelines": ("Bars: peak memory of each rank of a pipeline, without offloading and with it",),
    "basic": (
        "Curves: memory over a step of twelve layers, without offloading and with three layers offloaded",
        "Timeline of a step: compute, copies to the host and back, and activations on the device",
    ),
    "manual_synchronization": (
        "Curves: memory over a step without offloading and with a manual schedule",
        "Timeline of a step with a manual schedule: compute, copies, and activations on the device",
    ),
    "cuda_graphs": (
        "Curves: memory over the eager step, without offloading and with three layers offloaded",
        "Timeline of the eager step: compute, copies, and activations on the device",
    ),
}


def describe_figures(text: str) -> str:
    """Return the text of a gallery page with the descriptions of its figures as the alternatives of the images."""

    def described(found: re.Match[str]) -> str:
        number, known = int(found["number"] or 1), FIGURES.get(found["name"], ())
        return found[0] if number > len(known) else f"{found['image']} {known[number - 1]}"

    image = r"(?P<image>sphx_glr_(?P<name>\w+?)_((?P<number>\d{3})|thumb)\.\w+\n +:alt:).*"
    return re.sub(image, described, text)


class DeviceMemory:
    """``show_memory`` of sphinx-gallery: peak memory allocated on the accelerator while a block runs, in MB.

    Without an accelerator it is 0. It is an instance because Sphinx cannot pickle functions in its configuration.
    """

    page = ModuleType("no page")  # in which the present page runs

    def __call__(self, func: Callable[[], Any]) -> tuple[float, Any]:
        """Call `func`; return the peak in MB and the result.

        sphinx-gallery begins a page with a call that does nothing, and subtracts what it returns: 0, so that a page
        shows its whole peak. The variables of the page before are deleted then, as its models take memory.
        """
        import torch

        if not hasattr(func, "fake_main"):
            vars(DeviceMemory.page).clear()
            gc.collect()
            return 0.0, func()
        DeviceMemory.page = func.fake_main
        if not torch.accelerator.is_available():
            return 0.0, func()
        with _watch_peak() as peak:
            out = func()
        return peak() / MB, out

    def __repr__(self) -> str:
        """Return the same text in every build, so that Sphinx sees no changed configuration."""
        return "DeviceMemory()"


@contextmanager
def _watch_peak() -> Iterator[Callable[[], int]]:
    """Measure the peak of the allocator, including the peaks before those resets that an example makes itself."""
    import torch

    seen = [0]

    def look() -> int:
        seen[0] = max(seen[0], torch.accelerator.max_memory_allocated())
        return seen[0]

    torch.accelerator.reset_peak_memory_stats()
    with ExitStack() as stack:
        for module in {torch.accelerator, torch.get_device_module()}:
            reset = module.reset_peak_memory_stats
            noting = {"reset_peak_memory_stats": lambda *a, do=reset, **k: (look(), do(*a, **k))}
            stack.enter_context(mock.patch.multiple(module, **noting))
        yield look
