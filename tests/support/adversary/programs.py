"""Training programs as data: a tree of modules, what is offloaded, and the steps of each pass in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st

from actoffload.schedule.plan import Plan

from .models import DEVICE_KINDS, KINDS, STREAM_KINDS
from .plans import group_plans, plans

ONCE = {"first", "part", "fork", "failing"}
"""Operations whose recomputation gives another result."""


@dataclass(frozen=True)
class Node:
    """A module with operations of its own and child modules between them."""

    parts: tuple[Any, ...]  # kinds of operations and child modules, in execution order
    role: str = ""  # "group", "kept" or ""
    times: int = 1  # number of consecutive calls
    checkpointed: bool = False  # each call is in a checkpointed region

    def walk(self) -> Iterator[Node]:
        """Yield this node and its descendants in the order of registration."""
        yield self
        for part in self.parts:
            if isinstance(part, Node):
                yield from part.walk()


@dataclass(frozen=True)
class Forward:
    """A forward that completes, or stops after layer `stop`, or raises inside of it."""

    run: int
    stop: int | None = None
    raises: bool = False
    without: frozenset[int] = frozenset()  # modules that are skipped, by their number in `Node.walk`
    loop: bool = False  # the program calls the outermost modules, and not the model


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
    """A training program; its passes are numbered in the order of their forwards.

    `offload` has the number of layers to offload with the default schedule of a context, its plan, None for manual
    synchronization, or the arguments of `actoffload.offload`.
    """

    model: Node  # each part is a layer of a context
    offload: int | Plan | dict[str, Any] | None
    steps: Sequence[Step]
    limit: int | None = None  # of host memory in bytes, of a context
    one_stream: bool = False  # with manual synchronization: for all copies
    reentrant: bool = False  # checkpointed regions


def layers(*kinds: Sequence[str]) -> Node:
    """Return layers by the kinds of the operations of each."""
    return Node(tuple(Node(tuple(each)) for each in kinds))


def everything(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the outputs of every operator that may be saved."""
    return True


# Strategies


@st.composite
def programs(
    draw: st.DrawFn, *, manual: bool = False, planned: bool = False, streams: bool = False, limited: bool = False
) -> Program:
    """Draw a program with a context.

    `planned` programs follow any legal plan.  `streams` adds work on side streams and on a second device.
    """
    operations = st.lists(st.sampled_from(_kinds(streams)), min_size=1, max_size=2)
    drawn = draw(st.lists(operations, min_size=2, max_size=5))
    if streams and not any(kind in STREAM_KINDS or kind in DEVICE_KINDS for kinds in drawn for kind in kinds):
        drawn[0] = [draw(st.sampled_from(sorted(STREAM_KINDS) + sorted(DEVICE_KINDS)))]
    offload: int | Plan | None = None
    if planned:
        offload = draw(st.one_of(plans(len(drawn)), group_plans(len(drawn))))
    elif not manual:
        offload = draw(st.integers(1, len(drawn) - 1))
    limit = draw(st.integers(0, 12).map(lambda k: 1024 * k)) if limited else None
    steps = draw(_steps(len(drawn), aside=streams))
    return Program(layers(*drawn), offload, steps, limit, manual and draw(st.booleans()))


@st.composite
def programs_of_models(draw: st.DrawFn, *, streams: bool = False, recompute: bool = False) -> Program:
    """Draw a program with a model; at least three of its modules are groups, and `recompute` recomputes them."""
    kinds = [kind for kind in _kinds(streams) if not recompute or kind not in ONCE]
    outer = draw(st.lists(_node(kinds, 2), min_size=3, max_size=6))
    outer = [replace(node, role="group") if k < 3 else node for k, node in enumerate(outer)]
    mixed: list[Any] = []
    for node in outer:
        if draw(st.integers(0, 3)) == 0:
            mixed.append(draw(st.sampled_from(kinds)))
        mixed.append(node)
    root = Node(tuple(mixed), draw(st.sampled_from(["", "", "kept"])))
    options = {
        "num_layers": draw(st.sampled_from([None, None, 1, 2])),
        "max_inflight": draw(st.sampled_from([None, None, 1, 2])),
        "fraction": draw(st.sampled_from([1.0, 1.0, 0.5])),
        "max_host_bytes": draw(st.sampled_from([None, None, None, 4096])),
        "recompute": recompute and draw(st.sampled_from([True, [torch.ops.aten.mm.default], everything])),
    }
    steps = draw(_steps(len(root.parts), aside=streams, passes=4, modules=sum(1 for _ in root.walk())))
    return Program(root, options, steps, reentrant=draw(st.booleans()))


def _kinds(streams: bool) -> list[str]:
    return sorted(KINDS) + (2 * sorted(STREAM_KINDS) + sorted(DEVICE_KINDS) if streams else [])


@st.composite
def _node(draw: st.DrawFn, kinds: list[str], depth: int) -> Node:
    operation: st.SearchStrategy[Any] = st.sampled_from(kinds)
    part = st.one_of(operation, operation, _node(kinds, depth - 1)) if depth else operation
    parts = draw(st.lists(part, min_size=1, max_size=3))
    # What a region runs again must not depend on the forwards since, which skip other modules.
    again = all(isinstance(each, str) and each not in ONCE for each in parts) and draw(st.integers(0, 3)) == 0
    role = draw(st.sampled_from(["group", "group", "group", "kept", ""]))
    return Node(tuple(parts), role, draw(st.sampled_from([1, 1, 1, 1, 2])), again)


@st.composite
def _steps(draw: st.DrawFn, depth: int, *, aside: bool, passes: int = 3, modules: int = 0) -> list[Step]:
    """Draw forwards of some layers, and backwards of their graphs, in any order."""
    found: list[Step] = []
    alive: list[int] = []
    begun, retained, count = 0, 0, draw(st.integers(1, passes))
    while begun < count or alive:
        what = draw(st.sampled_from(["forward", "backward", "backward", "other"]))
        if begun < count and (what == "forward" or not alive):
            forward = draw(_forward(begun, depth, modules))
            found.append(forward)
            if not forward.raises:
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
            run = draw(st.sampled_from(alive))
            found.append(Drop(run))
            alive.remove(run)
    return found


@st.composite
def _forward(draw: st.DrawFn, run: int, depth: int, modules: int) -> Forward:
    how = draw(st.integers(0, 5))
    forward = Forward(run) if how > 1 else Forward(run, draw(st.integers(0, depth - 1)), raises=how == 0)
    if not modules:
        return forward
    most = draw(st.sampled_from([0, 0, 1, 3]))
    without = draw(st.frozensets(st.integers(1, max(1, modules - 1)), max_size=most))
    return replace(forward, without=without, loop=draw(st.integers(0, 3)) == 0)
