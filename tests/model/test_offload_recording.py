"""A recorded step of a model under `offload`: who holds memory, the timeline, and what it costs when it is off."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from whole_model import ROWS, UNIT, Inside, Transformer, Wave, Waves, data, offload, reported, said, step

import actoffload
from actoffload.report import Holder, Reason
from actoffload.schedule import Kind

# Who holds it


class Caching(Wave):
    """A wave that keeps a tensor for itself."""

    caches = True

    def forward(self, x):
        h = x * self.scale
        if self.caches:
            self.cache = [h]
        return torch.sin(h)


def test_what_refers_to_memory_that_is_not_freed_is_named():
    model = Inside(6, Caching)
    handle, report = reported(model)
    assert (report.expected_bytes, report.dropped_bytes, report.r) == (8 * UNIT, 4 * UNIT, 0.5)
    assert [group.bytes_not_freed for group in report.groups] == [UNIT] * 4 + [0] * 2
    assert report.held == ()
    assert "50.0 % of the bytes of 4 groups (blocks.0 ... 3) (8.0 KiB of 16.0 KiB)" in said(report)
    assert "record a step with handle.recording()" in said(report)
    with handle.recording():
        step(model)
    report = handle.report()
    assert [(held.group, held.nbytes) for held in report.held] == [(f"blocks.{k}", UNIT) for k in range(4)]
    for k, held in enumerate(report.held):
        assert held.holders == (Holder("attribute", ("cache[0]",), f"blocks.{k} (Caching)"),)
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
    outputs = [Holder("output", (f"[1]['hidden'][{k}]",), "the model") for k in range(4)]
    given = Holder("input", ("args[0]",), "the model")
    assert [set(held.holders) for held in handle.report().held] == [{given, outputs[0]}, *({of} for of in outputs[1:])]
    advice = said(handle.report())
    assert "output `[1]['hidden'][1]` and 2 more of the model" in advice
    assert "return only what the loss needs" in advice
    model = Waves(6)
    handle = offload(model)
    with handle.recording():
        model(data()).sum().backward()
    assert [(held.group, held.holders) for held in handle.report().held] == [("blocks.0", (given,))]
    x = data()
    with handle.recording():
        model(x).sum().backward()
    ((holder,),) = [held.holders for held in handle.report().held]
    assert (holder.kind, holder.paths) == ("local variable", ("x",))


@pytest.mark.parametrize(("count", "said_so", "record"), [(4, True, False), (4, True, True), (12, False, False)])
def test_an_input_that_the_caller_holds_is_named_only_if_it_is_large(count, said_so, record):
    model, x = Waves(count), data()
    handle = offload(model)
    with handle.recording() if record else nullcontext():
        model(x).sum().backward()
    report = handle.report()
    ((held,),) = [report.held]
    assert (held.group, held.nbytes, held.is_input) == ("blocks.0", UNIT, True)
    name = "local variable `x`" if record else "the input of the model"
    assert name in str(held.holders[0])
    assert report.r < 1.0
    assert (name in said(report)) is said_so  # an eighth, or less than a twentieth of all
    assert said(report).startswith("Nothing to change") is not said_so


def test_an_input_that_the_model_keeps_is_named_as_that():
    class Keeping(Waves):
        def forward(self, x):
            self.seen = [x]
            return super().forward(x)

    model = Keeping(12)
    handle = offload(model)
    with handle.recording():
        model(data()).sum().backward()
    report = handle.report()
    assert [held.is_input for held in report.held] == [False]
    assert "attribute `seen[0]` of the model" in said(report)


def test_the_modules_that_save_outside_are_named():
    _, report = reported(Transformer(5), layers="*.attention", record=True)
    assert sum(report.outside_modules.values()) == report.outside[Reason.OUTSIDE][1]
    assert report.outside_modules["norm"] == UNIT + 2 * ROWS * 4
    assert report.outside_modules["blocks.*.norm1"] == 5 * report.outside_modules["norm"]
    assert "`blocks.*.norm1` (10.6 KiB), `blocks.*.norm2` (10.6 KiB) save the most" in said(report)


# Recording


class Counting(actoffload.device.ReferenceDevice):
    """A device that counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def record(self, stream):
        self.calls["record"] += 1
        return super().record(stream)

    def record_timed(self, stream):
        self.calls["record_timed"] += 1
        return super().record_timed(stream)

    def synchronize(self, device):
        self.calls["synchronize"] += 1


def test_without_a_recording_no_timed_event_is_made_and_nothing_is_looked_for(monkeypatch):
    from actoffload.report import build

    searches = []
    search = build.find_all_holders
    monkeypatch.setattr(build, "find_all_holders", lambda *a: searches.append(a) or search(*a))
    device = Counting()
    model = Inside(6, Caching)
    handle = offload(model, device=device)
    counts = []
    for _ in range(2):
        device.calls.clear()
        step(model)
        handle.report()
        counts.append(dict(device.calls))
    assert counts[0] == counts[1]
    assert set(counts[0]) == {"record"}
    assert not searches
    with handle.recording():
        device.calls.clear()
        step(model)
        assert device.calls["record_timed"] > 20
        assert device.calls["synchronize"] == 0, "nothing waits while a step is recorded"
    assert len(searches) == 1
    handle.report()
    device.calls.clear()
    step(model)
    assert dict(device.calls) == counts[0]
    assert len(searches) == 1


def test_a_recording_is_of_one_step_and_lasts():
    model = Inside(6)
    handle, report = reported(model, record=True)
    assert report.step_seconds is not None
    first = handle.timeline().timeline
    step(model)
    assert handle.timeline().timeline is first
    assert handle.report().step_seconds == report.step_seconds
    with pytest.warns(UserWarning, match="Nothing was recorded"), handle.recording():
        pass  # the earlier recording is kept
    assert handle.timeline().timeline is first
    with handle.recording():
        step(model)
    assert handle.timeline().timeline is not first


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
    assert handle.timeline().timeline.nbytes(Kind.D2H) == 16 * UNIT


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
    assert handle.timeline().timeline.nbytes(Kind.H2D) == 8 * UNIT


def test_the_timeline_has_names_and_everything_that_was_copied():
    model, device = Transformer(4), actoffload.device.ReferenceDevice(wall_clock=True)
    handle, report = reported(model, record=True, layers=["*.attention", "*.mlp"], device=device)
    timeline = handle.timeline()
    assert timeline.names == tuple(group.name for group in report.groups)
    spans = timeline.timeline
    for k, group in enumerate(report.groups):
        for kind in (Kind.D2H, Kind.H2D):
            assert sum(span.nbytes for span in spans.of(kind) if span.layer == k) == group.bytes_offloaded
        assert len([span for span in spans.of(Kind.FORWARD) if span.layer == k]) == 1
        assert len([span for span in spans.of(Kind.BACKWARD) if span.layer == k]) == 1
    assert spans.peak_bytes == handle.statistics().peak_resident_bytes
    assert "blocks.0.attention" in timeline.names


def test_a_step_that_finds_the_groups_is_recorded_with_the_names_of_all_that_was_followed():
    model = Transformer(4)
    handle = offload(model)
    with pytest.warns(UserWarning, match="The groups of the model were found in the recorded step"), handle.recording():
        step(model)
    blocks = tuple(f"blocks.{k}" for k in range(4))
    timeline, report = handle.timeline(), handle.report()
    assert handle.groups == tuple(group.name for group in report.groups) == blocks
    assert timeline.names == ("inp", *blocks, "norm", "head")
    assert {span.layer for span in timeline.timeline.spans} == set(range(7))
    assert report.step_seconds is None
    assert [group.forward_seconds for group in report.groups] == [None] * 4
    with handle.recording():
        step(model)
    assert handle.timeline().names == blocks
    assert all(group.forward_seconds is not None for group in handle.report().groups)


def test_micro_batches_of_a_step_that_finds_the_groups_have_no_names():
    """A layer of the timeline is another module in each of them."""
    model = Transformer(4)
    handle = offload(model)
    with pytest.warns(UserWarning, match="The groups of the model were found in the recorded step"), handle.recording():
        (model(data()) + model(data(1))).sum().backward()
    assert handle.timeline().names == ()
    assert handle.report().step_seconds is None
