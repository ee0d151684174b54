"""What a rank of a pipeline computes: its steps in order, their events, and the orders of the standard schedules.

A forward and a backward of a model is a pipeline of one rank and one microbatch, with a stage for each layer, because a
plan of a model can act where each layer starts and where it ends.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from .._arguments import check_kind, check_whole


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


# Events


class When(enum.Enum):
    """Where a layer starts and ends in a forward or a backward; in a pipeline also in one of the inputs or weights."""

    FORWARD_START = "forward start"
    FORWARD_END = "forward end"
    BACKWARD_START = "backward start"
    BACKWARD_END = "backward end"
    INPUT_START = "input backward start"
    INPUT_END = "input backward end"
    WEIGHT_START = "weight backward start"
    WEIGHT_END = "weight backward end"

    __hash__ = object.__hash__


class Event(NamedTuple):
    """When a plan can act: ``Event(When.FORWARD_START, 3)`` is the start of layer 3's forward.

    A backward starts a layer where it comes to it.  In a step of a pipeline with several layers only the last one that
    is computed has an end: the next one starts where one ends.
    """

    when: When
    layer: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.when.value} of layer {self.layer}{f', microbatch {self.microbatch}' if self.microbatch else ''}"


BORDERS = {
    Computation.FORWARD: (When.FORWARD_START, When.FORWARD_END),
    Computation.BACKWARD: (When.BACKWARD_START, When.BACKWARD_END),
    Computation.BACKWARD_INPUT: (When.INPUT_START, When.INPUT_END),
    Computation.BACKWARD_WEIGHT: (When.WEIGHT_START, When.WEIGHT_END),
}


def used_in(order: Sequence[Step], splits: Collection[int]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return where each microbatch of each stage saves its tensors, and where they are first and last used.

    The result has positions in the order; `splits` are the stages whose input backward uses them.
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
        result[step.stage, step.microbatch] = forward, first if full or step.stage in splits else last, last
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
    >>> from actoffload.schedule.orders import read_order
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


def model_order(layers: int) -> Order:
    """Return the steps of a model: the forward of each layer, then the backward of each."""
    forward = [Step(layer, FORWARD, 0) for layer in range(layers)]
    return (*forward, *(step._replace(computation=BACKWARD) for step in reversed(forward)))
