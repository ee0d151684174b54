"""Orders of the standard pipeline schedules, as PyTorch executes them, and of any list of actions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from .._arguments import check_kind, check_whole
from .pipeline import Computation, Step

__all__ = ["Order", "gpipe", "interleaved_1f1b", "looped_bfs", "one_f_one_b", "read_order"]

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
    >>> from actoffload.schedule.pipeline_orders import read_order
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
    _check(ranks, microbatches)
    return tuple(
        tuple(Step(rank, kind, k) for kind in (FORWARD, BACKWARD) for k in range(microbatches)) for rank in range(ranks)
    )


def one_f_one_b(ranks: int, microbatches: int) -> tuple[Order, ...]:
    """Return the order of each rank in ``Schedule1F1B``."""
    _check(ranks, microbatches)
    orders = []
    for rank in range(ranks):
        warmup = min(ranks - rank, microbatches)  # the forward that goes before the first backward included

        def stage(_: int, rank: int = rank) -> int:
            return rank

        orders.append(_alternate(warmup - 1, microbatches, stage, stage))
    return tuple(orders)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> tuple[Order, ...]:
    """Return the order of each rank in ``ScheduleInterleaved1F1B``; stage `s` is on rank ``s % ranks``.

    Raises
    ------
    ValueError
        If the number of microbatches is not a multiple of the number of rounds, which is
        ``max(1, microbatches // ranks)``.
    """
    _check(ranks, microbatches, stages_per_rank)
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ValueError(
            f"microbatches is {microbatches}; with {ranks} ranks expected a multiple of the {rounds} rounds."
        )
    in_round, total = microbatches // rounds, microbatches * stages_per_rank
    orders = []
    for rank in range(ranks):
        warmup = min((stages_per_rank - 1) * in_round + 2 * (ranks - 1 - rank), total)

        def forward(k: int, rank: int = rank) -> int:
            return k // in_round % stages_per_rank * ranks + rank

        def backward(k: int, rank: int = rank) -> int:
            return (stages_per_rank - 1 - k // in_round % stages_per_rank) * ranks + rank

        orders.append(_alternate(warmup, total, forward, backward))
    return tuple(orders)


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> tuple[Order, ...]:
    """Return the order of each rank in ``ScheduleLoopedBFS``; stage `s` is on rank ``s % ranks``."""
    _check(ranks, microbatches, stages_per_rank)
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = [Step(stage, FORWARD, k) for stage in stages for k in range(microbatches)]
        orders.append((*forwards, *(step._replace(computation=BACKWARD) for step in reversed(forwards))))
    return tuple(orders)


def _alternate(warmup: int, total: int, forward: Callable[[int], int], backward: Callable[[int], int]) -> Order:
    """Return some forwards, then one forward and one backward in turn, then the other backwards.

    `forward` and `backward` give the stage of the k-th of each.
    """
    steps: list[Step] = []
    done: dict[tuple[int, Computation], int] = {}

    def add(stage: int, computation: Computation) -> None:
        microbatch = done.get((stage, computation), 0)
        done[stage, computation] = microbatch + 1
        steps.append(Step(stage, computation, microbatch))

    for k in range(total):
        add(forward(k), FORWARD)
        if k >= warmup:
            add(backward(k - warmup), BACKWARD)
    for k in range(total - warmup, total):
        add(backward(k), BACKWARD)
    return tuple(steps)


def _check(ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
    check_whole(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1.")
