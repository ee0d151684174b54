"""What sphinx-gallery calls while it executes the examples: the memory column and the order of the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

MB = 1e6  # sphinx-gallery prints the number with "MB" behind it
ORDER = (
    # Whole models, with one line.
    "hugging_face_llama.py",
    "not_freed.py",
    "offload_beside_checkpointing.py",
    "moe_groups.py",
    # A loop of one's own, with a context around each layer.
    "basic.py",
    "manual_synchronization.py",
    "cuda_graphs.py",
)


def example_order(filename: str) -> tuple[int, str]:
    """Sort key of the gallery: the order in which a reader learns, then by name."""
    place = ORDER.index(filename) if filename in ORDER else len(ORDER)
    return place, filename


class DeviceMemory:
    """sphinx-gallery's ``show_memory``: peak bytes allocated on the accelerator while a block runs.

    Without an accelerator it reports 0, and the page says that nothing was measured. An instance and not a
    function, because Sphinx cannot keep functions in its cached configuration.
    """

    def __call__(self, func: Callable[[], Any]) -> tuple[float, Any]:
        """Run `func`; return the peak in MB and what `func` returned."""
        import torch

        if not torch.accelerator.is_available():
            return 0.0, func()
        with _watch_peak() as peak:
            out = func()
        return peak() / MB, out

    def __repr__(self) -> str:
        """Return a text that is the same in every build, so that Sphinx sees no changed configuration."""
        return "DeviceMemory()"


@contextmanager
def _watch_peak() -> Iterator[Callable[[], int]]:
    """Follow the allocator's peak from here on, across resets of the peak by the code that runs.

    An example resets the peak between its own measurements. Each reset is preceded by a look at the peak so
    far, otherwise the column would show only what came after the last reset.
    """
    import torch

    seen = [0]

    def look() -> int:
        seen[0] = max(seen[0], torch.accelerator.max_memory_allocated())
        return seen[0]

    def noting(reset: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*args: Any, **kwargs: Any) -> None:
            look()
            reset(*args, **kwargs)

        return wrapper

    torch.accelerator.reset_peak_memory_stats()
    with ExitStack() as stack:
        for module in {torch.accelerator, torch.get_device_module()}:
            reset = module.reset_peak_memory_stats
            stack.enter_context(mock.patch.object(module, "reset_peak_memory_stats", noting(reset)))
        yield look
