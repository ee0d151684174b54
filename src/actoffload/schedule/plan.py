"""Events of a step, actions on layers, and the plan that maps events to actions.

A plan is data: the engine executes it, `simulate` predicts its cost, and the documentation draws it.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from .._arguments import check_kind, check_whole

__all__ = [
    "OUTSIDE",
    "Action",
    "Do",
    "Event",
    "Plan",
    "PlanFile",
    "Roles",
    "When",
    "leanest_calls",
    "number",
    "optional_number",
]


class When(enum.Enum):
    """The four events of a layer in one pass, in order."""

    FORWARD_START = "forward start"
    FORWARD_END = "forward end"
    BACKWARD_START = "backward start"
    BACKWARD_END = "backward end"


class Do(enum.Enum):
    """Actions on a layer's activations, in their order.

    - ``OFFLOAD`` at the layer's own ``FORWARD_START`` copies each tensor as soon as it is saved.  At any later event it
      queues the copies of everything that the layer has saved.
    - ``INCREMENTAL_RELEASE``, at the ``FORWARD_START`` of a later layer, frees the layer tensor by tensor: each tensor
      that the later layer saves frees as many bytes, once their own copies are done.  ``RELEASE`` must follow.
    - ``RELEASE`` makes compute wait for the copies and frees the device memory, or what is left of it.
    - ``RELOAD`` allocates device memory and queues the copies to the device, in the order in which backward needs them.
    """

    OFFLOAD = "offload"
    INCREMENTAL_RELEASE = "incremental release"
    RELEASE = "release"
    RELOAD = "reload"


def leanest_calls(layer: int) -> tuple[tuple[Event, Action], ...]:
    """Return the events and actions with which a layer takes the least memory: see `Roles.leanest`."""
    return (
        (Event(When.FORWARD_START, layer), Action(Do.OFFLOAD, layer)),
        (Event(When.FORWARD_END, layer), Action(Do.RELEASE, layer)),
        (Event(When.BACKWARD_END, layer + 1), Action(Do.RELOAD, layer)),
    )


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a pass: ``Event(When.FORWARD_START, 3)`` is the start of layer 3's forward."""

    when: When
    layer: int

    def __str__(self) -> str:
        return f"{self.when.value} of layer {self.layer}"


@dataclass(frozen=True, slots=True)
class Action:
    """An action on one layer: ``Action(Do.RELOAD, 0)``."""

    do: Do
    layer: int

    def __str__(self) -> str:
        how, _, what = self.do.value.rpartition(" ")
        return f"{what} layer {self.layer}{' incrementally' if how else ''}"


@dataclass(frozen=True)
class Plan:
    """Which actions follow which events in one pass over ``model_layers`` layers.

    Parameters
    ----------
    model_layers : int
        Number of layers in one pass; at least 1.
    steps : mapping of Event to tuple of Action
        What is done at an event, in order.  Each layer is offloaded, released and reloaded at most once, in this order.

    Raises
    ------
    ValueError
        If a layer does not exist, an action comes twice, or the actions of a layer are out of order.

    Examples
    --------
    >>> from actoffload.schedule import DefaultSchedule
    >>> print(DefaultSchedule(num_layers=1, model_layers=3).plan())
    forward start of layer 0: offload layer 0
    forward start of layer 2: release layer 0
    backward end of layer 2: reload layer 0
    """

    model_layers: int
    steps: Mapping[Event, tuple[Action, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole(model_layers=self.model_layers)
        if self.model_layers < 1:
            raise ValueError(f"model_layers is {self.model_layers}; a plan needs at least one layer.")
        check_kind(Mapping, steps=self.steps)
        object.__setattr__(self, "steps", MappingProxyType({e: tuple(a) for e, a in self.steps.items()}))
        self._check()

    @staticmethod
    def of(model_layers: int, calls: Iterable[tuple[Event, Action]]) -> Plan:
        """Return the plan in which each action follows its event."""
        steps: dict[Event, tuple[Action, ...]] = {}
        for event, action in calls:
            steps[event] = (*steps.get(event, ()), action)
        return Plan(model_layers, steps)

    def __reduce__(self) -> tuple[object, ...]:
        return Plan, (self.model_layers, dict(self.steps))

    def __hash__(self) -> int:
        return hash((self.model_layers, frozenset(self.steps.items())))

    def __str__(self) -> str:
        lines = [f"{event}: {', '.join(map(str, acts))}" for event in self.events() if (acts := self.steps.get(event))]
        return "\n".join(lines) or f"nothing is offloaded in {self.model_layers} layers"

    @property
    def offloaded(self) -> tuple[int, ...]:
        """The layers to offload, ascending."""
        return tuple(sorted(a.layer for acts in self.steps.values() for a in acts if a.do is Do.OFFLOAD))

    def events(self) -> Iterator[Event]:
        """All events of a sequential pass, in order."""
        for layer in range(self.model_layers):
            yield Event(When.FORWARD_START, layer)
            yield Event(When.FORWARD_END, layer)
        for layer in reversed(range(self.model_layers)):
            yield Event(When.BACKWARD_START, layer)
            yield Event(When.BACKWARD_END, layer)

    def at(self, when: When, layer: int) -> tuple[Action, ...]:
        """Return the actions that follow an event; empty for most."""
        return self.steps.get(Event(when, layer), ())

    def find(self, do: Do, layer: int) -> Event | None:
        """Return the event at which something is done to a layer, or None if it never is."""
        wanted = Action(do, layer)
        return next((event for event, acts in self.steps.items() if wanted in acts), None)

    def _check(self) -> None:
        order = {event: k for k, event in enumerate(self.events())}
        places: dict[Action, tuple[int, int]] = {}  # of the event, and of the action at the event
        for event, acts in self.steps.items():
            if event not in order:
                raise ValueError(f"The plan names the {event}, but its layers are 0 to {self.model_layers - 1}.")
            for k, act in enumerate(acts):
                if not 0 <= act.layer < self.model_layers:
                    raise ValueError(f"The plan would {act}, but its layers are 0 to {self.model_layers - 1}.")
                if act in places:
                    raise ValueError(f"The plan would {act} twice in one pass; once is enough.")
                places[act] = order[event], k
                if act.do is Do.INCREMENTAL_RELEASE and event.when is not When.FORWARD_START:
                    raise ValueError(
                        f"The plan would {act} at the {event}; that can only be at the forward start of a layer."
                    )
        for act, place in places.items():
            problem = self._misplaced(act, place, order, places)
            if problem:
                raise ValueError(f"The plan would {act} {problem}.")

    @staticmethod
    def _misplaced(
        act: Action, place: tuple[int, int], order: Mapping[Event, int], places: Mapping[Action, tuple[int, int]]
    ) -> str:
        """Return what is wrong with the place of an action among those of its layer; empty if nothing is."""
        layer = act.layer
        if act.do is Do.OFFLOAD:
            if place[0] < order[Event(When.FORWARD_START, layer)]:
                return "before its forward starts; move it there or later"
        else:
            before = Action(Do.RELEASE if act.do is Do.RELOAD else Do.OFFLOAD, layer)
            if before not in places or places[before] > place:
                return f"without, or before, the action '{before}'; add it earlier"
        if act.do is Do.INCREMENTAL_RELEASE:
            rest = Action(Do.RELEASE, layer)
            if places.get(rest, (-1, -1)) < place:
                return f"without the action '{rest}' after it; add that"
        if act.do in (Do.RELEASE, Do.INCREMENTAL_RELEASE) and place[0] < order[Event(When.FORWARD_END, layer)]:
            return "before its forward ends; move it there or later"
        if place[0] > order[Event(When.BACKWARD_START, layer)]:
            return "after its backward starts, when it is of no use; move it earlier"
        return ""


OUTSIDE = 1 << 30
"""Index of the layer of what is saved in no layer; larger than every other."""


@dataclass(frozen=True, slots=True)
class Roles:
    """A plan, and what the engine reads from it for every saved tensor."""

    plan: Plan
    stay: frozenset[int]  # layers that are not offloaded
    last_leaving: int  # the last layer that may be offloaded; -1 if there is none
    released_incrementally: frozenset[int]  # layers
    reached: frozenset[int]  # layers at whose start in backward something has to be done
    planned: bool  # transfers follow the plan; otherwise the program calls for each
    actions: Mapping[tuple[str, int], tuple[Action, ...]]  # by the name of the event and the layer
    freed_later: frozenset[int] = frozenset()  # offloaded layers that are still on the device when backward begins

    @staticmethod
    def of(plan: Plan, *, planned: bool | None = None) -> Roles:
        """Return the roles in a plan; without steps and `planned`, the program calls for each transfer."""
        steps = [action for actions in plan.steps.values() for action in actions]
        return Roles(
            plan,
            stay=frozenset((*range(plan.model_layers), OUTSIDE)) - set(plan.offloaded),
            last_leaving=max(plan.offloaded, default=-1 if planned else OUTSIDE - 1),
            released_incrementally=frozenset(act.layer for act in steps if act.do is Do.INCREMENTAL_RELEASE),
            reached=_reached(plan),
            planned=bool(steps) if planned is None else planned,
            actions={(event.when.name, event.layer): actions for event, actions in plan.steps.items()},
            freed_later=frozenset(plan.offloaded) - _freed_in_forward(plan),
        )

    @staticmethod
    def keep_all(layers: int) -> Roles:
        """Return the roles in a plan that offloads nothing."""
        return Roles.of(Plan(max(layers, 1)), planned=True)

    @staticmethod
    @lru_cache(maxsize=64)
    def leanest(layers: int) -> Roles:
        """Return the roles in the plan with the smallest peak: each layer leaves as soon as its forward has ended.

        It is reloaded right before its backward; the last one stays.  Compute waits for every copy.
        """
        calls = [call for k in range(layers - 1) for call in leanest_calls(k)]
        return Roles.of(Plan.of(max(layers, 1), calls), planned=True)

    @staticmethod
    def offload_all() -> Roles:
        """Return roles for any number of layers, each of which leaves when its forward has ended.

        For a pass whose layers are not known before.  Each is reloaded right before its backward.
        """
        return Roles(
            Plan(1),
            stay=frozenset((OUTSIDE,)),
            last_leaving=OUTSIDE - 1,
            released_incrementally=frozenset(),
            reached=frozenset(),
            planned=True,
            actions=_EveryLayer(),
        )


class _EveryLayer(Mapping[tuple[str, int], tuple[Action, ...]]):
    """The actions of `Roles.offload_all`, for any number of layers."""

    def __getitem__(self, event: tuple[str, int]) -> tuple[Action, ...]:
        name, layer = event
        if name == When.FORWARD_START.name:
            return (Action(Do.OFFLOAD, layer),)
        if name == When.FORWARD_END.name:
            return (Action(Do.RELEASE, layer),)
        if name == When.BACKWARD_START.name:  # of the last layer, which nothing runs behind
            return (Action(Do.RELOAD, layer),)
        if name == When.BACKWARD_END.name and layer:
            return (Action(Do.RELOAD, layer - 1),)
        raise KeyError(event)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _freed_in_forward(plan: Plan) -> frozenset[int]:
    """Return the layers that a plan releases in the forward, and does not reload before backward begins."""
    forward = [
        action
        for event, actions in plan.steps.items()
        if event.when in (When.FORWARD_START, When.FORWARD_END)
        for action in actions
    ]
    reloaded = {action.layer for action in forward if action.do is Do.RELOAD}
    return frozenset({action.layer for action in forward if action.do is Do.RELEASE} - reloaded)


def _reached(plan: Plan) -> frozenset[int]:
    """Return the layers whose start in backward the engine must see for a plan; backward ends above them."""
    events = [event for event in plan.steps if event.when in (When.BACKWARD_START, When.BACKWARD_END)]
    before = {event.layer - 1 for event in events if event.when is When.BACKWARD_END}
    return frozenset({*plan.offloaded, *(event.layer for event in events), *before})


# Files

_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class PlanFile:
    """A kind of plan file."""

    kind: str  # what the file has, as errors name it
    version: int  # of the content
    written_by: str  # the call that writes such a file, as errors name it

    def write(self, path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
        """Write the content, with one entry a line."""
        entries = {"format": f"actoffload {self.kind}", "version": self.version, **content}
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
        Path(path).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")

    def read(self, path: str | os.PathLike[str], plan_of: Callable[[dict[str, Any]], _Plan]) -> _Plan:
        """Return what a function makes of the content; a `ValueError` if it fails, or the file is of another kind."""
        text = Path(path).read_bytes()
        try:
            content = json.loads(text)
            if (content["format"], content["version"]) != (f"actoffload {self.kind}", self.version):
                raise ValueError(f"expected actoffload {self.kind} of version {self.version}")
            return plan_of(content)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is no {self.kind} that this version of actoffload can read ({error!r}); "
                f"write it with `{self.written_by}`."
            ) from error


def number(value: Any, *types: type) -> Any:
    """Return a number of one of the types, int if none is given; raise a `ValueError` for others and negative ones."""
    if type(value) not in (types or (int,)) or not value >= 0:
        raise ValueError(f"{value!r} is no number that was expected")
    return value


def optional_number(value: Any, *types: type) -> Any:
    """Return None, or what `number` returns."""
    return None if value is None else number(value, *types)
