"""No bit changes on the adversarial device: the measured default in every stage, and random models."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from adversary.device import AdversarialDevice
from adversary.harness import check, execute, scaled_down, trial
from adversary.programs import Program, programs_of_models
from helpers import no_gc, nothing_held
from hypothesis import given, settings
from plan_calls import copied
from timed_device import Timed
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_model import UNIT, Block, Transformer, Wave, Waves, data, equal, measured, nothing_installed, offload, train

import actoffload
from actoffload.schedule.plan import Plan
from actoffload.tune import findings


@pytest.fixture(scope="module", autouse=True)
def _scaled_down() -> Iterator[None]:
    with scaled_down():
        yield


# The stages of the first steps


class Timely(AdversarialDevice):
    """An adversary on which every pass takes as long as another."""

    times = True

    def __init__(self, seed: int, order: Any, memory: int | None) -> None:
        super().__init__(seed, order)
        self.memory = memory

    def host_time(self) -> float:
        return 0.0

    def record_timed(self, stream: Any) -> Any:
        self.time = getattr(self, "time", 0) + 1
        return self.time

    def elapsed(self, start: int, end: int) -> float:
        return 1e-3 * (end - start)

    def allocated(self) -> tuple[int, int] | None:
        return 0, 0

    def memory_limit(self) -> int | None:
        return self.memory

    def synchronize(self, device: torch.device) -> None:
        """Between passes the host may wait."""
        self._settle()


NESTED = ["blocks.*", "*.attention", "*.mlp", "*.block"]
MODELS = {
    "waves": lambda: Waves(6),
    "transformer": lambda: Transformer(6),
    "checkpoint": lambda: Transformer(6, lambda: Checkpointed(use_reentrant=False)),
    "reentrant": lambda: Transformer(6, lambda: Checkpointed(use_reentrant=True)),
    "on the host": lambda: Transformer(6, OnHost),
    "half on the host": lambda: Transformer(6, HalfOnHost),
}


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = Block(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class OnHost(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class HalfOnHost(Block):
    """Its attention is a nested group under hooks of the program, its multilayer perceptron is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "layers", "order", "memory"),
    [
        ("waves", None, "late", 2**14),
        ("transformer", None, "late", 2**14),
        ("transformer", NESTED, "random", 2**14),
        ("checkpoint", "blocks", "early", None),
        ("checkpoint", NESTED, "random", 2**14),
        ("reentrant", None, "late", 2**14),
        ("on the host", "blocks", "early", None),
        ("half on the host", None, "late", 2**14),
        ("half on the host", NESTED, "random", 2**14),
    ],
)
def test_values_in_each_stage(name, layers, order, memory, monkeypatch):
    monkeypatch.setattr(findings, "HOST_SECONDS", 0.0)
    torch.manual_seed(0)
    model = MODELS[name]()
    if isinstance(layers, list):
        there = [name for name, _ in model.named_modules()]
        layers = [glob for glob in layers if any(fnmatch(path, glob) for path in there)]
    want = train(copy.deepcopy(model), steps=12)
    device = Timely(0, order, memory)
    # On the CPU save_on_cpu holds the tensors themselves; in a graph that is only recomputed that makes a cycle.
    recompute = False if "host" in name else "auto"
    handle = offload(model, device=device, layers=layers, recompute=recompute)
    with no_gc():
        equal(train(model, steps=12), want)
        check(device, handle)
    assert not handle.settling
    nothing_installed()


# Hooks where only groups are followed


@pytest.fixture
def scoped() -> Iterator[tuple[nn.Module, actoffload.OffloadHandle]]:
    """A model with six blocks in whose first four saved-tensor hooks are installed, and nowhere else."""
    model = Waves(6)
    handle = offload(model)
    plan = Plan.of(6, copied({k: (k + 1, k + 1) for k in range(4)}), names=handle.groups, nbytes=(0,) * 6)
    handle.remove()
    handle = offload(model, plan=plan)
    train(model, steps=1)
    yield model, handle
    nothing_held(handle)
    nothing_installed()


def test_in_place_edits_are_caught(scoped):
    model, _ = scoped
    for k in range(6):
        kept: list[torch.Tensor] = []
        hook = model.blocks[k].register_forward_hook(lambda module, args, y, kept=kept: kept.append(args[0]))
        x = data().requires_grad_() * 1.0
        y = model(x)
        with torch.no_grad():
            kept[0].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        hook.remove()
        kept.clear()
        del x, y
        model.zero_grad(set_to_none=True)


def test_hooks_of_the_program_around_and_inside_of_groups(scoped):
    model, handle = scoped
    want = train(copy.deepcopy(model), steps=1)
    handle.reset_statistics()
    with torch.autograd.graph.save_on_cpu(), pytest.warns(UserWarning, match="under other saved-tensor hooks"):
        equal(train(model, steps=1), want)
    assert handle.statistics().bytes_offloaded == 0
    forward = Wave.forward

    def on_host(self: Wave, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wave, "forward", on_host)
        equal(train(model, steps=1), want)
    assert handle.statistics().bytes_offloaded == 0
    equal(train(model, steps=1), want)
    assert handle.statistics().bytes_offloaded == 8 * UNIT


@pytest.mark.parametrize("where", range(6))
def test_a_group_that_raises_leaves_no_hooks(scoped, where):
    model, handle = scoped
    want = train(copy.deepcopy(model), steps=1)
    hook = model.blocks[where].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(data())
    nothing_installed()
    hook.remove()
    assert measured(handle, lambda: equal(train(model, steps=1), want)).bytes_offloaded == 8 * UNIT


class Stage(Block):
    """A block in which there are others, which are groups no more once the first forward has shown what saves most."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = x + 1e-3 * block(x[:1])
        for _ in range(12):
            x = torch.sin(x)
        return super().forward(x)


def test_groups_are_replayed_once_no_other_groups_are_inside_of_them():
    model = Transformer(4, Stage)
    want = train(model)
    with offload(model, device=Timed(1e7, 1e7, memory=2**20), recompute=True) as handle:
        equal(train(model), want)
        report = handle.report()
    assert {group.name for group in report.groups} == {f"blocks.{k}" for k in range(4)}
    assert all(group.recomputed for group in report.groups)
    assert "Not recomputed" not in report.because


# Random models


SEEDS = 4  # with the last one, steps are recorded
# The source and signature of `orders_of` are the seed of what is drawn: if it changes, these few may lack a reason.


@pytest.mark.parametrize(
    ("streams", "recompute", "examples"),
    [(False, False, 8), (True, False, 12), (False, True, 10), (True, True, 8)],
    ids=["one stream", "side streams", "recomputed", "recomputed with side streams"],
)
def test_random_models_in_random_orders(streams, recompute, examples):
    seen: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(programs_of_models(streams=streams, recompute=recompute))
    def orders_of(program: Program) -> None:
        expected, _ = execute(program, None)
        for seed in range(SEEDS):
            _, statistics = trial(program, expected, seed)
            seen["offloaded"] += statistics.tensors_offloaded
            seen["ahead"] += statistics.reloaded_ahead
            for reason, count in statistics.tensors_kept.items():
                seen[reason.name] += count
        for mode in ("late", "early"):
            trial(program, expected, 0, mode)

    orders_of()
    # The drawn programs cover every reason.
    for what in ("offloaded", "ahead", "KEPT", "OUTSIDE", "SHARED", "HOST_FULL", "MARKED", "SMALL"):
        assert seen[what] > 0, what
