"""A recorded step of several forward passes: gradient accumulation."""

from __future__ import annotations

import time

import torch
from torch import nn
from whole_model import Wave, Waves, data, offload

import actoffload
from actoffload.device.reference import ReferenceEvent
from actoffload.engine.statistics import Counters, TimelineRecorder
from actoffload.model import reporting


class Caching(Wave):
    """A wave that keeps a tensor for itself."""

    def forward(self, x):
        h = x * self.scale
        self.cache = [h]
        return torch.sin(h)


def step(model: nn.Module, seed: int = 0) -> None:
    model(data(seed).requires_grad_()).sum().backward()


def test_the_searches_of_several_micro_batches_are_no_part_of_the_step(monkeypatch):
    search = reporting.find_all_holders
    monkeypatch.setattr(reporting, "find_all_holders", lambda *a: time.sleep(1.0) or search(*a))
    model = Waves(6, Caching)
    handle = offload(model, device=actoffload.device.ReferenceDevice(wall_clock=True))
    step(model)
    with handle.recording():
        for k in range(2):
            step(model, k)
    report = handle.report()
    assert 0 < report.step_seconds < 1.0
    assert report.step_passes == 2
    assert "Times are sums over the 2 forward passes" in str(report)


def test_gaps_that_overlap_are_taken_out_once():
    now = [0.0]

    class Clock(actoffload.device.ReferenceDevice):
        def record_timed(self, stream):
            return ReferenceEvent(now[0])

    recorder = TimelineRecorder(Clock(), Counters())
    first, second = recorder.apart(), recorder.apart()
    moments = [recorder.level, first.__enter__, second.__enter__]
    moments += [lambda: first.__exit__(None, None, None), lambda: second.__exit__(None, None, None)]
    for k, moment in enumerate([*moments, recorder.level, recorder.level]):
        now[0] = float(k)
        moment()
    assert [time for time, _ in recorder.timeline().resident] == [0.0, 2.0, 3.0]  # without 1 to 4
