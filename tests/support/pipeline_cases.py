"""Random pipelines for property tests."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from actoffload.schedule import (
    Action,
    Computation,
    Do,
    Event,
    LayerCost,
    Plan,
    Saved,
    StageCost,
    Step,
    When,
    gpipe,
    one_f_one_b,
    read_order,
)
from actoffload.schedule.plan import steps_of
from actoffload.schedule.simulate import rank_plans

Orders = Sequence[tuple[Step, ...]]


# Orders of schedules with several stages a rank, as PyTorch makes them


class RecordingStage:
    """A stage that only notes what its schedule calls."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size, self.group = index % ranks, ranks, None
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.submod = SimpleNamespace()
        self.stage_index_to_group_rank: dict[int, int] = {k: k % ranks for k in range(stages)}
        self.calls: list[Step] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.calls.append(Step(self.stage_index, Computation.FORWARD, microbatch))

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.calls.append(Step(self.stage_index, Computation.BACKWARD, microbatch))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            return lambda *_: []  # no communication
        return lambda *_, **__: None


def planned(schedule: type, ranks: int, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """Return the orders that a schedule of several stages a rank makes."""
    stages = [RecordingStage(k * ranks, ranks, ranks * 2) for k in range(2)]
    made = schedule(stages, microbatches)
    return tuple(read_order(made.pipeline_order[rank]) for rank in range(ranks))


interleaved_1f1b = partial(planned, schedules.ScheduleInterleaved1F1B)
looped_bfs = partial(planned, schedules.ScheduleLoopedBFS)


# Random pipelines

eighths = st.integers(0, 8).map(lambda k: k / 8)
seconds = st.integers(1, 16).map(lambda k: k / 8)
nbytes = st.integers(0, 50)


@st.composite
def groups(draw: st.DrawFn) -> LayerCost:
    saved_at = sorted(draw(st.lists(eighths, min_size=1, max_size=3)))
    saved = tuple(Saved(draw(st.integers(1, 100)), at, draw(eighths)) for at in saved_at)
    backward = draw(seconds)
    return LayerCost(
        draw(seconds),
        backward,
        saved,
        weight_backward=backward / 2,
        gap_forward=draw(eighths),
        gap_backward=draw(eighths),
        forward_temporary=draw(nbytes),
        backward_temporary=draw(nbytes),
        gap_backward_temporary=draw(nbytes),
        kept_bytes=draw(nbytes),
    )


@st.composite
def stages(draw: st.DrawFn, count: int, split: bool = False) -> list[StageCost]:
    found = []
    for stage in range(count):
        of = draw(st.lists(groups(), min_size=1, max_size=3))
        memory = {name: draw(nbytes) for name in ("boundary_bytes", "between_bytes")}
        found.append(StageCost(tuple(of), **memory, split=split and stage > 0))
    return found


@st.composite
def orders_of_schedules(draw: st.DrawFn) -> tuple[Orders, int, bool]:
    """Return orders, the number of stages, and whether backwards are split."""
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 6]))
    kind = draw(st.sampled_from([gpipe, one_f_one_b, interleaved_1f1b, looped_bfs]))
    orders = kind(ranks, microbatches)
    split = draw(st.booleans())
    if split:
        orders = tuple(split_backwards(order, draw(st.integers(0, 2))) for order in orders)
    return orders, ranks * (1 if kind in (gpipe, one_f_one_b) else 2), split


def split_backwards(order: Sequence[Step], later: int) -> tuple[Step, ...]:
    """Return an order in which every weight backward comes some backwards after that of the inputs."""
    steps: list[Step] = []
    waiting: list[Step] = []
    for step in order:
        if step.computation is Computation.BACKWARD:
            steps.append(step._replace(computation=Computation.BACKWARD_INPUT))
            waiting.append(step._replace(computation=Computation.BACKWARD_WEIGHT))
            if len(waiting) > later:
                steps.append(waiting.pop(0))
        else:
            steps.append(step)
    return (*steps, *waiting)


@st.composite
def plans(draw: st.DrawFn, orders: Orders, costs: Sequence[StageCost]) -> list[Plan]:
    """Return plans with any legal events."""
    return [draw(plan_of_rank(plan, costs)) for plan in rank_plans(orders, costs)]


@st.composite
def plan_of_rank(draw: st.DrawFn, empty: Plan, costs: Sequence[StageCost]) -> Plan:
    events, calls = list(empty.events()), []
    for layer, microbatch in product(range(empty.model_layers), {step.microbatch for step in empty.order}):
        saved = Event(When.FORWARD_START, layer, microbatch)
        between = range(events.index(saved) + 1, events.index(empty.first_use(layer, microbatch)) + 1)
        if between and draw(st.booleans()):
            release, reload = sorted(draw(st.sampled_from(between)) for _ in range(2))
            places = (release, Do.RELEASE), (reload, Do.RELOAD), (events.index(saved), Do.OFFLOAD)
            calls += [(place, kind, Action(do, layer, microbatch)) for kind, (place, do) in enumerate(places)]
    ordered = ((events[place], action) for place, _, action in sorted(calls, key=itemgetter(0, 1)))
    sizes = tuple(cost.nbytes for stage in empty.layers for cost in costs[stage].groups)
    return replace(empty, steps=steps_of(ordered), nbytes=sizes)
