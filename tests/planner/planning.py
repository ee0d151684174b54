"""Costs of whole steps: drawn ones with gaps, other memory and temporaries, and groups that may be recomputed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from actoffload.planner import Variant, choose
from actoffload.planner.placement import Knobs
from actoffload.planner.search import RanksAsRun
from actoffload.schedule import LayerCost, Link, Plan, Saved
from actoffload.schedule.simulate import model_stages

__all__ = ["GIB", "MIB", "choose_plain", "convex", "groups", "leanest", "links", "model_ranks", "names_of", "steps"]

MIB, GIB = 2**20, 2**30

eighths = st.integers(0, 8).map(lambda k: k / 8)
seconds = st.integers(0, 12).map(lambda k: k / 4)
some_bytes = st.integers(0, 40).map(lambda k: k * 256)
bandwidths = st.sampled_from([512.0, 1024.0, 2048.0, 4096.0, 16384.0, float("inf")])
links = st.builds(Link, bandwidths, bandwidths)


@st.composite
def groups(draw: st.DrawFn, plain: bool = False) -> LayerCost:
    """Draw a group; a plain one has compute and saved tensors alone."""
    saved_at = sorted(draw(st.lists(eighths, max_size=4)))
    saved = tuple(Saved(draw(st.integers(1, 16)) * 256, at, draw(eighths)) for at in saved_at)
    if plain:
        return LayerCost(draw(seconds) + 0.25, draw(seconds) + 0.25, saved)
    cost = LayerCost(draw(seconds), draw(seconds), saved)
    return replace(
        cost,
        gap_forward=draw(seconds),
        gap_backward=draw(seconds),
        other_bytes=tuple(draw(some_bytes) for _ in range(4)),
        forward_temporary=draw(some_bytes),
        backward_temporary=draw(some_bytes),
        gap_forward_temporary=draw(some_bytes),
        gap_backward_temporary=draw(some_bytes),
        kept_bytes=draw(some_bytes),
        unpacks_at_once=draw(st.booleans()),
    )


@st.composite
def steps(draw: st.DrawFn, most: int = 8, plain: bool = False) -> list[LayerCost]:
    """Draw the groups of a step: all different, or of one or two kinds."""
    kinds = draw(st.lists(groups(plain), min_size=1, max_size=draw(st.sampled_from([1, 2, most]))))
    return [kinds[k % len(kinds)] for k in range(draw(st.integers(1, most)))]


def names_of(costs: Sequence[LayerCost]) -> list[str]:
    return [f"h.{k}" for k in range(len(costs))]


def choose_plain(costs: Sequence[LayerCost], link: Link, **given: Any) -> Plan:
    """Return the plan of groups that cannot be recomputed."""
    return choose(names_of(costs), [(Variant(cost),) for cost in costs], link, **given)


def model_ranks(costs: Sequence[LayerCost], link: Link) -> RanksAsRun:
    """Return a model as the planner runs it."""
    return RanksAsRun([Plan(len(costs))], model_stages(costs), link, {}, Knobs())


def leanest(costs: Sequence[LayerCost], link: Link) -> int:
    """Return the smallest peak of all plans."""
    return model_ranks(costs, link).profiles[0].leanest()


def convex(other: int = 0, host: float = 0.0) -> tuple[Variant, ...]:
    """Return the ways to run a group, from no replay to all of it."""
    ways = []
    for nbytes, more, temporary in ((1568, 0.0, 560), (736, 0.001, 1392), (192, 0.004, 1936), (64, 0.008, 2064)):
        even = LayerCost.even(nbytes * MIB, forward=0.009, backward=0.019 + more, pieces=4)
        cost = replace(
            even,
            forward_temporary=temporary * MIB,
            backward_temporary=temporary * MIB,
            other_bytes=(0, 0, other * MIB, other * MIB),
            host_forward=host if more else 0.0,
            host_backward=3 * host if more else 0.0,
        )
        ways.append(Variant(cost, (f"mm#{len(ways)}",) if ways else None))
    return tuple(ways)
