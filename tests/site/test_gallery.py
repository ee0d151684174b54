"""The memory column and the order of the gallery, and the alternatives of its figures."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch


class Allocator:
    """The functions of an accelerator module that the memory column reads, for a simulated number of bytes."""

    def __init__(self):
        self.now = self.peak = 0

    def allocate(self, nbytes):
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def reset(self):
        self.peak = self.now


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    module = types.ModuleType("imagined")
    module.reset_peak_memory_stats = made.reset
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: made.peak)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", made.reset)
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    made.module = module
    return made


def measured(block):
    """Measure a block as sphinx-gallery does, which names the module in which the page runs."""
    from recordings import DeviceMemory

    block.fake_main = types.ModuleType("page")
    return DeviceMemory()(block)


def test_peak_of_a_block_in_mb(allocator):
    def block():
        allocator.allocate(5_000_000)
        allocator.allocate(-4_000_000)
        return "result"

    assert measured(block) == (5.0, "result")
    assert measured(lambda: None)[0] == 1.0  # the bytes that are still allocated


@pytest.mark.parametrize("through", ["accelerator", "module"])
def test_a_reset_inside_the_block_does_not_hide_the_peak_before_it(allocator, through):
    def block():
        allocator.allocate(7_000_000)
        allocator.allocate(-7_000_000)
        (torch.accelerator if through == "accelerator" else allocator.module).reset_peak_memory_stats()
        assert allocator.peak == 0
        allocator.allocate(2_000_000)

    assert measured(block)[0] == 7.0
    assert torch.accelerator.reset_peak_memory_stats == allocator.reset  # restored


def test_the_order_lists_every_example_and_nothing_else():
    from recordings import TEACHING_ORDER

    examples = Path(__file__).parents[2] / "examples"
    assert sorted(TEACHING_ORDER.ordered_list_start) == sorted(path.name for path in examples.glob("[!_]*.py"))


def test_every_figure_of_an_example_has_a_description():
    from recordings import FIGURES

    examples = {
        path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "examples").glob("*.py")
    }
    assert {name: len(of) for name, of in FIGURES.items()} == {
        name: text.count(".savefig(") for name, text in examples.items()
    }


def test_every_example_leads_to_guides_that_exist():
    from recordings import FIGURES, GUIDES, add_guides

    guides = Path(__file__).parents[2] / "docs" / "guide"
    assert GUIDES.keys() == FIGURES.keys()
    assert all((guides / f"{name}.md").is_file() for names in GUIDES.values() for name in names)
    page = add_guides("text\n\n.. rst-class:: sphx-glr-timing\n", "basic")
    assert page.startswith("text\n\n**Further reading:** :doc:`/guide/default_scheduling`")
