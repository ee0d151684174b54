"""`handle.report()`, `handle.timeline()` and `handle.recording()` end to end: against counts by hand and statistics."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from helpers import no_gc
from torch import nn
from whole_model import (
    UNIT,
    WIDTH,
    Caching,
    Inside,
    Transformer,
    Wave,
    Waves,
    agrees,
    data,
    offload,
    reported,
    said,
    step,
)

import actoffload
from actoffload.report import Holder, Reason
from actoffload.schedule import Action, Do, Event, Kind, Plan, When

# Numbers


@pytest.mark.parametrize("record", [False, True])
def test_bytes_by_group_agree_with_counts_by_hand_and_with_statistics(record):
    handle, report = reported(Inside(6), record=record)
    assert [group.name for group in report.groups] == [f"blocks.{k}" for k in range(6)]
    for k, group in enumerate(report.groups):
        assert (group.kind, group.calls, group.offloaded) == ("layer", 1, k < 4)
        assert group.bytes_saved == 2 * UNIT
        assert group.bytes_offloaded == (2 * UNIT if k < 4 else 0)
        assert (group.reloaded_ahead, group.reloaded_on_demand) == ((2, 0) if k < 4 else (0, 0))
        assert group.bytes_reloaded == (2 * UNIT if k < 4 else 0)
        assert group.bytes_not_freed == 0
        # The scale of each block; the input of the model asks for a gradient, so the first saves it as well.
        assert group.kept == {Reason.PARAMETER: (1, WIDTH * 4)}
    statistics, totals = handle.statistics(), report.totals
    assert totals.bytes_saved == statistics.bytes_saved == 12 * UNIT
    assert totals.bytes_offloaded == statistics.bytes_offloaded == 8 * UNIT
    assert totals.bytes_reloaded == statistics.bytes_reloaded == 8 * UNIT
    assert (totals.reloaded_ahead, totals.reloaded_on_demand) == (8, 0)
    assert report.peak_resident_bytes == statistics.peak_resident_bytes == 4 * UNIT
    assert report.host_bytes_high_water == statistics.host_bytes_high_water
    assert {reason: entry[0] for reason, entry in report.kept.items()} == statistics.tensors_kept
    assert {reason: entry[1] for reason, entry in report.kept.items()} == statistics.bytes_kept
    assert (report.r, report.expected_bytes, report.dropped_bytes) == (1.0, 8 * UNIT, 8 * UNIT)
    assert report.passes == 1


class Tanh(nn.Module):
    """Saves its input and its output, which is the input of the next."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(x * self.scale)


def test_a_storage_that_two_groups_save_counts_in_the_first():
    handle, report = reported(Inside(6, Tanh))
    assert [group.bytes_saved // UNIT for group in report.groups] == [2, 1, 1, 1, 1, 1]
    assert report.totals.bytes_saved == handle.statistics().bytes_saved == 7 * UNIT
    assert report.totals.bytes_offloaded == handle.statistics().bytes_offloaded == 5 * UNIT
    assert report.totals.bytes_reloaded == handle.statistics().bytes_reloaded == 4 * UNIT
    # The output of block 3 is saved by block 4 as well, which is kept.
    assert [group.kept.get(Reason.SHARED) for group in report.groups] == [None, None, None, (1, UNIT), None, None]
    assert (report.expected_bytes, report.r) == (4 * UNIT, 1.0)
    totals = report.totals
    assert totals.bytes_offloaded - UNIT == totals.bytes_reloaded == report.expected_bytes, "its copy was wasted"


def test_a_layer_that_is_called_often_is_one_line():
    class Albert(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Wave()

        def forward(self, x):
            x = x * 1.0
            for _ in range(6):
                x = self.layer(x)
            return x

    handle, report = reported(Albert(), layers="layer", record=True)
    (group,) = report.groups
    assert (group.calls, group.calls_offloaded, group.bytes_saved) == (6, 4, 12 * UNIT)
    # Each call counts, as in the handle and in the plan.
    assert "4 of 6 groups" in str(handle)
    assert "    offloaded  layer\n    kept       layer\n" in str(handle)
    assert str(report).count(" 4 of 6 ") == 2, "of the group, and in total"
    assert (group.bytes_offloaded, group.bytes_reloaded, group.bytes_not_freed) == (8 * UNIT, 8 * UNIT, 0)
    assert report.r == 1.0


def test_what_a_kept_group_saved_before_is_not_copied_in_vain():
    """The output of each block is saved by it and, as an input, by the next one, of which the plan offloads two."""
    steps = {
        Event(When.FORWARD_START, 0): (Action(Do.OFFLOAD, 0),),
        Event(When.FORWARD_START, 2): (Action(Do.RELEASE, 0), Action(Do.OFFLOAD, 2)),
        Event(When.FORWARD_START, 4): (Action(Do.RELEASE, 2),),
        Event(When.BACKWARD_START, 3): (Action(Do.RELOAD, 2),),
        Event(When.BACKWARD_START, 1): (Action(Do.RELOAD, 0),),
    }
    plan = Plan(6, steps, names=tuple(f"blocks.{k}" for k in range(6)))
    handle, statistics = agrees(Inside(6, Tanh), lambda model, x: model(x.requires_grad_()), steps=1, plan=plan)
    # The input and the output of the first block, and the output of the third, whose input the second one keeps.
    assert statistics.bytes_offloaded == 3 * UNIT
    assert statistics.bytes_kept[Reason.SHARED] == 3 * UNIT
    assert [group.kept.get(Reason.SHARED) for group in handle.report().groups][:3] == [(1, UNIT), None, (2, 2 * UNIT)]


def test_what_the_host_had_no_room_for_is_a_reason(monkeypatch):
    monkeypatch.setattr(actoffload.engine.host_pool, "GRANULE", UNIT)
    with pytest.warns(actoffload.HostMemoryWarning):
        handle, report = reported(Inside(6), max_host_bytes=4 * UNIT)
    missing = handle.statistics().bytes_kept[Reason.HOST_FULL]
    assert missing == report.kept[Reason.HOST_FULL][1] == 8 * UNIT - report.totals.bytes_offloaded > 0
    assert report.r == report.totals.bytes_offloaded / (8 * UNIT)
    assert f"raise max_host_bytes, if it is set, to at least {4 * UNIT + 2**21} " in said(report)
    with pytest.warns(actoffload.HostMemoryWarning):
        _, report = reported(Inside(6, Tanh), max_host_bytes=2 * UNIT)
    assert report.kept[Reason.SHARED] == (1, UNIT)
    assert report.totals.bytes_offloaded > 0


# When


def test_before_anything_has_run():
    model = Waves(6)
    handle = offload(model)
    with pytest.raises(RuntimeError, match="nothing to report yet"):
        handle.report()
    with pytest.raises(RuntimeError, match="No step was recorded"):
        handle.timeline()
    with torch.no_grad():
        model(data())
    with pytest.raises(RuntimeError, match=r"nothing to report yet: .*; under torch\.no_grad nothing is saved\."):
        handle.report()
    with pytest.warns(UserWarning, match="save_on_cpu"), torch.autograd.graph.save_on_cpu():
        model(data()).sum().backward()
    with pytest.raises(RuntimeError, match=r"nothing to report yet: .* Nothing is offloaded in a forward under other"):
        handle.report()


def test_a_report_keeps_no_memory_and_no_graph():
    model = Inside(6)
    handle = offload(model)
    with no_gc():
        with handle.recording():
            y = model(data().requires_grad_())
        report, timeline = handle.report(), handle.timeline()
        del y
        assert handle.statistics().resident_bytes == 0
        assert handle.statistics().host_bytes_used == 0
        assert report.totals.bytes_offloaded == 8 * UNIT
        assert timeline.nbytes(Kind.D2H) == 8 * UNIT


# Who holds it


def test_what_refers_to_memory_that_is_not_freed_is_named():
    model = Inside(6, Caching)
    handle, report = reported(model)
    assert (report.expected_bytes, report.dropped_bytes, report.r) == (8 * UNIT, 4 * UNIT, 0.5)
    assert [group.bytes_not_freed for group in report.groups] == [UNIT] * 4 + [0] * 2
    assert {held.holders for held in report.held} == {None}
    assert "50.0 % of the bytes of 4 groups (blocks.0 ... 3) (8.0 KiB of 16.0 KiB)" in said(report)
    assert "record a step in handle.recording()" in said(report)
    with handle.recording():
        step(model)
    report = handle.report()
    assert [(held.group, held.nbytes) for held in report.held] == [(f"blocks.{k}", UNIT) for k in range(4)]
    for k, held in enumerate(report.held):
        assert held.holders == (Holder("attribute", "cache[0]", f"blocks.{k} (Caching)"),)
    assert "because of attribute `cache[0]` of blocks.0 (Caching)" in said(report)
    step(model)  # the names stay right as long as the same is held
    assert [held.holders for held in handle.report().held] == [held.holders for held in report.held]
    for block in model.blocks:
        block.caches = False
        del block.cache
    step(model)
    assert handle.report().held == ()
    assert handle.report().r == 1.0


def test_what_only_passes_through_the_call_of_the_model_is_named_as_that():
    class Returning(Waves):
        def forward(self, x):
            found = []
            for block in self.blocks:
                found.append(x)
                x = block(x)
            return x, {"hidden": found}

    model = Returning(6)
    handle = offload(model)
    with handle.recording():
        model(data())[0].sum().backward()
    assert [held.group for held in handle.report().held] == [f"blocks.{k}" for k in range(4)]
    outputs = [Holder("output", f"[1]['hidden'][{k}]", "the model") for k in range(4)]
    given = Holder("input", "args[0]", "the model")
    assert [set(held.holders) for held in handle.report().held] == [{given, outputs[0]}, *({of} for of in outputs[1:])]
    advice = said(handle.report())
    assert "output `[1]['hidden'][1]` of the model" in advice
    assert "return only what the loss needs" in advice
    model = Waves(6)
    handle = offload(model)
    with handle.recording():
        model(data()).sum().backward()
    assert [(held.group, held.holders) for held in handle.report().held] == [("blocks.0", (given,))]


@pytest.mark.parametrize(("count", "said_so", "record"), [(4, True, False), (4, True, True), (12, False, False)])
def test_an_input_that_the_caller_holds_is_named_only_if_it_is_large(count, said_so, record):
    model, x = Waves(count), data()
    handle = offload(model)
    with handle.recording() if record else nullcontext():
        model(x).sum().backward()
    report = handle.report()
    (held,) = report.held
    assert (held.group, held.nbytes) == ("blocks.0", UNIT)
    name = "local variable `x`" if record else "the input of the model"
    assert name in str(held.holders[0])
    assert report.r < 1.0
    assert (name in said(report)) is said_so  # an eighth, or less than a twentieth of all
    assert said(report).startswith("Nothing to change") is not said_so


# Recording


def test_without_a_recording_no_timed_event_is_made_and_nothing_is_looked_for(monkeypatch):
    from actoffload.report import build

    searches = []
    search = build.find_all_holders
    monkeypatch.setattr(build, "find_all_holders", lambda *a: searches.append(a) or search(*a))
    device, calls = actoffload.device.ReferenceDevice(), Counter[str]()
    for name in ("record", "record_timed", "synchronize"):
        call = getattr(device, name)
        monkeypatch.setattr(device, name, lambda *a, name=name, call=call: (calls.update([name]), call(*a))[1])
    model = Inside(6, Caching)
    handle = offload(model, device=device)
    counts = []
    for _ in range(2):
        calls.clear()
        step(model)
        handle.report()
        counts.append(dict(calls))
    assert counts[0] == counts[1]
    assert set(counts[0]) == {"record"}
    assert not searches
    with handle.recording():
        calls.clear()
        step(model)
        assert calls["record_timed"] > 20
        assert calls["synchronize"] == 0, "nothing waits while a step is recorded"
    assert len(searches) == 1
    handle.report()
    calls.clear()
    step(model)
    assert dict(calls) == counts[0]
    assert len(searches) == 1


def test_a_recording_is_of_one_step_and_lasts():
    model = Inside(6)
    handle, report = reported(model, record=True)
    assert report.step_seconds is not None
    first = handle.timeline()
    step(model)
    assert handle.timeline() is first
    assert handle.report().step_seconds == report.step_seconds
    with pytest.warns(UserWarning, match="Nothing was recorded"), handle.recording():
        pass  # the earlier recording is kept
    assert handle.timeline() is first
    with handle.recording():
        step(model)
    assert handle.timeline() is not first


def test_asked_for_too_early_or_twice():
    model = Inside(6)
    handle = offload(model)
    with handle.recording():
        step(model)
        with pytest.raises(RuntimeError, match="after the block"):
            handle.timeline()
        assert handle.report().step_seconds is None
        with pytest.raises(RuntimeError, match="A step is being recorded already"), handle.recording():
            pass
        step(model)
    # What was asked for too early did not cut the recording short.
    assert handle.timeline().nbytes(Kind.D2H) == 16 * UNIT


def test_a_recording_that_an_exception_ends():
    model = Inside(6)
    handle = offload(model)
    with pytest.raises(KeyError), handle.recording():
        raise KeyError
    with pytest.raises(RuntimeError, match="No step was recorded"):
        handle.timeline()
    step(model)
    with handle.recording():
        step(model)
    assert handle.timeline().nbytes(Kind.H2D) == 8 * UNIT


def test_the_timeline_has_everything_that_was_copied():
    model, device = Transformer(4), actoffload.device.ReferenceDevice(wall_clock=True)
    handle, report = reported(model, record=True, layers=["*.attention", "*.mlp"], device=device)
    spans = handle.timeline()
    for k, group in enumerate(report.groups):
        for kind in (Kind.D2H, Kind.H2D):
            assert sum(span.nbytes for span in spans.of(kind) if span.layer == k) == group.bytes_offloaded
        assert len([span for span in spans.of(Kind.FORWARD) if span.layer == k]) == 1
        assert len([span for span in spans.of(Kind.BACKWARD) if span.layer == k]) == 1
    assert spans.peak_bytes == handle.statistics().peak_resident_bytes
