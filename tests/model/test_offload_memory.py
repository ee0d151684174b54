"""Memory under `offload`, to the byte: what is shared, copied, and kept inside of other modules."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from whole_model import ROWS, UNIT, Attention, Inside, Mlp, Wave, Waves, agrees, bytes_of_a_step, data, offload

from actoffload.report import Reason

# What is really freed


class Watched(Wave):
    """A wave that notes the storages that it saves."""

    def __init__(self, notes: list[StorageWeakRef]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x):
        h = x * self.scale
        self.notes += [StorageWeakRef(x.untyped_storage()), StorageWeakRef(h.untyped_storage())]
        return torch.sin(h)


@pytest.mark.parametrize("number", [3, None])
def test_the_memory_is_gone(number):
    notes: list[StorageWeakRef] = []
    model = Inside(6, lambda: Watched(notes))
    handle = offload(model, num_layers=number)
    offloaded = 4 if number is None else number
    for _ in range(3):
        notes.clear()
        y = model(data().requires_grad_() * 1.0)
        gone = [weak.expired() for weak in notes]
        assert gone == [True] * (2 * offloaded) + [False] * (12 - 2 * offloaded)
        assert handle.statistics().resident_bytes == (12 - 2 * offloaded) * UNIT
        y.sum().backward()
        del y
        assert all(weak.expired() for weak in notes)
    report = handle.report()
    assert (report.r, report.expected_bytes, report.dropped_bytes) == (1.0, 2 * offloaded * UNIT, 2 * offloaded * UNIT)


# What is shared


class Sine(nn.Module):
    """Saves its input."""

    def forward(self, x):
        return torch.sin(x)


class Shares(Waves):
    """Waves, and sines beside them that save the inputs of some blocks too: before the block, or behind it."""

    def __init__(self, before=(), behind=()) -> None:
        super().__init__(6)
        self.sines = nn.ModuleList([Sine() for _ in range(6)])
        self.before, self.behind = before, behind

    def forward(self, x):
        x, total = x * 1.0, 0.0
        for k, (block, sine) in enumerate(zip(self.blocks, self.sines, strict=True)):
            total = total + sine(x) if k in self.before else total
            y = block(x)
            total = total + sine(x) if k in self.behind else total
            x = y
        return x + total


def required(model, x):
    return model(x.requires_grad_())


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_input_that_was_saved_outside_is_offloaded_with_its_group(at):
    """As checkpointing saves it, or whatever the model does with it beside the block."""
    handle, statistics = agrees(Shares(before=[at]), required, steps=1, layers="blocks")
    assert statistics.bytes_offloaded == 8 * UNIT
    assert statistics.reloaded_on_demand == 0
    # What is saved before the third block lies there until the first one leaves, when that block starts.
    assert statistics.peak_resident_bytes == (4 if at < 2 else 5) * UNIT
    # With a kept group it is kept as well, as something that was saved outside.
    assert statistics.bytes_kept.get(Reason.OUTSIDE, 0) == (0 if at < 4 else UNIT)
    assert Reason.SHARED not in statistics.bytes_kept
    assert handle.report().r == 1.0


def test_what_is_saved_outside_while_a_group_has_it_is_kept_and_counted():
    """The group came first, so it is copied, but not freed, because something outside has saved it too."""
    handle, statistics = agrees(Shares(behind=range(6)), required, steps=1, layers="blocks")
    assert statistics.bytes_offloaded == 8 * UNIT
    assert statistics.bytes_reloaded == 4 * UNIT
    assert statistics.bytes_kept[Reason.SHARED] == 4 * UNIT
    report = handle.report()
    # Nothing of it should be freed: R counts what only offloaded groups have saved.
    assert (report.expected_bytes, report.r) == (4 * UNIT, 1.0)
    assert sum(group.kept.get(Reason.SHARED, (0, 0))[1] for group in report.groups) == 4 * UNIT


# What is copied


def test_what_is_kept_outside_counts_each_storage_once():
    """Query, key and value are three views of one storage; outside of every group they are kept."""
    model = nn.Sequential(Attention(), *(Mlp() for _ in range(4)), Attention())
    handle, statistics = agrees(model, lambda m, x: m(x.requires_grad_() * 1.0), steps=1, layers=Mlp)
    attention = UNIT + 3 * UNIT + ROWS * ROWS * 4 + UNIT
    assert statistics.bytes_kept[Reason.OUTSIDE] == 2 * attention
    assert handle.report().outside[Reason.OUTSIDE][1] == 2 * attention


# Chosen and kept modules inside of each other


class Nested(nn.Module):
    """A wave, an inner wave in a box, and a wave: tensors are saved before, in and after the inner one."""

    class Box(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Wave()

        def forward(self, x):
            return torch.sin(self.inner(torch.sin(x)))

    def __init__(self):
        super().__init__()
        self.box = Nested.Box()

    def forward(self, x):
        return torch.sin(self.box(torch.sin(x)))


# Each block saves: sin, then in the box sin, then in the inner wave two, then in the box sin, then sin: six.
@pytest.mark.parametrize(
    ("layers", "keep", "units"),
    [
        ("blocks", (), 6),
        ("blocks", "*.inner", 4),
        ("blocks", ["*.inner", "*.box"], 2),
        ("*.box", (), 4),
        ("*.inner", "*.box", 2),
        ("*.inner", ["blocks.*", "*.box"], 2),
        ("*.box", ["*.inner", "blocks.*"], 2),
        (["blocks.*", "*.box", "*.inner"], (), 6),
        (["*.box", "*.inner"], "blocks.*", 4),
    ],
)
def test_the_outermost_group_and_the_innermost_kept_module(layers, keep, units):
    """Of four blocks, three are offloaded."""
    nbytes, late = bytes_of_a_step(Waves(4, Nested), layers=layers, keep=keep, num_layers=3)
    assert nbytes == 3 * units * UNIT
    assert late == 0


class Turn(nn.Module):
    def forward(self, x, angles):
        return (x * angles).sin()


class Turns(nn.Module):
    """Blocks that all save the same angles, as those of a transformer with rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Turn() for _ in range(6)])

    def forward(self, x):
        x = x * 1.0
        angles = x.detach().cos()
        for block in self.blocks:
            x = block(x, angles)
        return x


def test_what_more_than_two_groups_save_is_kept():
    """Backward needs it from the last of them to the first."""
    handle, statistics = agrees(Turns(), required, steps=1, layers="blocks")
    assert handle.plan.offloaded == (0, 1, 2, 3)
    # The first block cannot know that others save the angles as well, so they are copied, but not freed.
    assert statistics.bytes_offloaded == 5 * UNIT
    assert statistics.bytes_reloaded == 4 * UNIT
    assert statistics.bytes_kept[Reason.SHARED] == UNIT
    assert handle.report().r == 1.0
