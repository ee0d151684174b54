"""From what the ranks exchanged to the plans of all of them; every rank makes the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schedule.pipeline import Chunk, Computation, Moment, StageCost, Transfer, used_in
from ..schedule.pipeline_plan import PipelinePlan
from ..schedule.pipeline_simulation import simulate_pipeline
from ..schedule.costs import Link
from .exchange import Measured

__all__ = ["Limits", "decision", "plans_of"]


@dataclass(frozen=True)
class Limits:
    """What the arguments of `offload` allow; None for no limit."""

    fraction: float | None = None  # of the groups of a stage
    max_inflight: int | None = None  # groups that are copied at a time
    delta_bytes_per_rank: int | None = None  # so much less is offloaded on each rank than on the one before
    memory_budget: int | None = None  # bytes of device memory


def plans_of(measured: Sequence[Measured], limits: Limits):
    plans = []
    for m in measured:
        splits = {s: bool(c.splits) for s, c in m.costs.items()}
        base = PipelinePlan(m.rank, m.order, m.names, splits=splits)
        tr = {}
        for (s, mb), (f, a, b) in used_in(m.order, splits).items():
            n = len(m.names[s])
            for g in range(n):
                c = Chunk(s, mb, g)
                rel = Moment(f, g + 1)
                use = base.first_use(c)
                rl = Moment(use.step, max(use.position - 1, 0))
                rl = max(rl, rel)
                ag = Moment(b, 0) if a != b and mb % 2 else None
                if (g + mb) % 3 == 2:
                    continue
                tr[c] = Transfer(rel, rl, ag)
        plans.append(
            PipelinePlan(
                m.rank,
                m.order,
                m.names,
                tr,
                splits,
                nbytes={s: tuple(g.nbytes for g in c.groups) for s, c in m.costs.items()},
            )
        )
    stages = {s: c for m in measured for s, c in m.costs.items()}
    sim = simulate_pipeline([m.order for m in measured], [stages[k] for k in sorted(stages)], measured[0].link, plans)
    return tuple(plans), [r.peak_bytes for r in sim.ranks]


def decision(plans):
    return str(plans)
