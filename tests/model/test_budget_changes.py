"""Memory budgets where passes differ from those before: inputs, optimizer states, gradients, host memory."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from timed_device import Timed, TimedModel, offload, peaks, seconds, settle, started

import actoffload
from actoffload.engine.statistics import Reason
from actoffload.schedule import Link
from actoffload.tune.findings import Findings, Room
from actoffload.tune.meter import Peak

MIB = 2**20


class Case(NamedTuple):
    """Passes that differ: the elements of the input and the MiB that are allocated beside it, by pass from 1 on.

    Without offloading the model takes 48 MiB for an input of four elements.
    """

    budget: int  # MiB
    passes: int
    elements: Callable[[int], int] = lambda n: 4
    beside: Callable[[int], int] = lambda n: 0
    link: float = 1e6
    recompute: str | bool = "auto"
    seconds: float | None = None  # of a pass with the inputs of the last, in the end; 0.0 for those of the plan
    least: int = 0  # MiB: the plan takes more
    final: int | None = None  # the pass after which the plan is final; by default the last


def cases() -> Iterator[tuple[str, Case]]:
    for budget, at in ((60, 1), (60, 3), (60, 9), (30, 2)):
        yield f"larger inputs in pass {at}: {budget}", Case(budget, 19, lambda n, at=at: 8 if n == at else 4)
    # As with gradient accumulation, after which the optimizer takes its first step.
    for budget, at in ((60, 3), (60, 8), (44, 2)):
        case = Case(budget, 23, beside=lambda n, at=at: 24 * (n >= at))
        yield f"optimizer states from pass {at} on: {budget}", case
    for first, every in ((0, 3), (1, 2)):
        beside = lambda n, first=first, every=every: 16 * ((n - 1) % every == first)  # noqa: E731
        yield f"gradients before passes {first} of {every}", Case(44, 30, beside=beside)
    for budget, at in ((30, 0), (30, 3), (60, 1)):  # the plan is for the others, and measuring ends
        case = Case(budget, 25, lambda n, at=at: 1 if n % 5 == at else 4, lambda n: 10, seconds=0.0, least=budget // 2)
        yield f"short batches in passes {at} of 5: {budget}", case
    yield (
        "inputs and memory that are too much together",
        Case(60, 32, lambda n: 4 if n < 3 else 5, lambda n: 5 * (n > 2), seconds=45.0),
    )
    yield (
        "larger inputs long after more memory came",
        Case(60, 139, lambda n: 2 if n < 12 or n % 4 else 4, lambda n: 30 * (n >= 20), recompute=False),
    )
    # A plan that was tried with smaller inputs, or less memory beside it, is for the others.
    yield (
        "a plan that was tried with smaller inputs",
        Case(20, 20, lambda n: (4, 2, 4, 5, 6, 8)[(n > 2) + max(n - 16, 0)], least=17, final=16),
    )
    yield (
        "a plan that was tried with less memory",
        Case(30, 26, beside=lambda n: 8 if n < 3 else 15 * (n > 16), final=16),
    )
    # The first steps begin anew, and the plan is for these inputs.
    yield "inputs that stay larger", Case(30, 40, lambda n: 2 if n < 3 else 4, seconds=0.0, least=20)
    # The measured pass without offloading had no gradients in memory, the one before it did.
    yield (
        "optimizer states where gradients went",
        Case(80, 39, beside=lambda n: 40 if n > 19 else 32 * (n % 2 == 0), link=2e5),
    )


CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_no_pass_exceeds_the_budget(name):
    case, kept = CASES[name], None
    device, model, handle = started(case.link, memory_budget=case.budget * MIB, recompute=case.recompute)
    for n in range(1, case.passes + 1):
        if case.beside(n) != case.beside(n - 1) or n == 1:
            kept = None
            kept = device.count(torch.zeros(case.beside(n) * MIB // 4))
        assert peaks(model, device, 1, case.elements(n))[0] <= case.budget * MIB
        if n == (case.final or case.passes):
            assert not handle.settling
            assert case.least * MIB < handle.plan.peak_bytes <= case.budget * MIB
    if case.seconds is not None:
        elements = case.elements(case.passes) if case.seconds else 4
        want = case.seconds or pytest.approx(handle.plan.seconds, rel=0.01)
        assert seconds(model, device, elements) == want
    handle.remove()
    del kept


@pytest.mark.parametrize(
    "options", [{"max_host_bytes": 1}, {"max_host_bytes": 1, "recompute": False}, {"min_bytes": "1GiB"}]
)
def test_nothing_is_copied(options):
    """Groups are recomputed where the host has no memory; where that does not help either, a warning says so."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        device, model, handle = started(memory_budget=24 * MIB, **options)
        settle(model, handle)
    found = [str(each.message) for each in found if each.category is UserWarning]
    if options == {"max_host_bytes": 1}:
        assert handle.plan.recomputed
        assert peaks(model, device, 1)[0] <= handle.plan.peak_bytes <= 24 * MIB
        assert seconds(model, device) == pytest.approx(handle.plan.seconds, rel=0.01)
        assert not found
        assert not any(plan.offloaded for plan in handle.frontier().plans)
    else:
        assert "memory_budget is 24.0 MiB, but the smallest peak that a plan reaches is 48.0 MiB" in found[-1]
        assert peaks(model, device, 1)[0] == handle.plan.peak_bytes == 48 * MIB
    assert not handle.plan.offloaded


KIB = 2**10


def for_all(own: Room, first: Room, *others: Room) -> Findings:
    return Findings(limit=first.limit, size=first.peak.elements).for_all([first, *others], own, 0)


def test_the_room_of_ranks_counts_for_inputs_of_one_size():
    """The other rank took 40 bytes for half as many elements, of which 10 were there before."""
    first, other = Room(100, Peak(50, 4)), Room(90, Peak(40, 2, 10))
    found = for_all(other, first, other, Room())
    assert (found.limit, found.reserve, found.more) == (70, 30, 20)
    assert for_all(other, other, first).limit == 90
    assert for_all(other, other, first).size == 4
    assert found.link is None


def test_the_slowest_link_of_all_ranks_counts():
    first, others = Room(100, link=Link(5e9, 3e9)), [Room(), Room(link=Link(4e9, 6e9, both=7e9)), Room(90)]
    assert for_all(first, first, *others).link == Link(4e9, 3e9, both=7e9)


# Little host memory


ROOM = 12 * MIB
BUDGET = 20 * MIB


class Limited(Timed):
    """A device whose host has 12 MiB, of which it says how much is left, or not."""

    says = True
    taken = 0

    def host_room(self) -> int | None:
        return ROOM - self.taken if self.says else None

    def empty_host(self, nbytes: int) -> torch.Tensor:
        if self.taken + nbytes > ROOM:
            raise RuntimeError("CUDA error: out of memory")  # as cudaHostAlloc fails
        self.taken += nbytes
        slab = super().empty_host(nbytes)
        weakref.finalize(slab, self.free, nbytes)
        return slab

    def free(self, nbytes: int) -> None:
        self.taken -= nbytes


def refused(handle: actoffload.OffloadHandle) -> int:
    return handle.statistics().tensors_kept.get(Reason.HOST_FULL, 0)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::actoffload.HostMemoryWarning")
@pytest.mark.parametrize("how", ["max_host_bytes", "available", "refused"])
@pytest.mark.parametrize("recompute", ["auto", False])
def test_the_plan_recomputes_what_the_host_has_no_room_for(how, recompute):
    device = (Timed if how == "max_host_bytes" else Limited)(1e7, 1e7, memory=2**40)
    device.says = how == "available"
    model = TimedModel(device, 12)
    limit = ROOM if how == "max_host_bytes" else None
    handle = offload(model, device, memory_budget=BUDGET, max_host_bytes=limit, recompute=recompute)
    found = peaks(model, device, 10)
    assert recompute is False or how == "refused" or max(found) <= BUDGET, "in the first passes, too"
    assert not handle.settling
    held, before = handle.statistics().host_bytes, refused(handle)
    taken = seconds(model, device)
    assert refused(handle) == before, "the plan asks for no more than there is"
    plan = handle.plan
    assert 0 < plan.offloaded_bytes <= ROOM
    assert held <= ROOM
    assert plan.seconds == pytest.approx(taken, rel=0.01)
    assert plan.peak_bytes >= device.peak()
    if recompute == "auto":
        assert plan.recomputed
        assert device.peak() <= BUDGET
        assert taken < 12 * 4.0, "faster than with replay of everything"
    else:
        assert f"the limit of {BUDGET / MIB:.1f} MiB" in plan.because
        assert "smallest peak" in plan.because


def test_nothing_is_copied_where_the_device_uses_the_memory_of_the_host():
    """As integrated GPUs do: what is offloaded there frees nothing."""
    device, model, handle = started(1e7, memory_budget=BUDGET)
    device.host_room = lambda: 0
    assert peaks(model, device, 10)[-1] <= BUDGET
    assert handle.statistics().bytes_offloaded == 0
    assert handle.statistics().host_bytes == 0
    assert not handle.plan.offloaded
    assert handle.plan.recomputed
