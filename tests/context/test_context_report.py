"""The report of a context, layer by layer."""

import warnings

import pytest
import torch
from helpers import forward, make, make_manual
from torch import nn
from virtual_time import run

from actoffload.context import OffloadContext
from actoffload.device import ReferenceDevice
from actoffload.engine.engine import Engine
from actoffload.report import Reason
from actoffload.schedule import DefaultSchedule, LayerCost

pytestmark = pytest.mark.usefixtures("offload_small_tensors")
UNIT = 64 * 64 * 4


@pytest.fixture
def layers() -> nn.ModuleList:
    torch.manual_seed(5)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])


def data() -> torch.Tensor:
    return torch.randn(64, 64) * 1.0


def step(layers, context, sync, count: int = 1) -> None:
    sum(forward(list(layers), data(), context, sync).sum() for _ in range(count)).backward()


def test_a_report_by_layer_agrees_with_the_statistics(layers):
    context, sync = make(3, 6)
    with pytest.raises(RuntimeError, match="nothing to report yet: no backward has begun"):
        context.report()
    x = forward(list(layers), data(), context, sync)
    x.sum().backward()
    report, statistics = context.report(), context.statistics()
    assert [group.name for group in report.groups] == [f"layer {k}" for k in range(6)]
    assert [group.offloaded for group in report.groups] == [True] * 3 + [False] * 3
    # The input of the first layer, and what each layer returns, which the next one saves too.
    assert [group.bytes_saved for group in report.groups] == [2 * UNIT] + [UNIT] * 5
    assert report.totals.bytes_saved == statistics.bytes_saved
    assert report.totals.bytes_offloaded == statistics.bytes_offloaded == 4 * UNIT
    assert report.totals.bytes_reloaded == statistics.bytes_reloaded == 3 * UNIT
    assert report.totals.kept[Reason.SHARED] == (1, UNIT)
    assert (report.expected_bytes, report.dropped_bytes, report.r) == (3 * UNIT, 3 * UNIT, 1.0)
    assert (report.passes, report.coverage) == (1, None)
    assert "layer 0" in str(report)


def test_a_recorded_step_has_times_and_holders(layers):
    cost, device = LayerCost.even(1024, forward=1.0, backward=2.0), ReferenceDevice()
    context = OffloadContext(Engine(DefaultSchedule(2, 4).plan(), device))
    run(context, context.synchronize, device, [cost] * 4)
    report = context.report()
    assert [group.forward_seconds for group in report.groups] == [1.0] * 4
    assert [group.backward_seconds for group in report.groups] == [2.0] * 4
    assert (report.step_seconds, report.step_passes, report.times) == (12.0, 1, False)
    context, sync = make(3, 6)
    layers[1].register_forward_hook(lambda module, args, output: setattr(module, "cache", args))
    step(layers, context, sync)
    assert [held.holders for held in context.report().held] == [None]
    assert "context.record_timeline() to find it" in " ".join(context.report().advice)
    with context.record_timeline():
        step(layers, context, sync)
    (held,) = context.report().held
    assert (held.group, held.nbytes) == ("layer 0", UNIT)  # whose output is the input of layer 1
    assert ["cache[0]" in holder.path for holder in held.holders] == [True]


def test_with_manual_synchronization_the_report_has_what_was_called_for(layers):
    context, sync, controller = make_manual(6)
    x = forward(list(layers), data(), context, sync)
    controller.start_offload_layer(1)
    controller.release_activation_forward_gpu_memory(1)
    x.sum().backward()
    report = context.report()
    assert [group.offloaded for group in report.groups] == [False, True, False, False, False, False]
    assert report.totals.bytes_offloaded == context.statistics().bytes_offloaded > 0
    assert "nothing is planned" in str(report)


def test_an_exception_ends_the_pass(layers):
    context, sync = make(3, 6)
    held = []

    def fail(layer):
        held.append(layer(data()))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), context:
        fail(layers[0])
    step(layers, context, sync)
    assert context.statistics().passes == 2


# A model_layers that does not match


@pytest.mark.parametrize(("declared", "ran"), [(8, 6), (5, 6)])
def test_a_wrong_number_of_layers_is_warned_about_once(layers, declared, ran):
    context, sync = make(3, declared)
    least = min(ran, ran % declared)
    step(layers, context, sync)
    step(layers, context, sync)
    with pytest.warns(UserWarning, match=f"after {least} layers? of a pass, but model_layers is {declared}") as caught:
        step(layers, context, sync)
    assert caught[0].filename.endswith("helpers.py")  # where the context is entered
    step(layers, context, sync)


def test_neither_an_early_exit_nor_an_aborted_pass_is_warned_about(layers):
    context, sync = make(3, 6)
    for _ in range(2):
        x = forward(list(layers)[:4], data(), context, sync)
        with pytest.raises(ZeroDivisionError), context:
            raise ZeroDivisionError
        x.sum().backward()
    step(list(layers)[:5], context, sync)
    step(layers, context, sync)
    step(list(layers)[:5], context, sync)  # the same number again, but a whole pass in between
    with warnings.catch_warnings(), torch.no_grad():
        forward(list(layers)[:2], data(), context, sync)
    step(layers, context, sync)
