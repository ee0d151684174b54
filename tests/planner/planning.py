"""Strategies for costs of whole steps, with gaps, other memory and temporaries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from actoffload.planner import Variant, choose
from actoffload.planner.search import Knobs, Ranks
from actoffload.schedule import LayerCost, Link, Plan, Saved
from actoffload.schedule.simulate import model_order, model_stages

__all__ = ["choose_plain", "groups", "leanest", "links", "model_ranks", "names_of", "steps"]

eighths = st.integers(0, 8).map(lambda k: k / 8)
seconds = st.integers(0, 12).map(lambda k: k / 4)
some_bytes = st.integers(0, 40).map(lambda k: k * 256)
bandwidths = st.sampled_from([512.0, 1024.0, 2048.0, 4096.0, 16384.0, float("inf")])
links = st.builds(Link, bandwidths, bandwidths, st.sampled_from([0.0, 0.125]))


@st.composite
def groups(draw: st.DrawFn, plain: bool = False) -> LayerCost:
    """Draw a group; a plain one has compute and saved tensors alone."""
    saved_at = sorted(draw(st.lists(eighths, max_size=4)))
    saved = tuple(Saved(draw(st.integers(1, 16)) * 256, at, draw(eighths)) for at in saved_at)
    cost = LayerCost(draw(seconds), draw(seconds), saved)
    if plain:
        return cost
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


def model_ranks(costs: Sequence[LayerCost], link: Link, among: Collection[int] | None = None) -> Ranks:
    """Return a model, of which some groups or all may be offloaded, as the planner runs it."""
    return Ranks([model_order(len(costs))], model_stages(costs), link, {}, Knobs(stages=among), model=True)


def leanest(costs: Sequence[LayerCost], link: Link, among: Collection[int] | None = None) -> int:
    """Return the smallest peak of all plans."""
    return model_ranks(costs, link, among).choices[0].leanest()
