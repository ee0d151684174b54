"""What of a module decides whether two calls are assumed to do the same, and when it is read again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload.recompute import Structure, Structures


class Block(nn.Module):
    """Has a flag, something that is None, a tensor that is no buffer, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.fast, self.cache, self.seen = False, None, torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.up(x))
        return result


def other_type(block: Any) -> None:
    class Other(nn.Linear):
        pass

    block.up.__class__ = Other


CHANGES: dict[str, Callable[[Any], object]] = {
    "evaluation": lambda block: block.eval(),
    "a flag": lambda block: setattr(block, "fast", True),
    "a flag inside": lambda block: setattr(block.norm, "affine", False),
    "None becomes a flag": lambda block: setattr(block, "cache", True),
    "one more attribute": lambda block: setattr(block, "more", 1),
    "one attribute less": lambda block: delattr(block, "fast"),
    "one more module": lambda block: block.add_module("down", nn.Linear(4, 4)),
    "no module": lambda block: setattr(block, "up", None),
    "another type": other_type,
    "no buffer": lambda block: setattr(block.norm, "running_mean", None),
    "one more buffer": lambda block: block.up.register_buffer("scale", torch.ones(1)),
}
SAME: dict[str, Callable[[Any], object]] = {
    "nothing": lambda block: None,
    "another number": lambda block: setattr(block.norm, "eps", 1e-3),
    "another tensor": lambda block: setattr(block, "seen", torch.zeros(5)),
    "another buffer": lambda block: setattr(block.norm, "running_mean", torch.ones(4)),
    "another parameter": lambda block: setattr(block.up, "weight", nn.Parameter(torch.ones(4, 4))),
    "a module of the same type": lambda block: setattr(block, "up", nn.Linear(4, 4)),
    "the tables of a copy": lambda block: setattr(block.up, "_buffers", dict(block.up._buffers)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_counts_makes_another_kind(change):
    known, block = Structures(), Block()
    before = known.of(block).kind
    assert known.of(Block()).kind == before
    CHANGES[change](block)
    assert known.of(block).kind != before
    assert Structure(block).kind == Structure(block).kind != Structure(Block()).kind


@pytest.mark.parametrize("change", SAME)
def test_other_changes_make_none(change):
    known, block = Structures(), Block()
    before = known.of(block).kind
    SAME[change](block)
    assert known.of(block).kind == before


@pytest.mark.parametrize("change", [*CHANGES, *SAME])
def test_what_is_there_is_never_old(change):
    known, block = Structures(), Block()
    known.of(block)
    {**CHANGES, **SAME}[change](block)
    structure = known.of(block)
    modules = structure.modules(block)
    assert {id(of) for of in modules} == {id(of) for of in block.modules()}
    assert {id(of) for of in structure.weights()} == {id(of) for of in block.parameters()}
    buffers = [of for _, table, _ in structure.tables(modules) for of in table.values() if of is not None]
    assert {id(of) for of in buffers} == {id(of) for of in block.buffers()}


def test_it_is_read_once_while_nothing_changes():
    known, block = Structures(), Block()
    structure = known.of(block)
    block(torch.ones(2, 4)).sum().backward()
    assert known.of(block) is structure


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_of_torchscript_are_read_each_time():
    known, block = Structures(), nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)))
    structure = known.of(block)
    assert known.of(block) is not structure
    assert known.of(block).kind == structure.kind


def test_a_module_lives_as_long_as_its_program_needs_it():
    known, block = Structures(), Block()
    block.handle = known  # as hooks of the module would
    known.of(block)
    ref = weakref.ref(block)
    gc.disable()
    try:
        del block
        assert ref() is None
        assert not known._known
    finally:
        gc.enable()
