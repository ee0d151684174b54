"""Events of a step, actions on layers, and the plan that maps events to actions.

A plan is data: the engine executes it, `simulate` predicts its cost, and the documentation draws it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["OUTSIDE", "Action", "Do", "Event", "Plan", "Roles", "When", "reserve"]


class When(enum.Enum):
    """The four events of a layer in one pass, in order."""

    FORWARD_START = "forward start"
    FORWARD_END = "forward end"
    BACKWARD_START = "backward start"
    BACKWARD_END = "backward end"


class Do(enum.Enum):
    """Actions on a layer's activations, in their order.

    ``OFFLOAD`` at the layer's own ``FORWARD_START`` copies each tensor as soon as it is saved.  At any later event it
    queues the copies of everything that the layer has saved.

    ``INCREMENTAL_RELEASE``, at the ``FORWARD_START`` of a later layer, frees the layer tensor by tensor: each tensor
    that the later layer saves frees as many bytes, once their own copies are done.  Optional; ``RELEASE`` must follow.

    ``RELEASE`` makes compute wait for the copies and frees the device memory, or what is left of it.

    ``INCREMENTAL_PREFETCH``, at the ``BACKWARD_START`` of a later layer, reloads the layer tensor by tensor into the
    bytes that the backward of the later layer frees beyond its first quarter (see `reserve`).  Optional; ``RELOAD``
    must follow.

    ``RELOAD`` allocates device memory and queues the copies to the device, or what is left of them, in the order in
    which backward needs them.
    """

    OFFLOAD = "offload"
    INCREMENTAL_RELEASE = "incremental release"
    RELEASE = "release"
    INCREMENTAL_PREFETCH = "incremental prefetch"
    RELOAD = "reload"


def reserve(nbytes: int) -> int:
    """Return how many bytes that the backward of a layer frees are not used for an incremental prefetch.

    Gradients and kernels allocate memory in backward, at different points in each layer.  If the prefetch used all
    freed bytes at once, the peak would rise by the difference: an eighth of a Llama layer on an H100.  So a quarter is
    reserved.

    Parameters
    ----------
    nbytes : int
        What the layer saved, in bytes.
    """
    return nbytes // 4


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
        if self.do is Do.INCREMENTAL_RELEASE:
            return f"release layer {self.layer} incrementally"
        if self.do is Do.INCREMENTAL_PREFETCH:
            return f"prefetch layer {self.layer} incrementally"
        return f"{self.do.value} layer {self.layer}"


@dataclass(frozen=True)
class Plan:
    """Which actions follow which events in one pass over ``model_layers`` layers.

    Parameters
    ----------
    model_layers : int
        Number of layers in one pass; at least 1.
    steps : mapping of Event to tuple of Action
        What is done when an event arrives, in order.  Every action belongs to a layer of the pass, and each
        layer is offloaded, released and reloaded at most once, in this order.

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
        if self.model_layers < 1:
            raise ValueError(f"model_layers is {self.model_layers}; a plan needs at least one layer.")
        object.__setattr__(self, "steps", MappingProxyType({e: tuple(a) for e, a in self.steps.items()}))
        self._check()

    def __getstate__(self) -> dict[str, object]:
        return {"model_layers": self.model_layers, "steps": dict(self.steps)}

    def __setstate__(self, state: dict[str, object]) -> None:
        object.__setattr__(self, "model_layers", state["model_layers"])
        object.__setattr__(self, "steps", MappingProxyType(state["steps"]))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash((self.model_layers, frozenset(self.steps.items())))

    def __str__(self) -> str:
        lines = [
            f"{event}: {', '.join(map(str, self.steps[event]))}" for event in self.events() if self.steps.get(event)
        ]
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
        seen: dict[Action, tuple[int, int]] = {}
        for event, acts in self.steps.items():
            if event not in order:
                raise ValueError(f"The plan names the {event}, but its layers are 0 to {self.model_layers - 1}.")
            for k, act in enumerate(acts):
                if not 0 <= act.layer < self.model_layers:
                    raise ValueError(f"The plan would {act}, but its layers are 0 to {self.model_layers - 1}.")
                if act in seen:
                    raise ValueError(f"The plan would {act} twice in one pass; once is enough.")
                only = {Do.INCREMENTAL_RELEASE: When.FORWARD_START, Do.INCREMENTAL_PREFETCH: When.BACKWARD_START}.get(
                    act.do, event.when
                )
                if event.when is not only:
                    raise ValueError(
                        f"The plan would {act} at the {event}; that can only be at the {only.value} of a layer."
                    )
                seen[act] = (order[event], k)
        for act, place in seen.items():
            self._check_order(act, place, order, seen)

    @staticmethod
    def _check_order(
        act: Action,
        place: tuple[int, int],
        order: Mapping[Event, int],
        seen: Mapping[Action, tuple[int, int]],
    ) -> None:
        layer = act.layer
        if act.do is Do.OFFLOAD:
            if place[0] < order[Event(When.FORWARD_START, layer)]:
                raise ValueError(f"The plan would {act} before its forward starts; move it there or later.")
        else:
            before = Action(Do.RELEASE if act.do in (Do.RELOAD, Do.INCREMENTAL_PREFETCH) else Do.OFFLOAD, layer)
            if before not in seen or seen[before] > place:
                raise ValueError(f"The plan would {act} without, or before, the action '{before}'; add it earlier.")
        behind = {Do.INCREMENTAL_RELEASE: Do.RELEASE, Do.INCREMENTAL_PREFETCH: Do.RELOAD}.get(act.do)
        if behind is not None and seen.get(Action(behind, layer), (-1, -1)) < place:
            raise ValueError(f"The plan would {act} without the action '{Action(behind, layer)}' after it; add that.")
        if act.do in (Do.RELEASE, Do.INCREMENTAL_RELEASE) and place[0] < order[Event(When.FORWARD_END, layer)]:
            raise ValueError(f"The plan would {act} before its forward ends; move it there or later.")
        begins = order[Event(When.BACKWARD_START, layer)]
        if place[0] > begins or (act.do is Do.INCREMENTAL_PREFETCH and place[0] == begins):
            raise ValueError(f"The plan would {act} after its backward starts, when it is of no use; move it earlier.")


OUTSIDE = 1 << 30
"""Index of the layer of what is saved in no layer; larger than every other."""


@dataclass(frozen=True, slots=True)
class Roles:
    """A plan, and what the engine reads from it for every saved tensor.

    Parameters
    ----------
    plan : Plan
        What to do at which event.
    stay : frozenset of int
        Layers that are not offloaded.
    last_leaving : int
        The last offloaded layer; the number of layers if there is none.
    released_incrementally : frozenset of int
        Layers that are released tensor by tensor.
    planned : bool
        Whether transfers follow the plan; otherwise the program calls for each.
    actions : mapping
        Actions by the name of the event and the layer.
    """

    plan: Plan
    stay: frozenset[int]
    last_leaving: int
    released_incrementally: frozenset[int]
    planned: bool
    actions: Mapping[tuple[str, int], tuple[Action, ...]]

    @staticmethod
    def of(plan: Plan, *, planned: bool | None = None) -> Roles:
        """Return the roles in a plan; without steps and `planned`, the program calls for each transfer."""
        leaving = plan.offloaded
        said = bool(plan.steps) if planned is None else planned
        stay = frozenset((*range(plan.model_layers), OUTSIDE)) - set(leaving)
        steps = (action for actions in plan.steps.values() for action in actions)
        released_incrementally = frozenset(action.layer for action in steps if action.do is Do.INCREMENTAL_RELEASE)
        last = leaving[-1] if leaving else plan.model_layers
        actions = {(event.when.name, event.layer): actions for event, actions in plan.steps.items()}
        return Roles(plan, stay, last, released_incrementally, said, actions)
