"""Events of a step, actions on layers, and the plan that maps events to actions.

A plan is data: the engine executes it, `simulate` predicts its cost, and the documentation draws it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

from .._arguments import check_fits, check_kind, check_kinds, check_whole
from .._text import (
    Table,
    UnreadableError,
    fold,
    fold_names,
    milliseconds,
    numberless,
    read,
    register,
    size,
    size_or_dash,
    written,
)


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
    - ``RELEASE`` makes compute wait for the copies and frees the device memory.
    - ``RELOAD`` allocates device memory and queues the copies to the device, in the order in which backward needs them.
    """

    OFFLOAD = "offload"
    RELEASE = "release"
    RELOAD = "reload"


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
        return f"{self.do.value} layer {self.layer}"


# What all plans have


@dataclass(frozen=True, kw_only=True)
class AnyPlan:
    """What plans of models and of pipelines have in common: expected costs, and the reason."""

    seconds: float | None = None
    baseline_seconds: float | None = None
    peak_bytes: int | None = None
    because: str = ""

    WORK: ClassVar[tuple[str, ...]] = ()  # the fields that say what is done

    @property
    def work(self) -> tuple[Any, ...]:
        """What is done, whatever is expected of it."""
        return tuple(getattr(self, name) for name in self.WORK)

    @property
    def idle(self) -> bool:
        """Whether everything is kept."""
        return not any(self.work)

    def __reduce__(self) -> tuple[object, ...]:
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        plain: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()
        }
        return partial(type(self), **plain), ()

    def _expected(self, period: str, without: str) -> list[str]:
        """Return the expected peak and time, each if it is known; `without` says what the baseline is."""
        parts = [] if self.peak_bytes is None else [f"peak {size(self.peak_bytes)}"]
        if self.seconds is not None:
            beside = f", {milliseconds(self.baseline_seconds)} {without}" if self.baseline_seconds else ""
            parts.append(f"{period} {milliseconds(self.seconds)}{beside}")
        return parts

    def _text(self, table: str, expected: str, *more: str) -> str:
        """Return a table with what is expected and the reason below."""
        below = f"Expected: {expected}." if expected else "", self.because, *more
        return "\n\n".join(filter(None, (table, " ".join(filter(None, below)))))


# The plan of a model


NO_BYTES = "No bytes are known: no pass so far saved a tensor that can be offloaded."


@dataclass(frozen=True)
class Plan(AnyPlan):
    """Which actions follow which events in one pass, and what that is expected to cost.

    ``print`` gives a table by group; while no sizes are given, the actions in order.

    Parameters
    ----------
    model_layers : int
        Number of layers, or groups, in one pass; at least 1.
    steps : mapping of Event to tuple of Action
        What is done at an event, in order.  Each layer is offloaded, released and reloaded at most once, in this order.
    names : tuple of str
        The layers, in execution order; by default their numbers.  A group that runs twice comes twice.
    nbytes : tuple of int
        Bytes that each layer saves and that could be offloaded, 0 if not known; empty if no sizes are given.
    seconds, baseline_seconds : float, optional
        Expected time of a step, and without offloading.
    peak_bytes, baseline_peak_bytes : int, optional
        Expected peak of device memory in forward and backward, and without offloading and recomputation.
    because : str
        Why this plan was chosen, in sentences; may be empty.
    recomputed_nbytes : tuple of int
        Bytes that each layer computes again in backward instead of saving them; empty if none is recomputed.
    recompute_seconds : float
        Expected time that backward takes longer for it.
    saves : tuple
        For each layer None if it is not recomputed, otherwise the names of the operators whose outputs are saved, such
        as ``aten.mm.default#0`` for the first matrix product; empty if no layer is recomputed.
    holds : bool
        Whether what is made again stays on the device until its last use.  Otherwise what is cheap to make is freed and
        made once more, which takes less memory.

    Raises
    ------
    ValueError
        If a layer does not exist, an action comes twice, the actions of a layer are out of order, or there are not as
        many names or sizes as layers.

    Examples
    --------
    >>> from actoffload.schedule import DefaultSchedule
    >>> plan = DefaultSchedule(num_layers=1, model_layers=3).plan()
    >>> print(plan)
    forward start of layer 0: offload layer 0
    forward start of layer 2: release layer 0
    backward end of layer 2: reload layer 0
    >>> plan.offloaded
    (0,)
    """

    model_layers: int
    steps: Mapping[Event, tuple[Action, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    nbytes: tuple[int, ...] = ()
    recomputed_nbytes: tuple[int, ...] = ()
    recompute_seconds: float = 0.0
    saves: tuple[tuple[str, ...] | None, ...] = ()
    holds: bool = False
    baseline_peak_bytes: int | None = None

    WORK = ("steps", "saves", "holds")

    def __post_init__(self) -> None:
        check_whole(model_layers=self.model_layers, least=1)
        check_kind(Mapping, steps=self.steps)
        object.__setattr__(self, "steps", MappingProxyType({e: tuple(a) for e, a in self.steps.items()}))
        check_kinds(str, names=self.names)
        object.__setattr__(self, "names", tuple(self.names) or tuple(map(str, range(self.model_layers))))
        for name in ("names", "nbytes", "recomputed_nbytes", "saves"):
            entries = tuple(getattr(self, name))
            object.__setattr__(self, name, entries)
            if entries and len(entries) != self.model_layers:
                raise ValueError(
                    f"{name} has {len(entries)} entries, but the plan has {self.model_layers} layers; "
                    "give one for each layer."
                )
        for nbytes in (*self.nbytes, *self.recomputed_nbytes):
            check_whole(nbytes=nbytes, least=0)
        for saves in filter(None, self.saves):
            check_kinds(str, saves=saves)
        check_whole(peak_bytes=self.peak_bytes, baseline_peak_bytes=self.baseline_peak_bytes, optional=True)
        times = {name: getattr(self, name) for name in ("seconds", "baseline_seconds", "recompute_seconds")}
        known = {name: value for name, value in times.items() if value is not None}
        check_fits("seconds, 0 or more", lambda value: value >= 0, **known)
        check_kind(str, because=self.because)
        check_kind(bool, "True or False", holds=self.holds)
        self._check()

    @classmethod
    def of(cls, model_layers: int, calls: Iterable[tuple[Event, Action]], **more: Any) -> Self:
        """Return the plan in which each action follows its event; `more` are other parameters by name."""
        steps: dict[Event, tuple[Action, ...]] = {}
        for event, action in calls:
            steps[event] = (*steps.get(event, ()), action)
        return cls(model_layers, steps, **more)

    def __hash__(self) -> int:
        return hash((self.names, frozenset(self.steps.items()), self.nbytes))

    @property
    def offloaded(self) -> tuple[int, ...]:
        """The layers to offload, ascending."""
        return tuple(sorted(a.layer for acts in self.steps.values() for a in acts if a.do is Do.OFFLOAD))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Positions of the groups that are recomputed, ascending; what they still save is kept or offloaded."""
        return tuple(k for k, saves in enumerate(self.saves) if saves is not None)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are offloaded."""
        return sum(self.nbytes[k] for k in self.offloaded) if self.nbytes else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that could be offloaded and are kept."""
        return sum(self.nbytes) - self.offloaded_bytes

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

    def __str__(self) -> str:
        if not self.nbytes:
            lines = [
                f"{event}: {', '.join(map(str, self.steps[event]))}" for event in self.events() if self.steps.get(event)
            ]
            return "\n".join(lines) or f"nothing is offloaded in {self.model_layers} layers"
        offloaded, again = set(self.offloaded), set(self.recomputed)
        less = self.recomputed_nbytes or (0,) * len(self.names)
        groups = [(name, k in offloaded, k in again, less[k], self.nbytes[k]) for k, name in enumerate(self.names)]
        rows = []
        for alike in fold(groups, lambda group: (numberless(group[0]), *group[1:])):
            number, (_, leaves, recomputed, saved_less, nbytes) = len(alike), alike[0]
            sizes = (0, number * nbytes) if leaves else (number * nbytes, 0)
            name = fold_names(group[0] for group in alike)
            rows.append(self._row(name, number, sizes, number * saved_less, recomputed))
        total = self.kept_bytes, self.offloaded_bytes
        rows.append(self._row("", len(self.names), total, sum(less), bool(again)))
        header = ("group", "number", "kept", "offloaded", *(["recomputed"] if again else []))
        table = Table(header, tuple(rows), left=1, sums=True)
        return self._text(str(table), self.expected, "" if any(self.nbytes) or any(less) else NO_BYTES)

    def _row(self, name: str, number: int, sizes: tuple[int, int], less: int, recomputed: bool) -> tuple[str, ...]:
        """Return a line; a recomputed group for which the bytes are not known has "yes"."""
        cells = list(map(size_or_dash, (*sizes, *([less] if self.recomputed else []))))
        if recomputed and not less:
            cells[-1] = "yes"
        return (name, str(number), *cells)

    @property
    def expected(self) -> str:
        """The expected peak and time of a pass, with what recomputation takes of it; empty if they are not known."""
        # No pass without fits, so its time is a sum over groups that were measured beside copies.
        without = "estimated without offloading and recomputing" if self.recomputed else "without offloading"
        parts = self._expected("pass", without)
        if self.recompute_seconds > 0:
            parts.append(f"{milliseconds(self.recompute_seconds)} of it to recompute")
        return "; ".join(parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file.

        Parameters
        ----------
        path : str or path-like
            Replaced if it exists.
        """
        Path(path).write_bytes(written(self, indent=1))  # so that versions of a plan can be compared by line

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from a file that `save` wrote.

        Parameters
        ----------
        path : str or path-like
            The file.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If the file has no plan of this version of actoffload.
        """
        try:
            plan = read(Path(path).read_bytes())
            check_kind(cls, plan=plan)
        except (UnreadableError, TypeError) as error:
            raise ValueError(
                f"{path} is no plan that this version of actoffload can read ({error}); write it with `save` of a plan."
            ) from error
        return cast(Self, plan)

    def _check(self) -> None:
        times = {event: k for k, event in enumerate(self.events())}
        places: dict[Action, tuple[int, int]] = {}  # of the event, and of the action at the event
        for event, acts in self.steps.items():
            if event not in times:
                raise ValueError(f"The plan names the {event}, but its layers are 0 to {self.model_layers - 1}.")
            for k, act in enumerate(acts):
                if not 0 <= act.layer < self.model_layers:
                    raise ValueError(f"The plan would {act}, but its layers are 0 to {self.model_layers - 1}.")
                if act in places:
                    raise ValueError(f"The plan would {act} twice in one pass; once is enough.")
                places[act] = times[event], k
        for act, place in places.items():
            problem = _misplaced(act, place, places, times)
            if problem:
                raise ValueError(f"The plan would {act} {problem}.")


def _misplaced(
    act: Action, place: tuple[int, int], places: Mapping[Action, tuple[int, int]], times: Mapping[Event, int]
) -> str:
    """Return what is wrong with the place of an action among those of its layer; empty if nothing is."""
    layer = act.layer
    if act.do is Do.OFFLOAD:
        if place[0] < times[Event(When.FORWARD_START, layer)]:
            return "before its forward starts; move it there or later"
    else:
        before = Action(Do.RELEASE if act.do is Do.RELOAD else Do.OFFLOAD, layer)
        if before not in places or places[before] > place:
            return f"without, or before, the action '{before}'; add it earlier"
    if act.do is Do.RELEASE and place[0] < times[Event(When.FORWARD_END, layer)]:
        return "before its forward ends; move it there or later"
    if place[0] > times[Event(When.BACKWARD_START, layer)]:
        return "after its backward starts, when it is of no use; move it earlier"
    return ""


register(Plan, Event, When, Action, Do)
