"""Memory under `offload`: what is resident when, to the byte; what is shared; what is copied."""

from __future__ import annotations

import pytest
import torch
from helpers import nothing_held
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from virtual_time import agree, layer_of, links
from whole_model import ROWS, UNIT, WIDTH, Attention, Inside, Mlp, Wave, Waves, agrees, data, offload

from actoffload.device import ReferenceDevice
from actoffload.report import Reason
from actoffload.schedule import GroupSchedule, LayerCost, Link, Saved, simulate


class Timed(nn.Module):
    """A module that takes as long and saves as much as a cost says."""

    def __init__(self, cost: LayerCost, device: ReferenceDevice) -> None:
        super().__init__()
        self.cost, self.work = cost, layer_of(cost, device)

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x)


class Stack(nn.Module):
    """Timed modules of kinds a and b, in an order of their own."""

    def __init__(self, each: list[LayerCost], kinds: str, order: list[int], device: ReferenceDevice) -> None:
        super().__init__()
        self.a, self.b = nn.ModuleDict(), nn.ModuleDict()
        for k, (cost, kind) in enumerate(zip(each, kinds, strict=True)):
            getattr(self, kind)[str(k)] = Timed(cost, device)
        self.order = [(kinds[k], str(k)) for k in order]

    def forward(self, x: Tensor) -> Tensor:
        for kind, k in self.order:
            x = getattr(self, kind)[k](x)
        return x


def recorded(each: list[LayerCost], kinds: str, order: list[int], link: Link, **options):
    """Run three steps; return what happened in the last, which was recorded, and what `simulate` says of it."""
    device = ReferenceDevice(link.d2h, link.h2d, link.latency)
    model = Stack(each, kinds, order, device)
    layers = [name for name, modules in (("a.*", model.a), ("b.*", model.b)) if len(modules)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of too few groups
        handle = offload(model, device=device, layers=layers, min_bytes=1, **options)
        model(torch.zeros(1, requires_grad=True) * 1.0).backward()
    nothing_held(handle)
    handle.reset_statistics()
    model(torch.zeros(1, requires_grad=True) * 1.0).backward()
    unrecorded = handle.statistics().peak_resident_bytes
    handle.reset_statistics()
    began = device.main.now
    with handle.recording():
        model(torch.zeros(1, requires_grad=True) * 1.0).backward()
    want = simulate(handle.plan, [each[k] for k in order], link)
    assert unrecorded == want.peak_bytes, "recording changes nothing"
    return (handle.timeline().timeline, handle.statistics(), device.main.now - began), want, handle


@st.composite
def costs(draw) -> LayerCost:
    """Draw costs whose forward begins with some work: a wait that came first would be counted in it when measured."""
    count = draw(st.integers(0, 4))
    saved_at = sorted(draw(st.integers(1, 8)) / 8 for _ in range(count))
    needed_at = sorted((draw(st.integers(0, 8)) / 8 for _ in range(count)), reverse=True)
    sizes = [draw(st.integers(1, 24)) * 256 for _ in range(count)]
    saved = tuple(Saved(*each) for each in zip(sizes, saved_at, needed_at, strict=True))
    return LayerCost(draw(st.integers(1, 12)) / 4, draw(st.integers(0, 12)) / 4, saved)


@settings(max_examples=60)
@given(st.data(), links)
def test_any_groups_of_any_kinds_in_any_order(data, link):
    each = data.draw(st.lists(costs(), min_size=1, max_size=6))
    kinds = "".join(data.draw(st.lists(st.sampled_from("ab"), min_size=len(each), max_size=len(each))))
    order = data.draw(st.permutations(range(len(each))))
    largest = max(kinds.count(kind) for kind in kinds)
    number = data.draw(st.one_of(st.none(), st.integers(0, max(0, largest - 1))))
    inflight = data.draw(st.sampled_from([None, 1, 2]))
    fraction = data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    got, want, handle = recorded(each, kinds, order, link, num_layers=number, fraction=fraction, max_inflight=inflight)
    agree(got, want)
    assert handle.plan.steps == GroupSchedule(number, fraction, inflight).plan([kinds[k] for k in order]).steps


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


@pytest.mark.parametrize("number", [1, 3, 5, None])
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


class Shares(nn.Module):
    """Waves, and something beside them that saves a tensor too: `at` says before which block."""

    def __init__(self, at: int, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wave() for _ in range(count)])
        self.at = at

    def forward(self, x):
        x, total = x * 1.0, 0.0
        for k, block in enumerate(self.blocks):
            if k == self.at:
                total = torch.sin(x)  # saves x, which the block saves as well
            x = block(x)
        return x + total


@pytest.mark.parametrize("at", range(6))
def test_an_input_that_was_saved_outside_is_offloaded_with_its_group(at):
    """As checkpointing saves it, or whatever the model does with it beside the block."""
    handle, statistics = agrees(Shares(at), lambda model, x: model(x.requires_grad_()), steps=1)
    assert statistics.bytes_offloaded == 8 * UNIT
    assert statistics.reloaded_on_demand == 0
    # What is saved before the third block lies there until the first one leaves, when that block starts.
    assert statistics.peak_resident_bytes == (4 if at < 2 else 5) * UNIT
    # With a kept group it is kept as well, as something that was saved outside.
    assert statistics.bytes_kept.get(Reason.OUTSIDE, 0) == (0 if at < 4 else UNIT)
    assert Reason.SHARED not in statistics.bytes_kept
    assert handle.report().r == 1.0


def test_what_a_kept_module_saved_before_is_not_copied_in_vain():
    class Sine(nn.Module):
        def forward(self, x):
            return torch.sin(x)

    class Model(Waves):
        def __init__(self):
            super().__init__(6)
            self.sines = nn.ModuleList([Sine() for _ in range(6)])

        def forward(self, x):
            total = 0.0
            for block, sine in zip(self.blocks, self.sines, strict=True):
                total = total + sine(x)
                x = block(x)
            return x + total

    _, statistics = agrees(Model(), lambda m, x: m(x.requires_grad_() * 1.0), steps=1, layers="blocks", keep="sines.*")
    # The input of each block is kept by the sine that saved it before; the other storage of the block is offloaded.
    assert statistics.bytes_offloaded == 4 * UNIT
    assert statistics.bytes_kept[Reason.KEPT] == 6 * UNIT
    assert statistics.bytes_kept[Reason.SHARED] == 4 * UNIT


def test_what_is_saved_outside_while_a_group_has_it_is_kept_and_counted():
    """The group came first, so it is copied, but not freed, because something outside has saved it too."""

    class Model(Waves):
        def forward(self, x):
            total = 0.0
            for block in self.blocks:
                y = block(x)
                total = total + torch.sin(x)
                x = y
            return x + total

    model = Model(6)
    handle, statistics = agrees(model, lambda m, x: m(x.requires_grad_() * 1.0), steps=1)
    assert statistics.bytes_offloaded == 8 * UNIT
    assert statistics.bytes_reloaded == 4 * UNIT
    assert statistics.bytes_kept[Reason.SHARED] == 4 * UNIT
    report = handle.report()
    # Nothing of it should be freed: R counts what only offloaded groups have saved.
    assert (report.expected_bytes, report.r) == (4 * UNIT, 1.0)
    assert sum(group.kept.get(Reason.SHARED, (0, 0))[1] for group in report.groups) == 4 * UNIT


def test_a_storage_that_many_groups_save_is_counted_once():
    class Table(Waves):
        def __init__(self):
            super().__init__(6, lambda: Times())
            self.register_buffer("seed", torch.ones(ROWS, WIDTH))

        def forward(self, x):
            table = torch.cos(self.seed) * 1.0
            for block in self.blocks:
                x = block(x, table)
            return x

    class Times(Wave):
        def forward(self, x, table):
            return super().forward(x * table)

    _, statistics = agrees(Table(), lambda m, x: m(x.requires_grad_() * 1.0), steps=1)
    assert (statistics.tensors_kept[Reason.SHARED], statistics.bytes_kept[Reason.SHARED]) == (1, UNIT)


# What is copied


def test_what_is_kept_outside_counts_each_storage_once():
    """Query, key and value are three views of one storage; outside of every group they are kept."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = Attention(), Attention()
            self.mlps = nn.ModuleList([Mlp() for _ in range(4)])

        def forward(self, x):
            x = self.before(x)
            for mlp in self.mlps:
                x = x + mlp(x)
            return self.after(x)

    handle, statistics = agrees(Model(), lambda m, x: m(x.requires_grad_() * 1.0), steps=1, layers="mlps")
    attention = UNIT + 3 * UNIT + ROWS * ROWS * 4 + UNIT
    assert statistics.bytes_kept[Reason.OUTSIDE] == 2 * attention
    assert handle.report().outside[Reason.OUTSIDE][1] == 2 * attention
