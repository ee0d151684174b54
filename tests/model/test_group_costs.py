"""The costs that are measured in the first steps: rates of copies, times of the host, memory."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timed_device import RotaryModel, Temporary, Timed, TimedModel, offload, stages, step
from torch import Tensor, nn

from actoffload.device import ReferenceDevice
from actoffload.engine.engine import Engine
from actoffload.engine.passes import Pass
from actoffload.model import tuner
from actoffload.schedule import Link
from actoffload.schedule.plan import Plan
from actoffload.schedule.timeline import Kind, Span
from actoffload.tune.costs import HOST_SECONDS, layer_costs, measured_link
from actoffload.tune.meter import PASS, Meter, Visit

MIB = 2**20


def link(out: list[tuple[float, float, int]], back: list[tuple[float, float, int]]) -> Link | None:
    copies = {kind: [Span(kind, 0, *copy) for copy in each] for kind, each in ((Kind.D2H, out), (Kind.H2D, back))}
    meter: Any = SimpleNamespace(copies=copies.__getitem__)
    return measured_link(meter)


@pytest.mark.parametrize(
    ("out", "back", "want"),
    [
        # Rates are those of copies that run alone.
        ([(0, 1, 100), (1, 3, 200)], [(5, 6, 50)], Link(100, 50)),
        ([(0, 1, 100)], [], None),
        ([(1, 1, 100)], [(2, 3, 50)], None),
        # From 2 to 4 both are busy: 60 and 40 bytes each second, while one alone copies 100.
        ([(0, 2, 200), (2, 4, 120)], [(2, 4, 80), (4, 6, 200)], Link(100, 100, both=100)),
        # The same with one copy each way: the bytes outside of the common time are copied as fast as alone.
        ([(0, 1, 100), (1, 4, 220)], [(2, 5, 180), (5, 6, 100)], Link(100, 100, both=100)),
        # A short common time says nothing.
        ([(0, 10, 1000)], [(9.9, 20, 1000)], Link(100, 1000 / 10.1)),
        # The common rate is never less than that of one direction, and never more than that of both alone.
        ([(0, 1, 100), (1, 3, 10)], [(1, 3, 10), (3, 4, 100)], Link(100, 100, both=100)),
        ([(0, 1, 100), (1, 3, 500)], [(1, 3, 500), (3, 4, 100)], Link(100, 100, both=200)),
    ],
)
def test_rates_of_one_direction_and_of_both(out, back, want):
    assert link(out, back) == want


def costs(monkeypatch, device: Timed, model: torch.nn.Module, **options: Any) -> tuple[Any, Any]:
    """Return the costs of the groups of a model, and its handle."""
    found = []
    measure = tuner.layer_costs
    monkeypatch.setattr(tuner, "layer_costs", lambda *a: (found.append(measure(*a)), found[-1])[1])
    handle = offload(model, device, recompute=False, **options)
    step(model, times=6)
    return found[0], handle


def test_the_host_takes_as_long_for_groups_of_one_kind_and_waits_for_other_reasons():
    seconds = {Kind.FORWARD: [5.0, 6.0, 50.0, 70.0], Kind.BACKWARD: [3.0, 2.0, 40.0, HOST_SECONDS]}
    visits = {(PASS, kind, k): Visit(host=each) for kind, found in seconds.items() for k, each in enumerate(found)}
    meter: Any = SimpleNamespace(visits=visits, allocated_before=0)
    found = layer_costs(meter, [(1, 1)] * 4, [int, int, int, str], (), 0)
    assert [of.host_forward for of in found] == [5.0 - 2 * HOST_SECONDS] * 3 + [70.0 - 2 * HOST_SECONDS]
    assert [of.host_backward for of in found] == [2.0 - 2 * HOST_SECONDS] * 3 + [0.0]


@pytest.mark.parametrize("memory", [2**40, 26 * MIB])
@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("nbytes", [(6 * MIB, 0), (0, 6 * MIB)])
def test_temporary_memory_of_each_group(monkeypatch, memory, at, nbytes):
    """What one group allocates for a time counts in that group; also where the model fits with offloading only."""
    device = Timed(1e7, 1e7, memory=memory)
    device.behind = False
    model = TimedModel(device, nbytes=4 * MIB)
    inner = model.blocks[at].forward
    model.blocks[at].forward = lambda x: Temporary.apply(inner(x), device, *nbytes)
    layers, handle = costs(monkeypatch, device, model)
    forward, backward = (
        [getattr(layer, name) for layer in layers] for name in ("forward_temporary", "backward_temporary")
    )
    want = [6 * MIB * (k == at) for k in range(8)]
    assert (forward, backward) == ((want, [0] * 8) if nbytes[0] else ([0] * 8, want))
    device.created.peak = 0
    step(model)
    assert handle.plan.peak_bytes == device.created.peak


@pytest.mark.parametrize("link", [3e5, 3e6])
@pytest.mark.parametrize("budget", [None, 30 * MIB, 14 * MIB])
def test_what_all_groups_save_is_there_as_long_as_all_of_them(budget, link):
    device = Timed(link, link, memory=2**40)
    model = RotaryModel(device, 8, 4 * MIB, 2 * MIB)
    handle = offload(model, device, memory_budget=budget)
    while handle.settling:
        step(model)
    device.created.peak = 0
    step(model)
    assert device.created.peak <= handle.plan.peak_bytes <= 1.003 * device.created.peak


class WithoutInputs(nn.Module):
    """A model that makes its input itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Tensor:
        return self.inner(torch.randn(16, 8, requires_grad=True))


@pytest.mark.parametrize("whole", [True, False, "without inputs"])
@pytest.mark.parametrize("alike", [True, False])
def test_compiled_groups_need_all_that_they_saved_at_once_whether_compiled_alone_or_with_the_model(
    monkeypatch, alike, whole
):
    """They run again as a whole in the first passes; what they save otherwise is counted where it is dropped."""
    found = []
    measure = tuner.layer_costs
    monkeypatch.setattr(tuner, "layer_costs", lambda *a: (found.append(measure(*a)), found[-1])[1])
    device = Timed(1e6, 1e6, memory=2**30)
    device.behind = False
    widths = [8 if alike else 8 + k for k in range(7)]
    model = nn.Sequential(*[nn.Sequential(nn.Linear(n, m), nn.GELU(), nn.GELU()) for n, m in pairwise(widths)])
    called = torch.compile(model, backend="eager") if whole is True else model
    for block in () if whole is True else model:
        block.compile(backend="eager")
    inputs = (torch.randn(16, 8, requires_grad=True),)
    if whole == "without inputs":
        called, inputs = WithoutInputs(called), ()
    layers = "inner.*" if whole == "without inputs" else "*"
    handle = offload(called, device, layers=layers)

    def run() -> None:
        called(*inputs).sum().backward()

    seen = stages(handle, run, 7)
    want = ["FIRST", *(["FIRST"] if not inputs else []), "LEAN", "PLAN"]
    assert seen[: len(want) + 1] == [*want, ""]
    assert all(cost.unpacks_at_once for each in found for cost in each)
    planned = handle.plan.nbytes
    handle.remove()
    as_it_is = offload(called, device, layers=layers, recompute=False, fraction=1.0)
    for _ in range(3):
        run()
    saved = [group.bytes_saved for group in as_it_is.report().groups]
    # What a group returns is the input of the next, and counts in one of them.
    assert sum(planned) == sum(saved) > 0


class SlowHost(Timed):
    """The host takes twice as long for each operator as the device, which waits for it."""

    def compute(self, seconds: float) -> None:
        self.host += 2 * seconds
        self.wait_for_host()
        super().compute(seconds)

    def wait_for_host(self) -> None:
        ReferenceDevice.compute(self, max(self.host - self.main.now, 0.0))

    def record(self, stream: Any) -> Any:
        self.wait_for_host()
        return super().record(stream)

    def occupy(self, seconds: float) -> None:
        ReferenceDevice.compute(self, seconds)

    def passed(self, event: Any) -> bool:
        return event.time <= self.host

    def synchronize(self, device: torch.device) -> None:
        self.host = max(self.host, self.main.now)


def test_a_host_that_is_slower_than_the_device_is_measured_beside_it(monkeypatch):
    """Events around groups would measure the host, and all plans would seem to take the same time."""
    device = SlowHost(1e10, 1e10, memory=20 * MIB)
    layers, _ = costs(monkeypatch, device, TimedModel(device, forward=0.01, backward=0.02))
    assert [layer.forward for layer in layers] == pytest.approx([0.01] * 8, rel=0.01)
    assert [layer.backward for layer in layers] == pytest.approx([0.02] * 8, rel=0.01)
    assert max(layer.gap_forward for layer in layers) < 0.001, "the time for which the device was kept busy"


class Pause(torch.autograd.Function):
    """Lets the host pause in forward and in backward, as one does that collects garbage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SlowHost, in_forward: float, in_backward: float) -> Tensor:
        ctx.device, ctx.seconds = device, in_backward
        device.host += in_forward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.device.host += ctx.seconds
        return grad, None, None, None


@pytest.mark.parametrize("pauses", [(2.0, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("at", [0, 5])
def test_pauses_of_the_host_are_no_work_of_the_device(monkeypatch, at, pauses):
    """A plan for a group that seemed to take as long as a pause would have copied far more than there is time for."""
    device = SlowHost(1e10, 1e10, memory=20 * MIB)
    model = TimedModel(device, forward=0.01, backward=0.02)
    inner = model.blocks[at].forward
    model.blocks[at].forward = lambda x: inner(Pause.apply(x, device, *pauses))
    layers, _ = costs(monkeypatch, device, model)
    assert [layer.forward for layer in layers] == pytest.approx([0.01] * 8, rel=0.25)
    assert [layer.backward for layer in layers] == pytest.approx([0.02] * 8, rel=0.25)


def test_a_group_of_another_kind_for_which_the_host_takes_longer_is_no_pause(monkeypatch):
    """It may wait for the device, as in a block with full attention among those with sliding attention."""
    device = SlowHost(1e10, 1e10, memory=20 * MIB)
    model = TimedModel(device, forward=0.01, backward=0.02)
    model.blocks[3].seconds, model.blocks[3].attention = (0.01, 0.02), "full"
    layers, _ = costs(monkeypatch, device, model)
    assert 0.039 < layers[3].forward < 0.06, "where the host is late, the device waits for it"
    assert 0.079 < layers[3].backward < 0.12


def test_an_end_without_a_start_is_not_measured():
    """A meter may be installed while a group runs."""
    device = Timed(1e6, 1e6)
    engine = Engine(Plan(1), device, None)
    meter, owner = Meter(device, engine.counters, memory=False), Pass(engine)
    meter.finish(owner, Kind.FORWARD, 0)
    assert not meter.borders
    meter.begin(owner, Kind.FORWARD, 1)
    meter.finish(owner, Kind.FORWARD, 1)
    assert len(meter.borders) == 2
