"""Hooks of sphinx-gallery: the memory column and the order of the pages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

MB = 1e6  # sphinx-gallery prints the number followed by "MB"
ORDER = (
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
)


def example_order(filename: str) -> tuple[int, str]:
    """Return the sort key of an example: the teaching order, then the name."""
    place = ORDER.index(filename) if filename in ORDER else len(ORDER)
    return place, filename


_modules: list[ModuleType] = []  # in which the present page runs


class DeviceMemory:
    """``show_memory`` of sphinx-gallery: peak memory allocated on the accelerator while a block runs, in MB.

    Without an accelerator it is 0. It is an instance because Sphinx cannot pickle functions in its configuration.
    """

    def __call__(self, func: Callable[[], Any]) -> tuple[float, Any]:
        """Call `func`; return the peak in MB and the result.

        sphinx-gallery begins a page with a call that does nothing, and subtracts what it returns: 0, so that a page
        shows its whole peak. The variables of the page before are deleted then, as its models take memory.
        """
        import torch

        if getattr(func, "__module__", "") == "sphinx_gallery.gen_rst" and getattr(func, "__name__", "") == "<lambda>":
            for module in _modules:
                vars(module).clear()
            _modules.clear()
            gc.collect()
            return 0.0, func()
        _modules[:] = [func.fake_main] if hasattr(func, "fake_main") else _modules
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
