"""Training programs as data: layers, schedule, and the steps of each pass in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hypothesis import strategies as st

from actoffload.schedule.plan import Plan

from .models import DEVICE_KINDS, KINDS, STREAM_KINDS
from .plans import group_plans, plans


@dataclass(frozen=True)
class Forward:
    """A forward that completes, or stops after layer `stop`, or raises inside of it."""

    run: int
    stop: int | None = None
    raises: bool = False


@dataclass(frozen=True)
class Backward:
    """A backward; with `fails` it raises on the way, with `aside` it runs on a side stream."""

    run: int
    retain: bool = False
    fails: bool = False
    aside: bool = False


@dataclass(frozen=True)
class Drop:
    """Drop a graph together with the output of its forward."""

    run: int


@dataclass(frozen=True)
class Validate:
    """A forward without gradients."""


Step: TypeAlias = Forward | Backward | Drop | Validate


@dataclass(frozen=True)
class Program:
    """A training program; its passes are numbered in the order of their forwards."""

    layers: Sequence[Sequence[str]]  # the kinds of the operations of each
    offload: int | Plan | None  # layers to offload with the default schedule; None for manual synchronization
    steps: Sequence[Step]
    limit: int | None = None  # of host memory in bytes
    one_stream: bool = False  # with manual synchronization: for all copies


@st.composite
def programs(
    draw: st.DrawFn, *, manual: bool = False, planned: bool = False, streams: bool = False, limited: bool = False
) -> Program:
    """Draw a program.

    `planned` programs follow any legal plan.  `streams` adds work on side streams and on a second device.
    """
    kinds = sorted(KINDS) + (2 * sorted(STREAM_KINDS) + sorted(DEVICE_KINDS) if streams else [])
    operations = st.lists(st.sampled_from(kinds), min_size=1, max_size=2)
    layers = draw(st.lists(operations, min_size=2, max_size=5))
    if streams and not any(kind in STREAM_KINDS or kind in DEVICE_KINDS for ops in layers for kind in ops):
        layers[0] = [draw(st.sampled_from(sorted(STREAM_KINDS) + sorted(DEVICE_KINDS)))]
    offload: int | Plan | None = None
    if planned:
        offload = draw(st.one_of(plans(len(layers)), group_plans(len(layers))))
    elif not manual:
        offload = draw(st.integers(1, len(layers) - 1))
    limit = draw(st.integers(0, 12).map(lambda k: 1024 * k)) if limited else None
    drawn = draw(steps(len(layers), aside=streams))
    return Program(layers, offload, drawn, limit, manual and draw(st.booleans()))


@st.composite
def steps(draw: st.DrawFn, depth: int, *, aside: bool, passes: int = 3) -> list[Step]:
    """Draw forwards of some layers, and backwards of their graphs, in any order."""
    found: list[Step] = []
    alive: list[int] = []
    begun, retained, count = 0, 0, draw(st.integers(1, passes))
    while begun < count or alive:
        what = draw(st.sampled_from(["forward", "backward", "backward", "other"]))
        if begun < count and (what == "forward" or not alive):
            found.append(draw(_forward(begun, depth)))
            if not (isinstance(found[-1], Forward) and found[-1].raises):
                alive.append(begun)
            begun += 1
        elif what == "other" and begun < count:
            found.append(Validate())
        elif what == "backward":
            run = draw(st.sampled_from(alive))
            retain = retained < 2 and draw(st.booleans())
            retained += retain
            found.append(Backward(run, retain, draw(st.integers(0, 3)) == 0, aside and draw(st.booleans())))
            if not retain:
                alive.remove(run)
        elif alive:
            found.append(Drop(draw(st.sampled_from(alive))))
            alive.remove(found[-1].run)  # type: ignore[union-attr]
    return found


@st.composite
def _forward(draw: st.DrawFn, run: int, depth: int) -> Forward:
    how = draw(st.integers(0, 5))
    if how > 1:
        return Forward(run)
    return Forward(run, draw(st.integers(0, depth - 1)), raises=how == 0)
