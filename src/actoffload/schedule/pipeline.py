"""The steps of one rank of a pipeline, and its plan: what is offloaded, when it is freed and when it is reloaded."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from .._arguments import check_kind, check_whole
from .._text import Table, size_or_dash
from .plan import AnyPlan, Do


class Computation(enum.Enum):
    """What a rank computes for one microbatch of one of its stages, with the letters that PyTorch uses."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    __hash__ = object.__hash__  # that of an enumeration hashes the name each time


class Step(NamedTuple):
    """One computation of a rank: ``Step(2, Computation.FORWARD, 0)`` is printed as ``2F0``."""

    stage: int
    computation: Computation
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.computation.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Step:
        """Return the step of a text such as ``2F0``.

        Raises
        ------
        ValueError
            If the text is no forward or backward of a microbatch.
        """
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no step of a pipeline; expected a stage, F, B, I or W, and a microbatch.")
        return Step(int(match[1]), Computation(match[2]), int(match[3]))


class Chunk(NamedTuple):
    """What one group of a stage saves in the forward of one microbatch; it is offloaded and reloaded as a whole."""

    stage: int
    microbatch: int
    group: int

    def __str__(self) -> str:
        return f"group {self.group} of stage {self.stage}, microbatch {self.microbatch}"


class Moment(NamedTuple):
    """When a rank can act; moments are ordered as they come.

    Parameters
    ----------
    step : int
        Position in the order of the rank.
    position : int
        Position in the step, in the order of execution: the start of the first group that runs in it is 0, and the end
        of a step with `n` groups is `n`.  Backward runs the groups in reverse order, so position 0 is where it comes to
        the last group.  A weight backward has only two moments, 0 and `n`.
    """

    step: int
    position: int


class ChunkAction(NamedTuple):
    """An action on one chunk: ``ChunkAction(Do.RELOAD, Chunk(0, 3, 1))``."""

    do: Do
    chunk: Chunk

    def __str__(self) -> str:
        return f"{self.do.value} {self.chunk}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """When the memory of an offloaded chunk is freed and allocated again; its copy starts as its tensors are saved.

    Parameters
    ----------
    release : Moment
        Compute waits for the copy to the host, and the device memory is freed.
    reload : Moment
        Device memory is allocated, and the copies to the device are queued.
    """

    release: Moment
    reload: Moment


def used_in(order: Sequence[Step], splits: Mapping[int, bool]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return where each microbatch of each stage saves its tensors, and where they are first and last used.

    The result has positions in the order; `splits` says of each stage whether the input backward uses its tensors.
    """
    found: dict[Step, int] = {}
    for k, step in enumerate(order):
        if step in found:
            raise ValueError(f"The order has the step {step} twice; each computation comes once.")
        found[step] = k
    result = {}
    for step, forward in found.items():
        if step.computation is not Computation.FORWARD:
            if Step(step.stage, Computation.FORWARD, step.microbatch) not in found:
                raise ValueError(f"The order has the step {step} without a forward of that microbatch.")
            continue
        full, first, last = (
            found.get(step._replace(computation=each))
            for each in (Computation.BACKWARD, Computation.BACKWARD_INPUT, Computation.BACKWARD_WEIGHT)
        )
        if full is not None and first is None and last is None:
            first = last = full
        if first is None or last is None or not forward < first <= last:
            raise ValueError(
                f"After the step {step} the order needs one full backward of that microbatch, or one of its inputs and "
                "then one of its weights."
            )
        result[step.stage, step.microbatch] = forward, first if full or splits[step.stage] else last, last
    return result


# The plan of a rank

Actions = dict[tuple[int, int], tuple[ChunkAction, ...]]
"""What is done at a `Moment`, in order."""


@dataclass(frozen=True)
class PipelinePlan(AnyPlan):
    """What one rank of a pipeline offloads, and when; ``print`` gives a table by stage and group.

    Parameters
    ----------
    rank : int
        The rank of the pipeline.
    order : tuple of Step
        What it computes, in order.
    names : mapping of int to tuple of str
        The groups of each of its stages.
    transfers : mapping of Chunk to Transfer
        What is offloaded.  All else is kept.
    splits : mapping of int to bool
        For each stage whether an input backward uses its tensors.  Stages that are not named have no split.
    nbytes : mapping of int to tuple of int
        Bytes that each group saves and that could be offloaded; empty if not known.
    saves : mapping of int to tuple
        For each stage and group None if the group is not recomputed, otherwise the names of the operators whose outputs
        are saved.  Stages that are not named are not recomputed.
    seconds, baseline_seconds : float, optional
        Expected time of a step of the schedule, and without offloading.
    peak_bytes, saved_peak_bytes : int, optional
        Expected peak of device memory of this rank, and of saved tensors alone.
    because : str
        Why this plan was chosen, in sentences; may be empty.

    Raises
    ------
    ValueError
        If a chunk does not exist, or its moments are out of order.

    Notes
    -----
    Bytes are counted so, by the runtime on the reference device and by the simulation:

    - A saved tensor occupies its bytes from where forward saves it.
    - `Transfer.release` frees all of a chunk at that moment, after compute has waited for the copy.
    - `Transfer.reload` occupies all of it at that moment, when the copies are queued.  Copies back run in the order of
      the moments; at the same moment in the order in which the chunks are used.
    - A full backward frees a tensor when it needs the next one of the group, and the last one where it comes to the
      next group or ends.  A group whose backward unpacks all at once is freed there as a whole.
    - An input backward of a stage with a split frees nothing, because autograd keeps the graph; all is freed at the end
      of the weight backward.
    - At one moment releases come first, then reloads, then the group starts.  At the end of a step the bytes of its
      last group are freed before that.
    - `StageCost.boundary_bytes` are occupied from the start of a forward to the end of its full or weight backward.
    """

    rank: int
    order: tuple[Step, ...]
    names: Mapping[int, tuple[str, ...]]
    transfers: Mapping[Chunk, Transfer] = field(default_factory=dict)
    splits: Mapping[int, bool] = field(default_factory=dict)
    nbytes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    saves: Mapping[int, tuple[tuple[str, ...] | None, ...]] = field(default_factory=dict)
    saved_peak_bytes: int | None = None
    WORK = ("transfers", "saves")
    _uses: dict[tuple[int, int], tuple[int, int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        for name in ("names", "transfers", "nbytes", "saves"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        splits = {stage: bool(self.splits.get(stage, False)) for stage in self.names}
        object.__setattr__(self, "splits", MappingProxyType(splits))
        unknown = {step.stage for step in self.order} - set(self.names)
        if unknown:
            raise ValueError(f"The order has steps of stage {min(unknown)}, but names has no groups of that stage.")
        object.__setattr__(self, "_uses", used_in(self.order, splits))
        for chunk, transfer in self.transfers.items():
            problem = self._problem(chunk, transfer)
            if problem:
                raise ValueError(f"The plan offloads {chunk}, but {problem}.")

    def at(self, moment: Moment) -> tuple[ChunkAction, ...]:
        """Return what is done at a moment, in order; empty for most."""
        return self.actions.get(moment, ())

    def position(self, step: int, group: int) -> Moment:
        """Return the moment at which a group starts in a step: its forward, or where backward comes to it."""
        at = self.order[step]
        if at.computation is Computation.FORWARD:
            return Moment(step, group)
        return Moment(step, len(self.names[at.stage]) - 1 - group)

    def end(self, step: int) -> Moment:
        """Return the moment at which a step ends."""
        return Moment(step, len(self.names[self.order[step].stage]))

    def sharing(self, chunk: Chunk) -> Sequence[int]:
        """Return the groups before that of a chunk whose tensors all count in it, because it saves them again."""
        sizes, first = self.nbytes.get(chunk.stage, ()), chunk.group
        while 0 < first <= len(sizes) and not sizes[first - 1]:
            first -= 1
        return range(first, chunk.group)

    def uses(self, stage: int, microbatch: int) -> tuple[int, int, int]:
        """Return the step that saves the tensors of a microbatch, the first that uses them and the last."""
        return self._uses[stage, microbatch]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are offloaded in one step of the schedule; 0 if sizes are not known."""
        return sum(self.nbytes[chunk.stage][chunk.group] for chunk in self.transfers if chunk.stage in self.nbytes)

    @property
    def host_bytes(self) -> int:
        """Host memory that the plan needs, from each forward to the last backward; 0 if sizes are not known."""
        offloaded = dict.fromkeys(self._uses, 0)
        for chunk in self.transfers if self.nbytes else ():
            offloaded[chunk.stage, chunk.microbatch] += self.nbytes[chunk.stage][chunk.group]
        now = most = 0
        for place, step in enumerate(self.order):
            saved, _, last = self._uses[step.stage, step.microbatch]
            nbytes = offloaded[step.stage, step.microbatch]
            now += nbytes * ((place == saved) - (place == last))
            most = max(most, now)
        return most

    def _saved(self, chunk: Chunk) -> Moment:
        """Return the moment at which the forward of a chunk starts."""
        return self.position(self.uses(chunk.stage, chunk.microbatch)[0], chunk.group)

    def first_use(self, chunk: Chunk) -> Moment:
        """Return the moment at which a backward first comes to a chunk."""
        return self.position(self.uses(chunk.stage, chunk.microbatch)[1], chunk.group)

    def _problem(self, chunk: Chunk, transfer: Transfer) -> str:
        """Return what is wrong with a transfer; empty if nothing is."""
        if (chunk.stage, chunk.microbatch) not in self._uses or not 0 <= chunk.group < len(self.names[chunk.stage]):
            return "this rank does not compute that"
        if not self._saved(chunk) < transfer.release:
            return "frees it before its forward has ended"
        if not transfer.release <= transfer.reload <= self.first_use(chunk):
            return "reloads it before it is freed, or after it is used"
        for moment in (transfer.release, transfer.reload):
            if not 0 <= moment.position <= self.end(moment.step).position:
                return f"{self.order[moment.step]} has no position {moment.position}"
        return ""

    @cached_property
    def actions(self) -> Actions:
        """Actions by moment: releases, then reloads in the order in which they are used, then offloads."""
        return actions_of(
            (chunk, transfer, self._saved(chunk), self.first_use(chunk)) for chunk, transfer in self.transfers.items()
        )

    def __str__(self) -> str:
        rows, total = [], [0, 0]
        for stage, names in self.names.items():
            microbatches = sum(own == stage for own, _ in self._uses)
            nbytes, saves = self.nbytes.get(stage) or (0,) * len(names), self.saves.get(stage, ())
            for group, name in enumerate(names):
                number = sum(chunk.stage == stage and chunk.group == group for chunk in self.transfers)
                sizes = nbytes[group] * (microbatches - number), nbytes[group] * number
                total = [before + size for before, size in zip(total, sizes, strict=True)]
                recomputed = "yes" if saves and saves[group] is not None else "-"
                rows.append((str(stage), name, f"{number} of {microbatches}", *map(size_or_dash, sizes), recomputed))
        rows.append(("", "", "", *map(size_or_dash, total), ""))
        header = "stage", "group", "microbatches offloaded", "kept", "offloaded", "recomputed"
        shown = len(header) if self.saves else len(header) - 1
        table = Table(header[:shown], tuple(row[:shown] for row in rows), left=2, sums=True)
        expected = "; ".join(self._expected("step", "without offloading"))
        return self._text(f"rank {self.rank}\n{table}", expected)


def actions_of(transfers: Iterable[tuple[Chunk, Transfer, Moment, Moment]]) -> Actions:
    """Return the actions of chunks by moment, in order; with each chunk, where it is saved and where it is used."""
    calls = []
    for chunk, transfer, saved, use in transfers:
        moments = transfer.release, transfer.reload, saved  # in the order of what is done at one moment
        calls += [(moment, kind, use, chunk) for kind, moment in enumerate(moments)]
    actions: Actions = {}
    for moment, kind, _, chunk in sorted(calls):
        action = ChunkAction((Do.RELEASE, Do.RELOAD, Do.OFFLOAD)[kind], chunk)
        actions[moment] = (*actions.get(moment, ()), action)
    return actions


# Orders of the standard schedules, as PyTorch executes them, and of any list of actions

Order = tuple[Step, ...]

FORWARD, BACKWARD = Computation.FORWARD, Computation.BACKWARD
WITHOUT_COMPUTE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_order(actions: Iterable[object]) -> Order:
    """Return the order in a list of actions, such as one of PyTorch's ``schedule.pipeline_order``.

    Parameters
    ----------
    actions : iterable
        Of one rank: ``_Action`` objects, or text as in PyTorch's CSV files, such as ``"2F0"``.  Communication and idle
        slots are passed over; of actions that overlap, the parts follow each other.

    Raises
    ------
    ValueError
        If an action is not known.

    Examples
    --------
    >>> from actoffload.schedule.pipeline import read_order
    >>> [str(step) for step in read_order(["0F0", None, "0SEND_F0", "(0F1;1B0)OVERLAP_F_B"])]
    ['0F0', '0F1', '1B0']
    """
    check_kind(Iterable, actions=actions)
    steps: list[Step] = []
    for action in actions:
        text = "" if action is None else str(action).strip()
        together = TOGETHER.fullmatch(text)
        if together:
            steps += read_order(together[1].split(";"))
        elif text and not WITHOUT_COMPUTE.fullmatch(text):
            steps.append(Step.parse(text))
    return tuple(steps)


def gpipe(ranks: int, microbatches: int) -> tuple[Order, ...]:
    """Return the order of each rank in ``ScheduleGPipe``."""
    check_whole(ranks=ranks, microbatches=microbatches, least=1)
    return tuple(
        tuple(Step(rank, kind, k) for kind in (FORWARD, BACKWARD) for k in range(microbatches)) for rank in range(ranks)
    )


def one_f_one_b(ranks: int, microbatches: int) -> tuple[Order, ...]:
    """Return the order of each rank in ``Schedule1F1B``."""
    check_whole(ranks=ranks, microbatches=microbatches, least=1)
    orders = []
    for rank in range(ranks):
        warmup = min(ranks - rank, microbatches) - 1
        steps = [Step(rank, FORWARD, k) for k in range(warmup)]
        for k in range(microbatches):
            if warmup + k < microbatches:
                steps.append(Step(rank, FORWARD, warmup + k))
            steps.append(Step(rank, BACKWARD, k))
        orders.append(tuple(steps))
    return tuple(orders)
