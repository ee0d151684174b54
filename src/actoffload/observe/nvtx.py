"""Ranges with names in NVIDIA's profilers (Nsight Systems), where torch was built with NVTX; nothing elsewhere.

NVTX is the NVIDIA Tools Extension, https://nvidia.github.io/NVTX; torch calls it as ``torch.cuda.nvtx``.  Ranges
belong to the thread that pushes them, and show on the host's side of a profile when work was queued.
"""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["available", "nvtx_range", "pop", "push", "start", "stop"]

AVAILABLE = hasattr(torch._C, "_nvtx")  # the functions of torch.cuda.nvtx exist in any case, and raise without it


def available() -> bool:
    """Whether ranges reach a profiler; False where torch was built without NVTX."""
    return AVAILABLE


def push(name: str) -> None:
    """Begin a range in the calling thread, inside those that were pushed before; nothing without NVTX."""
    if AVAILABLE:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def pop() -> None:
    """End the range that was pushed last in the calling thread; nothing without NVTX."""
    if AVAILABLE:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def start(name: str) -> object:
    """Begin a range that any thread may end, and return what `stop` wants; None without NVTX."""
    return torch.cuda.nvtx.range_start(name) if AVAILABLE else None


def stop(shown: object) -> None:
    """End a range that `start` began; nothing for None."""
    if shown is not None:
        torch.cuda.nvtx.range_end(shown)


class nvtx_range:  # noqa: N801 - reads as a function, and costs less than a generator
    """A range around a ``with`` block; nothing without NVTX.

    Parameters
    ----------
    name : str
        What the profiler shows.

    Examples
    --------
    >>> from actoffload.observe.nvtx import nvtx_range
    >>> with nvtx_range("forward of model.layers.3"):
    ...     y = torch.ones(3) + 1
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        push(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pop()
