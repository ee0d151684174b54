"""Plans and predictions that were recorded once: predictions stay equal, plans never get worse.

``python tests/planner/test_golden.py`` records them anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning import GIB, MIB, convex

from actoffload.planner import Variant, choose, plan_pipeline
from actoffload.schedule import (
    Chunk,
    DefaultSchedule,
    GroupSchedule,
    LayerCost,
    Link,
    Moment,
    PipelinePlan,
    Saved,
    SplitCost,
    StageCost,
    Transfer,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    read_order,
    simulate,
    simulate_pipeline,
)

RECORDED = Path(__file__).with_name("golden.json")
Numbers = list[float]


def a_group(rng: random.Random) -> LayerCost:
    pieces = sorted(rng.random() for _ in range(rng.randint(0, 4)))
    return LayerCost(
        rng.uniform(0.1, 2.0),
        rng.uniform(0.1, 4.0),
        tuple(Saved(rng.randint(1, 4000), at, rng.random()) for at in pieces),
        host_forward=rng.choice((0.0, rng.uniform(0.0, 2.0))),
        host_backward=rng.choice((0.0, rng.uniform(0.0, 2.0))),
        gap_forward=rng.choice((0.0, rng.random())),
        gap_backward=rng.choice((0.0, rng.random())),
        other_bytes=tuple(rng.randint(0, 3000) for _ in range(4)),
        forward_temporary=rng.randint(0, 2000),
        backward_temporary=rng.randint(0, 2000),
        gap_backward_temporary=rng.randint(0, 2000),
        kept_bytes=rng.choice((0, rng.randint(0, 500))),
        unpacks_at_once=rng.random() < 0.2,
    )


def a_link(rng: random.Random) -> Link:
    d2h, h2d = rng.uniform(500.0, 9000.0), rng.uniform(500.0, 9000.0)
    return Link(d2h, h2d, rng.choice((0.0, 0.05)), rng.choice((None, rng.uniform(0.6, 1.1) * (d2h + h2d))))


def steps_of_models() -> Iterator[tuple[str, Numbers]]:
    for seed in range(24):
        rng = random.Random(seed)
        count = rng.randint(2, 7)
        layers, link = [a_group(rng) for _ in range(count)], a_link(rng)
        plan = DefaultSchedule(rng.randint(0, count - 1), count).plan()
        if seed % 2:
            plan = GroupSchedule(max_inflight=rng.choice((None, 1, 2))).plan(rng.choices("ab", k=count))
        result = simulate(plan, layers, link, host_seconds=rng.choice((0.0, 0.01)))
        numbers = result.step_time, result.forward_time, result.stall_seconds, result.peak_bytes
        yield f"step {seed}", [*numbers, result.device_peak_bytes, result.bytes_reloaded]


def orders_of(rng: random.Random) -> list[tuple[Any, ...]]:
    kind = rng.choice((gpipe, one_f_one_b, interleaved_1f1b, looped_bfs))
    orders = kind(rng.randint(1, 3), rng.choice((2, 4, 6)))
    if rng.random() < 0.5:
        return list(orders)
    text = [" ".join(map(str, order)).split() for order in orders]
    return [read_order(part for step in order for part in _split(step)) for order in text]


def _split(step: str) -> list[str]:
    return [step.replace("B", "I"), step.replace("B", "W")] if "B" in step else [step]


def a_stage(rng: random.Random, split: bool) -> StageCost:
    groups = tuple(replace(a_group(rng), other_bytes=(0,) * 4) for _ in range(rng.randint(1, 3)))
    halves = tuple(SplitCost(cost.backward / 3, cost.backward / 2, cost.nbytes // 2) for cost in groups)
    sizes = [rng.randint(0, 900) for _ in range(4)]
    return StageCost(groups, halves if split else (), *sizes)


def a_plan(rng: random.Random, rank: int, order: Any, costs: dict[int, StageCost]) -> PipelinePlan:
    names = {stage: tuple(map(str, range(len(cost.groups)))) for stage, cost in costs.items()}
    splits = {stage: bool(cost.splits) for stage, cost in costs.items()}
    empty, transfers = PipelinePlan(rank, order, names, splits=splits), {}
    moments = [Moment(k, at) for k, step in enumerate(order) for at in range(len(names[step.stage]) + 1)]
    for step in (step for step in order if step.computation.value == "F"):
        for group in range(len(names[step.stage])):
            chunk = Chunk(step.stage, step.microbatch, group)
            saved, use = empty.position(order.index(step), group), empty.first_use(chunk)
            between = [moment for moment in moments if saved < moment <= use]
            if between and rng.random() < 0.6:
                release, reload = sorted((rng.choice(between), rng.choice(between)))
                later = [moment for moment in moments if use.step < moment.step and moment <= empty.last_use(chunk)]
                transfers[chunk] = Transfer(release, reload, rng.choice([None, *later]) if later else None)
    sizes = {stage: tuple(cost.nbytes for cost in costs[stage].groups) for stage in names}
    return PipelinePlan(rank, order, names, transfers, splits, sizes)


def steps_of_pipelines() -> Iterator[tuple[str, Numbers]]:
    for seed in range(24):
        rng = random.Random(1000 + seed)
        orders = orders_of(rng)
        late = any(step.computation.value == "W" for order in orders for step in order)
        count = 1 + max(step.stage for order in orders for step in order)
        stages = [a_stage(rng, late and stage > 0) for stage in range(count)]
        plans = [
            a_plan(rng, rank, order, {step.stage: stages[step.stage] for step in order})
            for rank, order in enumerate(orders)
        ]
        result = simulate_pipeline(orders, stages, a_link(rng), plans, send_latency=0.01, send_bandwidth=5e4)
        numbers = [result.step_time, result.baseline_time]
        for rank in result.ranks:
            numbers += rank.stall_seconds, rank.bubble_seconds, rank.peak_bytes, rank.device_peak_bytes
        yield f"pipeline {seed}", numbers


def plans_of_models() -> Iterator[tuple[str, Numbers]]:
    """Yield seconds, peak and limit of each plan."""
    models = {
        "alike": [convex()] * 16,
        "gradients": [convex(200 * (12 - k)) for k in range(12)],
        "slow host": [convex(3000 + 100 * (8 - k), 0.008) for k in range(8)],
        "offload alone": [convex()[:1]] * 10,
        "one in two": [convex()[: 4 if k % 2 else 1] for k in range(10)],
        "random": [(Variant(a_group(random.Random(k))),) for k in range(6)],
    }
    for name, groups in models.items():
        names = [f"h.{k}" for k in range(len(groups))]
        for rate in (1e10, 5e10) if name != "random" else (3e3,):
            link = Link(rate, rate, both=1.5 * rate)
            most = simulate(DefaultSchedule(0, len(groups)).plan(), [group[0].cost for group in groups], link)
            least = choose(names, groups, link, limit=0)
            yield f"{name}, {rate:.0e}, leanest", [least.seconds or 0.0, least.peak_bytes or 0, 0]
            low, high = least.peak_bytes or 0, most.device_peak_bytes
            for part in (0.03, 0.15, 0.7):
                limit = round(low + part * (high - low))
                plan = choose(names, groups, link, limit=limit)
                yield f"{name}, {rate:.0e}, {part}", [plan.seconds or 0.0, plan.peak_bytes or 0, limit]


def plans_of_pipelines() -> Iterator[tuple[str, Numbers]]:
    """Yield seconds of the step, and the peaks of all ranks."""
    group = LayerCost.even(256 * MIB, forward=0.010, backward=0.020)
    halves = LayerCost(1.0, 2.0, (Saved(60, 0.5, 0.5), Saved(40)))
    stage = StageCost((group,) * 4, boundary_bytes=16 * MIB)
    split = [StageCost((halves,) * 2)] + [StageCost((halves,) * 2, (SplitCost(1.0, 1.0, 60),) * 2)] * 3
    zero_bubble = [read_order(part for step in order for part in _split(str(step))) for order in one_f_one_b(4, 8)]
    ways = {k: (convex(),) * 4 for k in range(4)}
    again = [StageCost((convex()[0].cost,) * 4)] * 4
    cases: dict[str, tuple[Any, ...]] = {
        "free": (one_f_one_b(8, 32), [stage] * 8, Link(10e9, 10e9), {}),
        "interleaved": (interleaved_1f1b(2, 16), [stage] * 4, Link(13e9, 13e9, both=20e9), {}),
        "fraction": (one_f_one_b(4, 16), [stage] * 4, Link(40e9, 40e9), {"fraction": 0.5}),
        "delta": (one_f_one_b(4, 16), [stage] * 4, Link(40e9, 40e9), {"delta_bytes_per_rank": 256 * MIB}),
        "inflight": (one_f_one_b(4, 16), [stage] * 4, Link(12e9, 12e9), {"max_inflight": 2}),
        "budget": (one_f_one_b(4, 16), [stage] * 4, Link(20e9, 20e9), {"memory_budget": 2 * GIB}),
        "least": (one_f_one_b(4, 8), [stage] * 4, Link(20e9, 20e9), {"memory_budget": 100 * MIB}),
        "breadth": (looped_bfs(2, 8), [stage] * 4, Link(20e9, 20e9), {"memory_budget": 4 * GIB}),
        "split": (zero_bubble, split, Link(1000, 1000), {}),
        "again": (one_f_one_b(4, 8), again, Link(9e9, 9e9), {"memory_budget": 9 * GIB, "variants": ways}),
    }
    for name, (orders, stages, link, given) in cases.items():
        plans = plan_pipeline(orders, stages, link, **given)
        yield name, [plans[0].seconds or 0.0, *(plan.peak_bytes or 0 for plan in plans)]


def record() -> dict[str, dict[str, Numbers]]:
    kinds = steps_of_models, steps_of_pipelines, plans_of_models, plans_of_pipelines
    return {kind.__name__: dict(kind()) for kind in kinds}


@pytest.mark.parametrize("kind", [steps_of_models, steps_of_pipelines])
def test_predictions_are_those_that_were_recorded(kind):
    for (name, numbers), (before, recorded) in zip(kind(), _recorded(kind.__name__).items(), strict=True):
        assert name == before
        assert numbers == pytest.approx(recorded, rel=1e-9, abs=1e-12), name


def test_plans_of_models_are_within_their_limit_and_no_slower_than_recorded():
    recorded = _recorded("plans_of_models")
    for name, (seconds, peak, limit) in plans_of_models():
        assert seconds <= 1.01 * recorded[name][0], name
        assert peak <= (limit or 1.01 * recorded[name][1]), name


def test_plans_of_pipelines_are_no_slower_and_no_larger_than_recorded():
    recorded = _recorded("plans_of_pipelines")
    for name, (seconds, *peaks) in plans_of_pipelines():
        before, *levels = recorded[name]
        assert seconds <= 1.01 * before, name
        assert max(peaks) <= 1.01 * max(levels), name


def _recorded(kind: str) -> dict[str, Numbers]:
    found: dict[str, Numbers] = json.loads(RECORDED.read_text(encoding="utf-8"))[kind]
    return found


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in record().items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
