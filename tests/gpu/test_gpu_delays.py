"""Random delays on every stream change no bit of the gradients; with one wait removed they do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_harness import (
    Delayed,
    Slow,
    collect,
    forward,
    lenient,
    loss,
    make_input,
    make_layers,
    manual_forward,
    needs_cuda,
    no_offload,
    offload,
    step,
)
from torch import nn

import actoffload
from actoffload.device import use
from actoffload.engine.transfer import Transfers

pytestmark = [pytest.mark.gpu, *lenient]

ORDERS = 60 if torch.cuda.is_available() else 10
LAYERS = 8
LONGEST = 2_000_000  # clock cycles, about 1 ms; a copy of 4 MiB takes about 0.1 ms


def one_pass(layers: nn.ModuleList, seed: int, pair: Any) -> Any:
    return step(layers, seed, pair)


def three_passes(layers: nn.ModuleList, seed: int, pair: Any) -> Any:
    """Run three forwards, then their backwards in a random order, one of them twice on a retained graph."""
    outputs = [forward(layers, make_input(layers, 3 * seed + k), pair) for k in range(3)]
    losses = [loss(output) for output in outputs]
    order = random.Random(seed).sample(range(3), 3)
    losses[order[0]].backward(retain_graph=True)
    for k in order:
        losses[k].backward()
    return collect(layers, torch.stack(outputs))


@pytest.fixture
def delayed() -> Iterator[Callable[..., Delayed]]:
    made: list[Any] = []

    def make(**longest: int) -> Delayed:
        device = Delayed(**longest)
        made.append(use(device))
        made[-1].__enter__()
        return device

    yield make
    for chosen in reversed(made):
        chosen.__exit__(None, None, None)


@pytest.mark.parametrize("lanes", [("d2h", "h2d", "compute"), ("d2h",), ("h2d",), ("compute",)])
@pytest.mark.parametrize("run", [one_pass, three_passes])
def test_default_schedule_under_delays(
    run: Callable[..., Any], lanes: tuple[str, ...], delayed: Callable[..., Delayed]
) -> None:
    device = delayed(**dict.fromkeys(lanes, LONGEST // len(lanes)))
    plain = make_layers("mlp", LAYERS)
    compute = random.Random(1)
    slow = nn.ModuleList([Slow(layer, compute, LONGEST // 4) for layer in plain])
    pair = offload(5, LAYERS)
    for seed in range(ORDERS // 4 if run is one_pass else ORDERS // 10):
        device.random.seed(seed)
        compute.seed(seed)
        expected = run(plain, seed, no_offload())
        assert run(slow, seed, pair).differences(expected) == []
    assert device.delays > 0


@pytest.mark.parametrize("own_stream", [True, False])
def test_manual_synchronization_under_delays(own_stream: bool, delayed: Callable[..., Delayed]) -> None:
    device = delayed(d2h=LONGEST, h2d=LONGEST, compute=LONGEST)
    layers = make_layers("mlp", LAYERS)
    stream = torch.cuda.Stream() if own_stream and torch.cuda.is_available() else None
    trio = actoffload.get_cpu_offload_context(
        enabled=True, model_layers=LAYERS, manual_synchronization=True, offload_stream=stream
    )
    for seed in range(ORDERS // 4):
        device.random.seed(seed)
        expected = step(layers, seed, no_offload())
        output = manual_forward(layers, make_input(layers, seed), trio, offloaded=4)
        loss(output).backward()
        assert collect(layers, output).differences(expected) == []
    assert device.delays > 0
    statistics = trio[0].statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0


def _nothing(self: Transfers, *args: Any) -> None:
    pass


def _not_ready(self: Transfers, pairs: Any, *rest: Any) -> None:
    """Replacement of `Transfers.to_host` that does not wait for the tensor to be written."""
    self.backend.to_host(pairs, self.out)


@needs_cuda
@pytest.mark.parametrize(
    ("name", "broken", "longest"),
    [
        ("use", _nothing, {"h2d": 40_000_000}),
        ("join", _nothing, {"d2h": 40_000_000}),
        ("to_host", _not_ready, {}),
        ("begin_reload", _nothing, {}),
    ],
)
def test_a_removed_wait_changes_gradients(
    name: str,
    broken: Any,
    longest: dict[str, int],
    delayed: Callable[..., Delayed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one wait removed and a delay at the right place, gradients do change: the tests above can fail."""
    delayed(**longest)
    plain = make_layers("mlp", LAYERS)
    # Slow compute reveals copies that do not wait for it.
    slow = nn.ModuleList([Slow(layer, random.Random(1), 1 if longest else 20_000_000) for layer in plain])
    pair = offload(5, LAYERS)
    expected = [step(plain, seed, no_offload()) for seed in range(4)]
    assert step(slow, 0, pair).differences(expected[0]) == []
    torch.cuda.synchronize()
    monkeypatch.setattr(Transfers, name, broken)
    wrong = [step(slow, seed, pair).differences(expected[seed]) for seed in range(1, 4)]
    torch.cuda.synchronize()
    monkeypatch.undo()
    assert any(wrong)
    assert step(slow, 0, pair).differences(expected[0]) == []
