"""What the ranks of a pipeline exchange: their arguments before the first step, and what was measured before they plan.

`[Note: exchanges]`  All ranks of a pipeline make the same exchanges: one when the first step begins, one when the step
after the measured ones begins, and one after each trial of a plan.  Steps with backward are counted, and all ranks run
the same number.  If a rank has not measured a whole step, all ranks see that, and try again when the next step begins.
A rank that later runs another order plans anew alone, with what the others sent before, because they do not know of it.

A rank on which `offload` was not called, or whose handle was removed, must not make the others hang.  So messages are
keys of the store of `torch.distributed`, see `model.board` [Note: no collectives], and waiting has a limit.  Where
`offload` raises an exception, it posts what is wrong first, and the others raise that in their first step.  Its key has
the number of calls of `offload` in the process, so that a later call does not find what was wrong before.  The first
rank passes over what others have posted in calls that were refused.

`[Note: replicas]`  With tensor or data parallelism several pipelines run copies of the same stages, and their ranks
communicate inside of these stages, also in what is recomputed.  So the ranks of one stage must recompute the same:
what the pipelines exchange is exchanged among them, too, and the costs of the first pipeline count for all.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from .._torch.modules import default_store
from ..model.tuning.board import Board, LostRankError, register
from ..planner import OperatorCost, Variant
from ..schedule.costs import LayerCost, Link, Saved
from ..schedule.pipeline import Computation, SplitCost, StageCost, Step

__all__ = ["Exchange", "Measured", "Settings", "Tried", "agreed", "disagreement", "gather"]

T = TypeVar("T")

calls = Counter[tuple[int, ...]]()  # of `offload` in this process, by the ranks of the pipeline
refused = dict[tuple[int, ...], int]()  # the latest of these calls for which a rank refused
PAUSE = 0.002  # seconds between two looks at a message that is passed over
LIMIT = 120.0  # seconds for which a rank waits for the one that collects, which itself waits half as long


@dataclass(frozen=True)
class Settings:
    """The arguments of one rank, and what is wrong with them."""

    rank: int  # global
    arguments: Mapping[str, Any]  # those that have to be the same on all ranks
    problem: str = ""
    # Entries of `layers` and `keep`, each with the reason if no stage of this rank has such modules.
    entries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What one rank knows before all of them plan."""

    rank: int
    order: tuple[Step, ...]
    names: Mapping[int, tuple[str, ...]]  # by stage
    costs: Mapping[int, StageCost]  # by stage
    link: Link
    limit: int | None = None  # bytes of device memory
    again: Mapping[int, Sequence[tuple[Variant, ...]]] | None = None  # by stage and group: the ways to run it
    bare: bool = False  # a step without offloading fits into its memory

    def with_microbatches(self, numbers: Collection[int]) -> Measured:
        """Return the same for a step with these microbatches, whose order is not known if they are others."""
        same = {step.microbatch for step in self.order} == set(numbers)
        return self if same else replace(self, order=())


@dataclass(frozen=True)
class Tried:
    """What one rank knows of a plan that all of them have tried."""

    seconds: float  # of a step with the plan
    without: float | None  # of a step without offloading, where all ranks have room for it
    peak: int = 0  # bytes of device memory in the steps with the plan; 0 if not known


register(Settings, Measured, Tried, Step, Computation, StageCost, SplitCost, LayerCost, Saved, Link)
register(Variant, OperatorCost)


def gather(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks of a process group, in every rank, in the order of their ranks: a collective."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class RefusedError(Exception):
    """Another rank takes no part, because something is wrong with its arguments; `settings` say what."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.problem)
        self.settings = settings


class _Line:
    """Ranks that exchange values through the store; the first of them collects.

    The others post each message under their rank, and read the answer under the identity that it has.  So nothing of an
    earlier exchange, in which a rank was lost, is taken for one of this.
    """

    def __init__(self, name: str, ranks: Sequence[int], call: int, refused: int) -> None:
        self._call, self._before = call, refused
        self._refused = f"refused/{call}"
        path = f"actoffload/{name}/{zlib.crc32(repr(tuple(ranks)).encode())}"
        self._board = Board(path, dist.get_rank(), ranks) if len(ranks) > 1 else None
        self._number = 0  # of exchanges so far
        self._identity = uuid4().hex
        self._identities: dict[int, str] = {}  # of the others, by rank; on the first rank

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order.

        Raises a `LostRankError` on each rank if one of them is lost, and a `RefusedError` if one of them refuses.
        """
        board = self._board
        if board is None:
            return [value]
        self._number += 1
        if board.rank == board.ranks[0]:
            found, lost = self._collect(board, value)
            self._answer(board, (found, lost))
        else:
            found, lost = self._send(board, value)
        if lost:
            raise LostRankError(lost)
        return found

    def _collect(self, board: Board, value: T) -> tuple[list[T], str]:
        """Return the values of all ranks, and a sentence if one of them is lost."""
        until, found, missing = time.monotonic() + LIMIT / 2, [value], list[int]()
        for rank in board.ranks[1:]:
            message = self._message(board, rank, until)
            if message is None:
                missing.append(rank)
            elif not message:
                return [], _left(rank)
            else:
                found += message
        return found, _waited(board.rank, LIMIT / 2, missing) if missing else ""

    def _message(self, board: Board, rank: int, until: float) -> tuple[Any, ...] | None:
        """Return the value of another rank; empty if it has left, and None if there is none in time."""
        while self._find(board, str(rank), max(until - time.monotonic(), 0.0)):
            call, identity, number, message = board.read(str(rank))
            if call > self._before and self._number == number == 1 and message:
                self._identities[rank] = identity
            if (identity, number) == (self._identities.get(rank), self._number):
                board.remove(str(rank))
                return message  # type: ignore[no-any-return]
            # It is not removed: the next message may be in its place by now.
            if time.monotonic() > until:
                break
            time.sleep(PAUSE)
        return None

    def _answer(self, board: Board, answer: tuple[list[Any], str]) -> None:
        for identity in self._identities.values():
            board.post(f"{identity}/{self._number}", answer)

    def _send(self, board: Board, value: T) -> tuple[list[T], str]:
        """Post a value; return those of all ranks, and a sentence if one of them is lost."""
        own, answer = str(board.rank), f"{self._identity}/{self._number}"
        board.post(own, (self._call, self._identity, self._number, (value,)))
        if not self._find(board, answer, LIMIT):
            board.remove(own)
            return [], _waited(board.rank, LIMIT, board.ranks[:1])
        found: tuple[list[T], str] = board.take(answer)
        return found

    def _find(self, board: Board, key: str, limit: float) -> bool:
        """Wait for a message; return whether it is there, or raise a `RefusedError`."""
        found = board.find([self._refused, key], limit)
        # Looked for once more: a rank that refuses may have posted that, and the message of its next call, in between.
        if found is not None and board.has(self._refused):
            raise RefusedError(board.read(self._refused))
        return found is not None

    def refuse(self, settings: Settings) -> None:
        """Let the others raise what is wrong in their first exchange."""
        if self._board is not None:
            with suppress(LostRankError):
                self._board.post(self._refused, settings)

    def leave(self) -> None:
        """Let the others not wait in their next exchange."""
        board = self._board
        if board is None:
            return
        self._number += 1
        with suppress(LostRankError):
            if board.rank == board.ranks[0]:
                self._answer(board, ([], _left(board.rank)))
            else:
                board.post(str(board.rank), (self._call, self._identity, self._number, ()))


def _left(rank: int) -> str:
    return f"Offloading has ended on rank {rank} of the pipeline."


def _waited(rank: int, seconds: float, missing: Sequence[int]) -> str:
    return f"Rank {rank} waited {seconds:.0f} s for rank {', '.join(map(str, missing))} of the pipeline."


class Exchange:
    """The exchanges of one rank, which may raise a `LostRankError`; see [Note: exchanges] and [Note: replicas].

    Made where `offload` is called, with the process group of the pipeline.
    """

    def __init__(self, group: Any = None) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) if initialized else ()
        calls[ranks] += 1
        self.group, self._ranks = group, ranks
        self._call, self._refused = calls[ranks], refused.get(ranks, 0)
        self._pipeline, self._copies = self._line("pipeline", ranks), self._line("stage", ())
        self.replicas: tuple[int, ...] = ()  # global ranks that run the same stages

    def _line(self, name: str, ranks: Sequence[int]) -> _Line:
        return _Line(name, ranks, self._call, self._refused)

    def meet(self, settings: Settings, replicas: Sequence[int]) -> list[Settings]:
        """Return the settings of all ranks, or only those of a rank that refuses.

        `replicas` are the global ranks that run the stages of this rank, ascending; empty if no others do.  They count
        if there are equally many of each rank of the pipeline.
        """
        try:
            own = self._gather((settings, tuple(replicas)))
            if len({len(copies) for _, copies in own}) == 1:
                self.replicas = tuple(replicas)
                self._copies = self._line("stage", replicas)
            return [each for ranks in self._copies.gather([settings for settings, _ in own]) for each in ranks]
        except RefusedError as error:
            self._refuse(error.settings, self._line("stage", replicas))  # the other pipelines wait for this one
            return [error.settings]

    def refuse(self, problem: str, replicas: Sequence[int]) -> None:
        """Take no part, and let the others raise what is wrong with the arguments of this rank."""
        if default_store is not None and dist.is_available() and dist.is_initialized():
            settings = Settings(dist.get_rank(), {}, problem)
            self._refuse(settings, self._pipeline, self._line("stage", replicas))

    def _refuse(self, settings: Settings, *lines: _Line) -> None:
        refused[self._ranks] = self._call
        for line in lines:
            line.refuse(settings)

    def gather(self, value: T) -> list[list[T]]:
        """Return the values of the ranks of each pipeline that runs these stages, in the order of their ranks."""
        return self._copies.gather(self._gather(value))

    def _gather(self, value: T) -> list[T]:
        return gather(value, self.group) if default_store is None else self._pipeline.gather(value)

    def leave(self) -> None:
        """Take no further part, and let the others not wait."""
        self._pipeline.leave()
        self._copies.leave()


def agreed(pipelines: Sequence[Sequence[Measured | None]]) -> list[Measured] | None:
    """Return what the ranks of pipelines that run the same stages plan with; None if one of them has no whole step.

    The costs are those of the first pipeline; of memory it is the least, and of links the slowest.
    """
    found = []
    for copies in zip(*pipelines, strict=True):
        known = [each for each in copies if each is not None]
        if len(known) < len(copies):
            return None
        limit = min((each.limit for each in known if each.limit is not None), default=None)
        link, bare = Link.slowest(each.link for each in known), all(each.bare for each in known)
        found.append(replace(known[0], limit=limit, link=link, bare=bare))
    return found


def disagreement(settings: Sequence[Settings]) -> str:
    """Return what is wrong with the arguments of the ranks, in words that are the same on each; empty if nothing is.

    >>> from actoffload.pipeline.exchange import Settings, disagreement
    >>> wrong = disagreement([Settings(0, {"fraction": 0.5}), Settings(1, {"fraction": None})])
    >>> wrong.endswith("fraction is 0.5 on rank 0 and None on rank 1. Pass the same on every rank.")
    True
    """
    matched = {entry for each in settings for entry, reason in each.entries.items() if not reason}
    for each in settings:
        unmatched = (reason for entry, reason in each.entries.items() if entry not in matched)
        problem = each.problem or next(unmatched, "")
        if problem:
            return f"Rank {each.rank} of the pipeline: {problem}"
    first = settings[0]
    for other in settings[1:]:
        for name, value in first.arguments.items():
            if other.arguments.get(name) != value:
                theirs = f"{other.arguments.get(name)} on rank {other.rank}"
                return (
                    f"The ranks of the pipeline called offload with different arguments: {name} is {value} on rank "
                    f"{first.rank} and {theirs}. Pass the same on every rank."
                )
    return ""
