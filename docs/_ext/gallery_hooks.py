"""Hooks of sphinx-gallery: the memory column, the order of the pages and the alternatives of their figures."""

from __future__ import annotations

import gc
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from sphinx_gallery.sorting import ExplicitOrder

from actoffload.report.plots import ByteUnit

MB = 1e6  # sphinx-gallery prints the number followed by "MB"
FIGURES = tomllib.loads((Path(__file__).parents[2] / "examples/figures.toml").read_text("utf-8"))
TEACHING_ORDER = ExplicitOrder([*(f"{name}.py" for name in FIGURES), "*"])


def describe_figures(text: str) -> str:
    """Edit a gallery page: write the alternatives of its images, and its peak in the unit of its figures."""

    def described(found: re.Match[str]) -> str:
        number, known = int(found["number"] or 1), FIGURES.get(found["name"], ())
        return found[0] if number > len(known) else f"{found['image']} {known[number - 1]}"

    image = r"(?P<image>sphx_glr_(?P<name>\w+?)_((?P<number>\d{3})|thumb)\.\w+\n +:alt:).*"
    return re.sub(image, described, _in_unit_of_figures(text))


def _in_unit_of_figures(text: str) -> str:
    """Convert the peak of a page, which sphinx-gallery prints in MB, to the unit of its figures and tables."""

    def converted(found: re.Match[str]) -> str:
        nbytes = int(found["number"]) * MB
        return found["label"] + ByteUnit.of(nbytes).text(nbytes)

    return re.sub(r"(?P<label>\*\*Peak device memory of this process:\*\* +)(?P<number>\d+) MB", converted, text)


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
