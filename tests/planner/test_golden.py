"""Plans that were recorded once never get worse.

``python tests/planner/test_golden.py`` records them anew.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline_cases import interleaved_1f1b, looped_bfs
from planning import GIB, MIB, convex

from actoffload.planner import choose, plan_pipeline
from actoffload.schedule import (
    DefaultSchedule,
    LayerCost,
    Link,
    Saved,
    StageCost,
    one_f_one_b,
    read_order,
    simulate,
)
from actoffload.schedule.simulate import rank_plans

RECORDED = Path(__file__).with_name("golden.json")
Numbers = list[float]


def _split(step: str) -> list[str]:
    return [step.replace("B", "I"), step.replace("B", "W")] if "B" in step else [step]


def plans_of_models() -> Iterator[tuple[str, Numbers]]:
    """Yield seconds, peak and limit of each plan."""
    models = {
        "alike": [convex()] * 16,
        "gradients": [convex(200 * (12 - k)) for k in range(12)],
        "slow host": [convex(3000 + 100 * (8 - k), 0.008) for k in range(8)],
        "offload alone": [convex()[:1]] * 10,
        "one in two": [convex()[: 4 if k % 2 else 1] for k in range(10)],
    }
    for name, groups in models.items():
        names = [f"h.{k}" for k in range(len(groups))]
        for rate in (1e10, 5e10):
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
    halves = LayerCost(1.0, 2.0, (Saved(60, 0.5, 0.5), Saved(40)), weight_backward=1.0)
    stage = StageCost((group,) * 4, boundary_bytes=16 * MIB)
    split = [StageCost((halves,) * 2)] + [StageCost((halves,) * 2, split=True)] * 3
    zero_bubble = [read_order(part for step in order for part in _split(str(step))) for order in one_f_one_b(4, 8)]
    ways = {k: (convex(),) * 4 for k in range(4)}
    again = [StageCost((convex()[0].cost,) * 4)] * 4
    cases: dict[str, tuple[Any, ...]] = {
        "eight ranks": (one_f_one_b(8, 32), [stage] * 8, Link(10e9, 10e9), {"budget": 3680 * MIB}),
        "interleaved": (
            *(interleaved_1f1b(2, 16), [stage] * 4),
            *(Link(13e9, 13e9, both=20e9), {"budget": 1872 * MIB}),
        ),
        "fraction": (one_f_one_b(4, 16), [stage] * 4, Link(40e9, 40e9), {"fraction": 0.5}),
        "delta": (one_f_one_b(4, 16), [stage] * 4, Link(40e9, 40e9), {"delta_bytes_per_rank": 256 * MIB}),
        "inflight": (
            one_f_one_b(4, 16),
            [stage] * 4,
            Link(12e9, 12e9),
            {"budget": 2624 * MIB, "max_inflight": 2},
        ),
        "budget": (one_f_one_b(4, 16), [stage] * 4, Link(20e9, 20e9), {"budget": 2 * GIB}),
        "least": (one_f_one_b(4, 8), [stage] * 4, Link(20e9, 20e9), {"budget": 100 * MIB}),
        "breadth": (looped_bfs(2, 8), [stage] * 4, Link(20e9, 20e9), {"budget": 4 * GIB}),
        "split": (zero_bubble, split, Link(1000, 1000), {"budget": 200}),
        "again": (one_f_one_b(4, 8), again, Link(9e9, 9e9), {"budget": 9 * GIB, "variants": ways}),
    }
    for name, (orders, stages, link, given) in cases.items():
        budget = given.pop("budget", None)
        plans = plan_pipeline(rank_plans(orders, stages), stages, link, budgets=[budget] * len(orders), **given)
        yield name, [plans[0].seconds or 0.0, *(plan.peak_bytes or 0 for plan in plans)]


def record() -> dict[str, dict[str, Numbers]]:
    kinds = plans_of_models, plans_of_pipelines
    return {kind.__name__: dict(kind()) for kind in kinds}


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
