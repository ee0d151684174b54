"""Invariant 9: two threads, with a context each and with one context for both; and signals that raise."""

import signal
import sys
import threading

import pytest
import torch
from helpers import forward, in_threads, make, nothing_held, plain, same_bits
from torch import nn

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def model(seed: int) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(5)])


@pytest.mark.parametrize("shared", [True, False])
def test_threads_train_side_by_side(shared, place):
    """On an accelerator each thread has a stream of its own."""
    contexts = [make(3, 5)] * 3 if shared else [make(3, 5) for _ in range(3)]
    models = [model(k).to(place) for k in range(3)]
    x = torch.randn(64, 64, device=place)
    steps = 15
    if place.type == "cuda":
        torch.cuda.synchronize()

    def job(k):
        def train():
            context, sync = contexts[k]
            for _ in range(steps):
                forward(list(models[k]), x, context, sync).square().sum().backward()

        def on_a_stream():
            with torch.cuda.stream(torch.cuda.Stream()):
                train()
                torch.cuda.current_stream().synchronize()

        return on_a_stream if place.type == "cuda" else train

    in_threads(*(job(k) for k in range(3)))
    for k in range(3):
        twin = model(k).to(place)
        for _ in range(steps):
            plain(list(twin), x).square().sum().backward()
        for a, b in zip(models[k].parameters(), twin.parameters(), strict=True):
            assert same_bits(a.grad, b.grad)
    for context, _ in contexts:
        nothing_held(context)
        statistics = context.statistics()
        assert statistics.passes == steps * (3 if shared else 1)
        assert statistics.bytes_reloaded > 0
        assert statistics.reloaded_on_demand == 0


# Signal handlers that raise while finalizers run


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
