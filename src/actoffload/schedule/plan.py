"""Actions on layers, and the plan that says at which events of a rank they are done.

A plan is data: the engine executes it, `simulate` predicts its cost, and the documentation draws it.
"""

from __future__ import annotations

import enum
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import accumulate
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

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
from .orders import BORDERS, Computation, Event, Order, Step, When, model_order, used_in

NO_BYTES = "No bytes are known: no pass so far saved a tensor that can be offloaded."
OUTSIDE = 1 << 30
"""Index of the layer of what is saved in no layer; larger than every other."""


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

    __hash__ = object.__hash__


class Action(NamedTuple):
    """An action on what a layer saves for one microbatch: ``Action(Do.RELOAD, 0)``."""

    do: Do
    layer: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.do.value} layer {self.layer}{f', microbatch {self.microbatch}' if self.microbatch else ''}"


Steps = Mapping[Event, tuple[Action, ...]]
"""What is done at each event, in order."""


def steps_of(calls: Iterable[tuple[Event, Action]]) -> Steps:
    """Return what is done at each event, given actions behind their events."""
    steps = dict[Event, tuple[Action, ...]]()
    for event, action in calls:
        steps[event] = (*steps.get(event, ()), action)
    return steps


@dataclass(frozen=True)
class Plan:
    """Which actions follow which events in one pass, and what that is expected to cost.

    ``print`` gives a table by group; while no sizes are given, the actions in order.

    Parameters
    ----------
    model_layers : int
        Number of layers, or groups, in one pass; at least 1.
    steps : mapping of Event to tuple of Action
        What is done at an event, in order: each layer is offloaded, released and reloaded at most once, in this order,
        for each microbatch.
    names : tuple of str
        The layers, in execution order; by default their numbers.  A group that runs twice comes twice.
    nbytes : tuple of int
        Bytes that each layer saves and that could be offloaded, 0 if not known; empty if no sizes are given.
    recomputed_nbytes : tuple of int
        Bytes that each layer computes again in backward instead of saving them; empty if none is recomputed.
    recompute_seconds : float
        Expected time that backward takes longer for it.
    saves : tuple
        For each layer None if it is not recomputed, otherwise the names of the operators whose outputs are saved, such
        as ``aten.mm.default#0`` for the first matrix product; empty if no layer is recomputed.
    holds : bool
        Whether what is made again stays on the device until its last use, instead of being made once more.
    seconds, baseline_seconds : float, optional
        Expected time of a step, and without offloading.
    peak_bytes, baseline_peak_bytes : int, optional
        Expected peak of device memory in forward and backward, and without offloading and recomputation.
    saved_peak_bytes : int, optional
        Expected peak of the saved tensors of a rank alone.
    because : str
        Why this plan was chosen, in sentences; may be empty.
    manual : bool
        Whether the program calls for each transfer.
    rank, order, stages, splits : int, tuple of Step, tuple of int, tuple of int
        Of a plan for a rank of a pipeline: its number, what it computes in order, the stage of each layer, ascending,
        and the stages whose input backward uses what they save.

    Raises
    ------
    ValueError
        If a layer does not exist, an action comes twice or out of order, or there are not as many names as layers.

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
    steps: Steps = field(default_factory=dict)
    names: tuple[str, ...] = ()
    nbytes: tuple[int, ...] = ()
    recomputed_nbytes: tuple[int, ...] = ()
    recompute_seconds: float = 0.0
    saves: tuple[tuple[str, ...] | None, ...] = ()
    holds: bool = False
    seconds: float | None = None
    baseline_seconds: float | None = None
    peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    saved_peak_bytes: int | None = None
    because: str = ""
    manual: bool = False
    rank: int | None = None
    order: Order = ()
    stages: tuple[int, ...] = ()
    splits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_whole(model_layers=self.model_layers, least=1 if self.rank is None else 0)
        check_kind(Mapping, steps=self.steps)
        object.__setattr__(self, "steps", MappingProxyType({e: tuple(a) for e, a in self.steps.items()}))
        check_kinds(str, names=self.names)
        object.__setattr__(self, "names", tuple(self.names) or tuple(map(str, range(self.model_layers))))
        for name in ("names", "nbytes", "recomputed_nbytes", "saves", "stages"):
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
        check_kind(bool, "True or False", holds=self.holds, manual=self.manual)
        check_kinds(Step, order=self.order)
        self._check()

    @classmethod
    def of(cls, model_layers: int, calls: Iterable[tuple[Event, Action]], **more: Any) -> Self:
        """Return the plan in which each action follows its event; `more` are other parameters by name."""
        return cls(model_layers, steps_of(calls), **more)

    @classmethod
    def of_rank(
        cls, rank: int, order: Sequence[Step], names: Mapping[int, Sequence[str]], splits: Collection[int] = ()
    ) -> Self:
        """Return the plan of a rank that keeps everything, with the names of the groups of each stage."""
        mine = sorted({step.stage for step in order})
        layers = [(stage, name) for stage in mine for name in names[stage]]
        return cls(
            len(layers),
            names=tuple(name for _, name in layers),
            rank=rank,
            order=tuple(order),
            stages=tuple(stage for stage, _ in layers),
            splits=tuple(stage for stage in mine if stage in splits),
        )

    def __hash__(self) -> int:
        return hash((self.names, frozenset(self.steps.items()), self.nbytes))

    def __reduce__(self) -> tuple[object, ...]:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return partial(type(self), **given | {"steps": dict(self.steps)}), ()

    # What is done

    @property
    def work(self) -> tuple[Any, ...]:
        """What is done, whatever is expected of it."""
        return self.steps, self.saves, self.holds

    @property
    def idle(self) -> bool:
        """Whether everything is kept."""
        return not any(self.work)

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        """The layers to offload, ascending; in a pipeline once for each microbatch."""
        return tuple(sorted(action.layer for action in self._offloads))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Positions of the groups that are recomputed, ascending; what they still save is kept or offloaded."""
        return tuple(k for k, saves in enumerate(self.saves) if saves is not None)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are offloaded, of all microbatches."""
        return sum(self.nbytes[k] for k in self.offloaded) if self.nbytes else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that could be offloaded and are kept."""
        sizes = zip(self.nbytes, self.forwards, strict=False)
        return sum(nbytes * number for nbytes, number in sizes) - self.offloaded_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that the plan needs, from each forward to the last backward; 0 if sizes are not known."""
        change = Counter[int]()
        for _, layer, microbatch in self._offloads if self.nbytes else ():
            saved, _, last = self.uses[self._stages[layer], microbatch]
            change[saved] += self.nbytes[layer]
            change[last] -= self.nbytes[layer]
        return max(accumulate(change[place] for place in sorted(change)), default=0)

    @cached_property
    def computed(self) -> Order:
        """The steps in order, also of a model."""
        return self.order or model_order(self.model_layers)

    def events(self) -> Iterator[Event]:
        """All events, in order: of a sequential pass, or of a step of a pipeline."""
        for step in self.computed:
            yield from self.events_of(step)

    def events_of(self, step: Step) -> tuple[Event, ...]:
        """Return the events of a step in order: the start of each layer of its stage as it is computed, and the end."""
        _, computation, microbatch = step
        start, end = BORDERS[computation]
        layers = self.layers.get(step.stage, range(0))
        ran = layers if computation is Computation.FORWARD else layers[::-1]
        events = [Event(start, layer, microbatch) for layer in ran]
        if ran:
            events.append(Event(end, ran[-1], microbatch))
        return tuple(events)

    def at(self, when: When, layer: int, microbatch: int = 0) -> tuple[Action, ...]:
        """Return the actions that follow an event; empty for most."""
        return self.steps.get(Event(when, layer, microbatch), ())

    def find(self, do: Do, layer: int, microbatch: int = 0) -> Event | None:
        """Return the event at which something is done to a layer, or None if it never is."""
        wanted = Action(do, layer, microbatch)
        return next((event for event, acts in self.steps.items() if wanted in acts), None)

    def first_use(self, layer: int, microbatch: int = 0) -> Event:
        """Return the event at which a backward first comes to what a layer saved."""
        _, first, _ = self.uses[self._stages[layer], microbatch]
        return Event(BORDERS[self.computed[first].computation][0], layer, microbatch)

    @cached_property
    def layers(self) -> Mapping[int, range]:
        """The layers of each stage."""
        found, first = dict[int, range](), 0
        for stage, count in Counter(self._stages).items():
            found[stage] = range(first, first + count)
            first += count
        return found

    def part(self, stage: int) -> slice:
        """Return where the layers of a stage are in `names`, `nbytes` and `saves`."""
        layers = self.layers.get(stage, range(0))
        return slice(layers.start, layers.stop)

    @property
    def _offloads(self) -> list[Action]:
        return [action for actions in self.steps.values() for action in actions if action.do is Do.OFFLOAD]

    @property
    def _stages(self) -> Sequence[int]:
        return self.stages or range(self.model_layers)

    @cached_property
    def uses(self) -> Mapping[tuple[int, int], tuple[int, int, int]]:
        """Where each microbatch of each stage is saved, and where it is first and last used."""
        return used_in(self.computed, self.splits)

    @cached_property
    def forwards(self) -> list[int]:
        """Number of microbatches for which each layer is computed."""
        number = Counter(stage for stage, _ in self.uses)
        return [number[stage] for stage in self._stages]

    # What the engine asks for each saved tensor, or each group

    @cached_property
    def stay(self) -> frozenset[int]:
        """The layers that are not offloaded, unless the program calls for it."""
        every = () if self.manual else (*range(self.model_layers), OUTSIDE)
        return frozenset(every).difference(self.offloaded)

    @cached_property
    def last_leaving(self) -> int:
        """The last layer that may be offloaded; of a microbatch of which none is, all count."""
        return max(self.offloaded, default=-1 if self.rank is None else self.model_layers)

    @cached_property
    def reached(self) -> frozenset[int]:
        """The layers at whose start in backward something has to be done: of a microbatch, for others as well."""
        if self.rank is not None:
            return frozenset(range(self.model_layers))
        backward = [event for event in self.steps if event.when in BACKWARD]
        before = (event.layer - 1 for event in backward if event.when is When.BACKWARD_END)  # it ends above them
        return frozenset(self.offloaded).union(before, (event.layer for event in backward))

    @cached_property
    def freed_later(self) -> frozenset[int]:
        """The offloaded layers that are still on the device when backward begins."""
        forward = {action for event, acts in self.steps.items() if event.when not in BACKWARD for action in acts}
        released = (k for k in self.offloaded if Action(Do.RELEASE, k) in forward)
        freed = {k for k in released if Action(Do.RELOAD, k) not in forward}
        return frozenset(self.offloaded if self.rank is None else ()) - freed

    # Text

    def __str__(self) -> str:
        if not self.nbytes:
            lines = [
                f"{event}: {', '.join(map(str, self.steps[event]))}" for event in self.events() if self.steps.get(event)
            ]
            return "\n".join(lines) or f"nothing is offloaded in {self.model_layers} layers"
        number, again, alone = Counter(self.offloaded), set(self.recomputed), self.rank is None
        less = self.recomputed_nbytes or (0,) * self.model_layers
        stages = (0,) * self.model_layers if alone else self._stages
        groups = [
            (self.names[k], stages[k], self.forwards[k], number[k], k in again, self.nbytes[k], less[k])
            for k in range(self.model_layers)
        ]
        rows = []
        for alike in fold(groups, lambda group: (numberless(group[0]), *group[1:])):
            count, (_, stage, forwards, offloaded, recomputed, nbytes, saved_less) = len(alike), alike[0]
            sizes = count * nbytes * (forwards - offloaded), count * nbytes * offloaded
            names = fold_names(group[0] for group in alike)
            title = (names, str(count)) if alone else (str(stage), names, f"{offloaded} of {forwards}")
            rows.append((*title, *self._sizes(sizes, count * saved_less, recomputed)))
        title = ("", str(self.model_layers)) if alone else ("", "", "")
        rows.append((*title, *self._sizes((self.kept_bytes, self.offloaded_bytes), sum(less), bool(again))))
        first = ("group", "number") if alone else ("stage", "group", "microbatches offloaded")
        header = (*first, "kept", "offloaded", *(["recomputed"] if again else []))
        table = str(Table(header, tuple(rows), left=len(first) - 1, sums=True))
        table = table if alone else f"rank {self.rank}\n{table}"
        expected = f"Expected: {self.expected}." if self.expected else ""
        below = expected, self.because, "" if any(self.nbytes) or any(less) else NO_BYTES
        return "\n\n".join(filter(None, (table, " ".join(filter(None, below)))))

    def _sizes(self, sizes: tuple[int, int], less: int, recomputed: bool) -> list[str]:
        """Return the sizes of a line; a recomputed group for which the bytes are not known has "yes"."""
        cells = list(map(size_or_dash, (*sizes, *([less] if self.recomputed else []))))
        if recomputed and not less:
            cells[-1] = "yes"
        return cells

    @property
    def expected(self) -> str:
        """The expected peak and time of a pass, with what recomputation takes of it; empty if they are not known."""
        # No pass without fits, so its time is a sum over groups that were measured beside copies.
        without = "estimated without offloading and recomputing" if self.recomputed else "without offloading"
        parts = [] if self.peak_bytes is None else [f"peak {size(self.peak_bytes)}"]
        if self.seconds is not None:
            beside = f", {milliseconds(self.baseline_seconds)} {without}" if self.baseline_seconds else ""
            parts.append(f"{'pass' if self.rank is None else 'step'} {milliseconds(self.seconds)}{beside}")
        if self.recompute_seconds > 0:
            parts.append(f"{milliseconds(self.recompute_seconds)} of it to recompute")
        return "; ".join(parts)

    # Files

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

    # Checks

    def _check(self) -> None:
        if list(self.stages) != sorted(self.stages):
            raise ValueError(f"stages is {self.stages}; the layers of one stage follow those of the one before it.")
        if not self.steps:
            return
        times = {event: k for k, event in enumerate(self.events())}
        computed = {(k, microbatch) for stage, microbatch in self.uses for k in self.layers.get(stage, ())}
        alone, last = self.rank is None, self.model_layers - 1
        unknown = f"but its layers are 0 to {last}" if alone else "which is not in its order"
        places: dict[Action, tuple[int, int]] = {}  # of the event, and of the action at the event
        for event, acts in self.steps.items():
            if event not in times:
                raise ValueError(f"The plan names the {event}, {unknown}.")
            for k, act in enumerate(acts):
                if act[1:] not in computed:
                    raise ValueError(f"The plan would {act}, {unknown}.")
                if act in places:
                    raise ValueError(f"The plan would {act} twice in one pass; once is enough.")
                places[act] = times[event], k
        for act, place in places.items():
            saved, used = times[Event(When.FORWARD_START, *act[1:])], times[self.first_use(*act[1:])]
            before = act._replace(do=Do.RELEASE if act.do is Do.RELOAD else Do.OFFLOAD)
            problem = ""
            if act != before and places.get(before, (inf,)) > place:
                problem = f"without, or before, the action '{before}'; add it earlier"
            elif place[0] < saved:
                problem = "before its forward starts; move it there or later"
            elif place[0] == saved and act.do is Do.RELEASE:
                problem = "before its forward ends; move it there or later"
            elif place[0] > used:
                problem = "after its backward starts, when it is of no use; move it earlier"
            if problem:
                raise ValueError(f"The plan would {act} {problem}.")


BACKWARD = When.BACKWARD_START, When.BACKWARD_END

register(Plan, Event, When, Action, Do, Step, Computation)
