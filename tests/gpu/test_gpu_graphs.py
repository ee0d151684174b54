"""CUDA graphs: forward and backward are captured together with the copies."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu_harness import (
    BLOCKS,
    NBYTES,
    WIDTH,
    Way,
    WholeStep,
    clean,
    collect,
    default_context,
    flash,
    gpu,
    loss,
    make,
    make_input,
    manual_context,
    offload,
    requested,
    step,
    whole,
)
from gpu_harness import ROWS as LARGE
from torch import Tensor, nn
from whole_model import equal

import actoffload
from actoffload.report import Reason
from actoffload.schedule import Action, Do, Event, Plan, When

pytestmark = gpu

ROWS = 2048
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def early_release() -> Plan:
    """Return a plan that releases in backward, as plans for a budget may."""
    calls = [(Event(When.FORWARD_END, k), Action(Do.OFFLOAD, k)) for k in range(5)]
    calls += [(Event(When.BACKWARD_START, 7), Action(Do.RELEASE, k)) for k in range(5)]
    calls += [(Event(When.BACKWARD_START, k + 1), Action(Do.RELOAD, k)) for k in range(5)]
    return Plan.of(8, calls, names=tuple(f"blocks.{k}" for k in range(8)), nbytes=(NBYTES,) * 8)


WAYS: dict[str, Way] = {
    "context": default_context,
    "manual": manual_context,
    "manual, one stream": lambda model: manual_context(model, stream=torch.cuda.Stream()),
    "whole model": whole(),
    "measured": whole(fraction=None),
    "released in backward": whole(fraction=None, plan=early_release()),
    "recomputed": whole(recompute=True, num_layers=4),
    "recomputed but products": whole(recompute=PRODUCTS, num_layers=4),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("mlp", way) for way in WAYS),
        *((k, w) for k in ("linear", "attention") for w in ("whole model", "recomputed")),
    ],
)
def test_a_whole_step_in_one_graph(kind: str, way: str) -> None:
    """Also with eager steps between replays."""
    model = make(kind)
    with flash() if kind == "attention" else nullcontext():
        want = [step(model, seed, ROWS) for seed in range(4)]
        run, handle = WAYS[way](model)
        graph = WholeStep(model, run, ROWS)
        for seed in range(12):
            equal(graph.replay(seed % 4), want[seed % 4])
            if seed >= 4:
                equal(step(model, seed % 4, ROWS, run), want[seed % 4])
    statistics = handle.statistics()
    assert statistics.bytes_offloaded > 0
    assert way == "measured" or statistics.bytes_reloaded == statistics.bytes_offloaded
    if "recomputed" in way:
        assert len(handle.plan.recomputed) == BLOCKS
        assert "Not recomputed" not in handle.plan.because


def test_eager_steps_during_a_replay_do_not_touch_its_host_memory() -> None:
    model = make()
    want = [step(model, seed, ROWS) for seed in range(7)]
    run, context = default_context(model)
    graph = WholeStep(model, run, ROWS)
    side = torch.cuda.Stream()
    for seed in range(6):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.launch(seed)
        result = step(model, seed + 1, ROWS, run)
        torch.cuda.synchronize()
        equal(graph.result(), want[seed])
        equal(result, want[seed + 1])
    statistics = context.statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0


def test_capture_without_a_warm_pool() -> None:
    model = make()
    want = [step(model, seed, ROWS) for seed in range(3)]
    run, context = default_context(model)
    with pytest.warns(actoffload.HostMemoryWarning, match="captured"):
        graph = WholeStep(model, run, ROWS, warm_up=model)
    for seed in range(3):
        equal(graph.replay(seed), want[seed])
    statistics = context.statistics()
    assert statistics.tensors_offloaded == 0
    assert statistics.tensors_kept[Reason.HOST_FULL] == 4
    equal(step(model, 1, ROWS, run), want[1])
    assert context.statistics().tensors_offloaded == 4


def test_a_graph_keeps_the_drop() -> None:
    plain = make()
    without = WholeStep(plain, plain, LARGE).peak
    model = make()
    offload(model, num_layers=6)
    # A capture allocates a few bytes of its own.
    assert abs(without - WholeStep(model, model, LARGE).peak - 6 * NBYTES) <= 512


class Around(nn.Module):
    """Runs a model on a copy of its input, as graphed callables pass the static one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.clone())


@pytest.mark.parametrize("around", [Around, lambda model: model], ids=["a module around it", "the model itself"])
@pytest.mark.parametrize("planned", [False, True])
def test_forward_and_backward_in_graphs_of_their_own(around: Any, planned: bool) -> None:
    """A copy must not be in flight where the capture of the forward ends."""
    model = make("mlp")
    want = [step(model, seed, ROWS) for seed in range(4)]
    handle = offload(model, **({"fraction": None, "plan": early_release()} if planned else {}))
    graphed = torch.cuda.make_graphed_callables(around(model), (make_input(model, 0, ROWS),))
    for seed in range(4):
        output = graphed(make_input(model, seed, ROWS))
        loss(output).backward()
        equal(collect(model, output), want[seed])
    assert handle.statistics().tensors_offloaded > 0


def test_removing_the_handle_frees_the_memory_of_a_graph() -> None:
    model = make()
    clean()
    before = requested("current")
    handle = offload(model)
    graph = WholeStep(model, model, ROWS)
    graph.replay(0)
    assert handle.statistics().host_bytes > 0
    torch.cuda.synchronize()
    del graph
    handle.remove()
    assert handle.statistics().host_bytes == 0
    clean()
    assert requested("current") - before < ROWS * WIDTH * 4  # less than one saved tensor
