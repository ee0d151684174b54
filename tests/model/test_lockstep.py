"""Ranks of one model: the same stages in the same passes, one plan, and no rank that hangs."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import LIMIT, run_ranks
from timed_device import Timed, TimedModel, offload, stage_of, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import actoffload
from actoffload.tune import exchange
from actoffload.tune.exchange import WINDOW, Exchange, ranks_of

KIB = 2**10
ALL = ["FIRST", "LEAN", "PLAN"]
LIMITED = {"memory": 2**40, "memory_budget": 24 * KIB, "recompute": False}
"""Options with which six of the eight blocks or fewer are kept."""


@dataclass
class Rank:
    """One rank, in a thread of its own."""

    number: int
    device: Timed
    model: TimedModel
    handle: actoffload.OffloadHandle
    stages: list[str] = field(default_factory=list)
    settling: list[bool] = field(default_factory=list)
    before: dict[int, Callable[[Rank], object]] = field(default_factory=dict)  # by pass: what is done before it
    passes: int | None = None  # after which it ends
    elements: int = 4  # of the inputs
    seconds: float = 0.0
    error: BaseException | None = None

    def run(self, passes: int, wait: Callable[[], object]) -> None:
        begun = time.monotonic()
        try:
            for k in range(passes if self.passes is None else self.passes):
                self.before.get(k, lambda rank: None)(self)
                step(self.model, self.elements)
                self.stages.append(stage_of(self.handle))
                self.settling.append(self.handle.settling)
                wait()
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - begun


class Program:
    """Ranks that run steps together; as with collectives, none is more than a pass ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.local, self.ranks = dist.HashStore(), threading.local(), list[Rank]()
        self.calls: list[tuple[int, str]] = []
        monkeypatch.setattr(exchange, "ranks_of", lambda model: range(len(self.ranks)))
        monkeypatch.setattr(Exchange, "of", self.exchange)

    def exchange(self, name: str, members: range) -> Exchange:
        return Exchange(name, self.local.rank, members, lambda: self.store)

    def add(self, link: float = 1e4, memory: int | None = None, count: int = 8, *, number: int = 1, **more) -> Rank:
        """Add some ranks; return the last one."""
        for _ in range(number):
            device = Timed(link, link, memory=memory)
            model = TimedModel(device, count, nbytes=4 * KIB)
            self.ranks.append(Rank(len(self.ranks), device, model, offload(model, device, **more)))
        return self.ranks[-1]

    def run(self, passes: int, *, together: bool = True) -> list[str]:
        """Run passes; return the warnings."""
        barrier = threading.Barrier(len(self.ranks))

        def main(rank: Rank) -> None:
            self.local.rank = rank.number
            rank.run(passes, (lambda: barrier.wait(30)) if together else lambda: None)

        threads = [threading.Thread(target=main, args=(rank,)) for rank in self.ranks]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for rank in self.ranks:
            if rank.error is not None:
                raise rank.error
        return [str(each.message) for each in found]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def slower(rank: Rank, times: float) -> None:
    rank.device.slow = lambda: times


# One decision


@pytest.mark.parametrize(("options", "want"), [(LIMITED, ALL), ({"memory": 2**40}, ALL)])
def test_clocks_that_differ_wildly(program, options, want):
    for link in (1e4, 1e2, 3e3):
        program.add(link, **options)
    slower(program.ranks[1], 5.0)
    slower(program.ranks[2], 0.2)
    assert program.run(8) == []
    want = [*want, "PLAN", *[""] * 4]  # a pass that takes longer runs once more
    assert [rank.stages for rank in program.ranks] == [want] * 3
    assert [rank.settling for rank in program.ranks] == [[stage != "" for stage in want]] * 3
    assert {bool(rank.handle.plan.offloaded) for rank in program.ranks} == {options == LIMITED}
    assert len({str(rank.handle.plan.steps) for rank in program.ranks}) == 1
    assert program.store.num_keys() == 0, "what was read is deleted"
    assert {len(rank.handle.frontier().plans) for rank in program.ranks} != {0}


@pytest.mark.parametrize("demanding", [0, 2])
def test_a_budget_holds_in_the_most_demanding_rank(program, demanding):
    program.add(1e3, 2**40, 12, memory_budget=32 * KIB, recompute=False, number=3)
    rank = program.ranks[demanding]
    more = rank.device.count(torch.zeros(6 * KIB // 4))
    for each in program.ranks:
        each.before[5] = lambda rank: setattr(rank.device, "highest", 0)
    assert program.run(8) == []
    assert len({str(rank.handle.plan.steps) for rank in program.ranks}) == 1
    peaks = [max(each.device.created.peak, each.device.highest) for each in program.ranks]
    assert max(peaks) == peaks[demanding] <= 32 * KIB
    because = "Another rank takes 6.0 KiB more than the one that decides."
    assert (because in program.ranks[1].handle.plan.because) == (demanding == 2)
    assert peaks[demanding] > 27 * KIB, "what there is is used"
    del more


def test_a_rank_that_comes_late(program):
    program.add(**LIMITED, number=2)
    program.ranks[1].before = {0: lambda _: time.sleep(0.3), 3: lambda _: time.sleep(0.2)}
    program.ranks[0].before = {2: lambda _: time.sleep(0.2)}
    assert program.run(8, together=False) == []
    assert program.ranks[0].stages == program.ranks[1].stages == [*ALL, *[""] * 5]
    assert program.ranks[0].settling == program.ranks[1].settling == [*[True] * 3, *[False] * 5]


@pytest.mark.parametrize("large", [(0,), (0, 1), (1,)])
def test_inputs_that_may_be_too_large_are_measured_anew(program, large):
    """From the third pass on, and in some ranks: settling ends in all after the same pass."""
    want = [*ALL[:2], *["FIRST"] * 4, *ALL]
    for number in range(2):
        rank = program.add(1e4, 60 * KIB, 12)
        rank.elements = 1
        if number in large:
            rank.before[2] = lambda rank: setattr(rank, "elements", 8)
    assert program.run(12) == []
    first, second = program.ranks
    assert first.stages == [*want, *[""] * (12 - len(want))]
    assert first.settling == second.settling
    assert not first.settling[-1]


def count_calls(device: Timed) -> None:
    """Count the forwards and backwards of operators on a device, also of those that are replayed."""
    device.calls, compute = 0, device.compute

    def counting(seconds: float) -> None:
        device.calls += 1
        compute(seconds)

    device.compute = counting


@pytest.mark.parametrize(("number", "at"), [(1, 5), (1, 10), (0, 11)])
def test_ranks_recompute_the_same_groups_where_one_has_more_memory_allocated(program, number, at):
    """Groups that are recomputed communicate once more, so other ranks would wait for them, or mix tensors."""
    calls: list[list[int]] = [[], []]  # by rank and pass: of operators
    for _ in range(2):
        rank = program.add(3e2, 2**40, 12, memory_budget=24 * KIB)
        count_calls(rank.device)
        for k in range(28):
            rank.before[k] = lambda rank: calls[rank.number].append(rank.device.calls)
    grown, note = program.ranks[number], program.ranks[number].before[at]
    states = []

    def grow(rank: Rank) -> None:
        states.append(rank.device.count(torch.zeros(4 * KIB // 4)))
        note(rank)

    grown.before[at] = grow
    assert program.run(28) == []
    assert calls[0] == calls[1]
    assert calls[0][-1] - calls[0][-2] > 12 * 8, "some are recomputed"


def test_steady_passes_post_nothing(program, monkeypatch):
    program.add(**LIMITED, number=2)
    program.run(10)
    calls, call = [], Exchange._call
    monkeypatch.setattr(Exchange, "_call", lambda self, *a: (calls.append(a[0]), call(self, *a))[1])
    program.run(2 * WINDOW)
    assert calls == ["check"] * 4, "one look for each rank and window"


# Ranks that deviate


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actoffload.tune.exchange.LIMIT", 0.4)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("number", [0, 2], ids=["the deciding rank", "another rank"])
def test_a_rank_stops(program, number, passes):
    program.add(**LIMITED, number=3)
    program.ranks[number].passes = passes
    said = program.run(10, together=False)
    first, second = (rank for rank in program.ranks if rank.number != number)
    if number:
        (warning,) = said
        assert warning.startswith("Rank 0 waited 0 s for rank 2")
        assert first.stages == second.stages == [*ALL, *[""] * 7]
        return
    where = "while passes of the model are measured" if passes else "in the first forward"
    for rank in (first, second):
        because = f"Rank {rank.number} waited 0 s for rank 0 {where}. So this rank decides alone"
        assert len([warning for warning in said if because in warning]) == 1
        assert rank.handle.plan.offloaded
        assert rank.stages[-1] == ""


def ended(rank: Rank) -> None:
    rank.handle.remove()


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("number", [0, 1], ids=["the deciding rank", "another rank"])
def test_offloading_ends_in_one_rank_only(program, number, at):
    program.add(**LIMITED, number=3)
    program.ranks[number].before[at] = ended
    found = program.run(at + 6)
    assert len(found) == (2 if number == 0 and at < 4 else 0)
    assert all(each.startswith("Offloading has ended on rank 0. So this rank decides alone") for each in found)
    others = [rank for rank in program.ranks if rank.number != number]
    assert all(rank.handle.plan.offloaded for rank in others)
    assert number == 0 or others[0].stages == others[1].stages == [*ALL, *[""] * (at + 3)]
    assert max(rank.seconds for rank in program.ranks) < 20


def test_a_step_is_recorded_in_one_rank_only(program):
    program.add(**LIMITED, number=2)
    first = program.ranks[0]
    blocks: list[Any] = []

    def record(rank: Rank) -> None:
        blocks.append(rank.handle.recording())
        blocks[0].__enter__()

    first.before = {1: record, 2: lambda _: blocks[0].__exit__(None, None, None)}
    assert program.run(8) == []
    assert [rank.stages[2:] for rank in program.ranks] == [[*ALL, *[""] * 3]] * 2


def test_the_process_group_is_destroyed(program):
    program.add(**LIMITED, number=2)

    def destroy(rank: Rank) -> None:
        program.store = None

    program.ranks[0].before[2] = destroy
    found = program.run(10)
    assert len(found) == 2
    assert all(each.startswith("The process group was destroyed. So this rank decides alone") for each in found)
    assert all(rank.handle.plan.offloaded for rank in program.ranks)


# Later


def measured_again(rank: Rank) -> list[int]:
    return [k + 1 for k, stage in enumerate(rank.stages) if stage == "FIRST" and k and not rank.stages[k - 1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_memory_is_taken_later(program, rank):
    program.add(1e3, 2**40, 12, memory_budget=24 * KIB, recompute=False, number=2)
    states: list[torch.Tensor] = []
    program.ranks[rank].before[14] = lambda rank: states.append(rank.device.count(torch.zeros(8 * KIB // 4)))
    for each in program.ranks:
        each.before[50] = lambda rank: (
            setattr(rank.device, "highest", 0),
            setattr(rank.device.created, "peak", rank.device.created.now),
        )
    assert program.run(52) == []
    again = list(map(measured_again, program.ranks))
    assert again[0] == again[1] != []
    peaks = [max(each.device.created.peak, each.device.highest) for each in program.ranks]
    assert max(peaks) == peaks[rank] <= 24 * KIB


def test_a_budget_that_is_too_small_for_one_rank(program):
    program.add(1e6, 2**40, 12, memory_budget=8 * KIB, recompute=False, number=2)
    more = program.ranks[1].device.count(torch.zeros(6 * KIB // 4))
    found = program.run(6)
    peak = program.ranks[0].handle.plan.peak_bytes + more.nbytes
    reaches = f"but the smallest peak that a plan reaches is {peak / KIB:.1f} KiB: that plan is used."
    assert found == [f"memory_budget is 8.0 KiB, {reaches}"] * 2


def test_offloading_ends_after_measuring_again_was_announced(program):
    program.add(1e3, 2**40, 12, memory_budget=24 * KIB, recompute=False, number=2)
    states: list[torch.Tensor] = []
    first = program.ranks[0]
    first.before[14] = lambda rank: states.append(rank.device.count(torch.zeros(8 * KIB // 4)))
    first.before[17] = ended  # pass 16 announces pass 24
    (warning,) = program.run(26)
    assert warning.startswith("Offloading has ended on rank 0. So this rank decides alone")
    assert program.ranks[1].seconds < 20
    assert program.ranks[1].handle.plan.offloaded, "the plan from before is kept"


# Arguments


def test_arguments_that_differ(program):
    for layers in (2, 2, 3):
        program.add(num_layers=layers)
    with pytest.raises(ValueError, match="num_layers is 2 on rank 0 and 3 on rank 2") as raised:
        program.run(1, together=False)
    assert {str(rank.error) for rank in program.ranks} == {str(raised.value)}
    assert [type(rank.error) for rank in program.ranks] == [ValueError] * 3
    assert program.store.num_keys() == 0


# Processes


def test_a_model_in_one_process():
    model = TimedModel(Timed())
    assert ranks_of(model) == ()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert ranks_of(DistributedDataParallel(model)) == ()
    finally:
        dist.destroy_process_group()


def of_steps(rank: int, passes: int, **more: Any) -> dict[str, Any]:
    """Run steps in which the clocks of two ranks differ; return what this rank did."""
    device = Timed(*[(1e4, 1e2)[rank]] * 2, memory=2**40)
    model = DistributedDataParallel(TimedModel(device, nbytes=4 * KIB))
    handle = offload(model, device, layers="blocks", **more)
    found, settling = [], []
    for _ in range(passes):
        step(model)
        found.append(stage_of(handle))
        settling.append(handle.settling)
    return {"stages": found, "settling": settling, "offloaded": handle.plan.offloaded, "names": handle.plan.names}


def without_store(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the ranks of a model where PyTorch lacks the private name of the store."""
    with mock.patch.object(exchange, "default_store", None):
        return ranks_of(model)


def rank_main(_: torch.device) -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    sharded = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(sharded, mesh=mesh)
    inside, seen = torch.nn.Linear(4, 4), []
    inside.register_forward_pre_hook(lambda module, args: seen.append(ranks_of(module)))
    DistributedDataParallel(inside)(torch.ones(1, 4))
    return {
        "sharded": ranks_of(sharded),
        "inside": seen,
        "without a store": without_store(sharded),
        "plain": ranks_of(torch.nn.Linear(4, 4)),
        "steps": of_steps(rank, 6, memory_budget="24KiB", recompute=False),
    }


@pytest.mark.timeout(LIMIT + 300)
def test_two_processes():
    first, second = run_ranks(rank_main, world=2, device="cpu", limit=LIMIT)
    assert first == second
    assert first["sharded"] == [0, 1]
    assert first["inside"] == [[0, 1]]
    assert first["plain"] == first["without a store"] == []
    assert first["steps"]["stages"] == [*ALL, *[""] * 3]
    assert first["steps"]["settling"] == [*[True] * 3, *[False] * 3]
    assert first["steps"]["offloaded"]
