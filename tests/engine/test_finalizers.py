"""Signal handlers that raise while finalizers run: the program gets each exception, and nothing is left behind."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
import torch
from helpers import forward, make, nothing_held
from torch import nn

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
