"""The steps of a rank of a pipeline, what its stages cost, and what is done with what a group saves."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._arguments import check_bytes, check_kind, check_kinds, check_seconds, check_whole
from .costs import LayerCost
from .plan import Do


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


@dataclass(frozen=True, slots=True)
class SplitCost:
    """How the backward of a group is split into that of its inputs and that of its weights.

    Parameters
    ----------
    input_seconds, weight_seconds : float
        Seconds of compute of each.
    """

    input_seconds: float
    weight_seconds: float

    def __post_init__(self) -> None:
        check_seconds(input_seconds=self.input_seconds, weight_seconds=self.weight_seconds)


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on a stage.

    Parameters
    ----------
    groups : tuple of LayerCost
        The groups of the stage, in order of the forward.  Gaps are compute between them.
    splits : tuple of SplitCost
        For each group, if its backward can be split.  If empty, the input backward computes nothing and the weight
        backward is the full backward, as on PyTorch's first stage.
    boundary_bytes : int
        Bytes of the stage's input and output, unless they are among what the groups save, that are kept from the start
        of a microbatch's forward to the end of its full or weight backward.
    other_bytes : int
        Bytes that are always on the device: weights, the state of the optimizer, gradients that stay between steps.
    output_bytes : int
        Bytes of the output, unless it is saved, that are kept from a forward to the end of the step: the last stage
        returns it.
    gradient_bytes : tuple of int
        For each group the bytes of gradients of its weights that the first full or weight backward of a step allocates,
        and that stay until the step ends; none if empty.
    between_bytes : int
        Bytes that the input backward of a microbatch leaves on the device until the end of its weight backward, beside
        what the groups save: the gradients of which the weight backward computes those of the weights.

    Raises
    ------
    ValueError
        If there are splits or gradients, but not one entry for each group, or a number is negative.
    """

    groups: tuple[LayerCost, ...]
    splits: tuple[SplitCost, ...] = ()
    boundary_bytes: int = 0
    other_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: tuple[int, ...] = ()
    between_bytes: int = 0

    def __post_init__(self) -> None:
        check_kinds(LayerCost, groups=self.groups)
        check_kinds(SplitCost, splits=self.splits)
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "splits", tuple(self.splits))
        object.__setattr__(self, "gradient_bytes", tuple(self.gradient_bytes))
        for what, given in (("splits", self.splits), ("gradients", self.gradient_bytes)):
            if given and len(given) != len(self.groups):
                raise ValueError(f"There are {len(given)} {what} for {len(self.groups)} groups; give one for each.")
        for nbytes in self.gradient_bytes:
            check_bytes(gradient_bytes=nbytes)
        for name in ("boundary_bytes", "other_bytes", "output_bytes", "between_bytes"):
            check_bytes(**{name: getattr(self, name)})

    @property
    def nbytes(self) -> int:
        """Bytes that all groups save in one forward."""
        return sum(cost.nbytes for cost in self.groups)


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
