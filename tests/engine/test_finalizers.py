"""Signal handlers that raise while finalizers run: the program gets each exception, and nothing is left behind."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
import torch
from helpers import forward, make, make_manual, no_gc, nothing_held
from torch import nn

from actoffload.engine.storage import InFlight

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class RaisedError(Exception):
    """What the handler raises."""


@pytest.fixture
def handler():
    """Let SIGUSR1 raise, and count how often."""
    calls = []

    def raises(number, frame):
        calls.append(number)
        raise RaisedError(len(calls))

    before = signal.signal(signal.SIGUSR1, raises)
    yield calls
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def swallowed(monkeypatch):
    """What Python dropped because it was raised in a finalizer."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(unraisable.exc_type))
    return found


def layers(count: int = 5) -> nn.ModuleList:
    torch.manual_seed(5)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(count)])


def test_a_signal_that_arrives_while_autograd_computes(handler, swallowed):
    """The signal is pending while autograd drops what it used, and the handler runs in ordinary code."""
    context, sync = make(3, 5)
    model = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Tanh()) for _ in range(5)])
    x = torch.randn(512, 256)
    signals, got = 40, 0
    for k in range(signals):
        loss = forward(list(model), x, context, sync).square().sum()
        # From another thread, while no Python code runs in this one.
        send = signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)
        timer = threading.Timer(0.0004 * k, *send)
        try:
            timer.start()
            loss.backward()
            timer.join(60)
        except RaisedError:
            got += 1
        timer.join(60)
        assert not timer.is_alive()
    assert got == len(handler) == signals
    assert not swallowed
    loss = None
    nothing_held(context)


def test_an_exception_in_each_line_of_a_finalizer(handler, swallowed):
    """A storage is dropped while its copy is under way; the finalizer ends and the exception comes later."""
    finalizer = InFlight._end_transfers.__code__
    lines = {line for _, _, line in finalizer.co_lines() if line is not None}
    reached = 0
    for wanted in sorted(lines):
        context, sync, controller = make_manual(3)
        raised = []
        y = forward(list(layers(3)), torch.randn(64, 64), context, sync)
        controller.start_offload_layer(0)

        def trace(frame, event, argument, raised=raised, wanted=wanted):
            if frame.f_code is finalizer and frame.f_lineno == wanted and not raised:
                raised.append(())
                signal.raise_signal(signal.SIGUSR1)
            return trace if frame.f_code is finalizer else None

        with no_gc():
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                del y
            finally:
                sys.settrace(before)
        if raised:
            reached += 1
            with pytest.raises(RaisedError):
                context.statistics()
            raised.clear()
        assert not raised
        assert not swallowed
        nothing_held(context)
    assert reached >= 5
