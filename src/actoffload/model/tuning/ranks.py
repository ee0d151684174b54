"""The ranks of one sharded or data-parallel model: they measure in the same passes, and follow one plan.

`[Note: ranks decide together]`  The ranks of a sharded or data-parallel model wait for each other in each layer.  If
each decided by itself, one would replay everything while another times its plan, and each would choose another
plan.  So the first rank decides: for each pass that is measured it posts its stage, and what is known by then, before
its own forward begins.  The others take that message at the start of the same pass, and run the same stage.  At the end
it posts the plan.  The memory of all ranks counts: each posts how much room it has, and the least is planned with.

When the plan no longer fits in a rank, the first one announces a pass that all ranks have still ahead, and that is a
multiple of a window.  The others look for an announcement at these passes only: a steady pass needs no message.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.nn import Module

from ..._torch.modules import DATA_PARALLEL, active_data_parallel, default_store
from ..._warnings import warn
from ...planner import GroupPlan, OperatorCost, Variant, choose, frontier
from ...schedule.costs import LayerCost, Link, Saved
from ...schedule.plan import Action, Do, Event, Plan, When
from .board import Board, LostRankError, register
from .findings import Findings, Room
from .metering import Peak, Stage

__all__ = ["LIMIT", "WINDOW", "Decision", "Lockstep", "Ranks", "ranks_of"]

WINDOW = 8  # passes between two looks for an announcement
LIMIT = 60.0  # seconds for which a rank waits for the one that leads, which itself waits half as long for the others


@dataclass(frozen=True)
class Decision:
    """What a pass is for, and what is known; without a stage measuring is over, without findings the rank has left."""

    stage: Stage | None = None
    found: Findings | None = None


register(Decision, Findings, Peak, Room, Stage, GroupPlan, Plan, Event, When, Action, Do)
register(Variant, OperatorCost, LayerCost, Saved, Link, functions=(choose, frontier))


class Lockstep:
    """One rank's part in what the ranks of a model decide together; any method may raise `LostRankError`.

    Measuring and what follows it is one epoch, numbered from 0.  Ranks that are `gone` missed the first forward.
    """

    def __init__(self, board: Board, gone: Collection[int] = ()) -> None:
        self._board, self._epoch = board, 0
        self.leader = board.ranks[0]
        self.leads = board.rank == self.leader
        self._again: int | None = None  # pass with which the next epoch begins
        self._measuring = True  # passes of this epoch
        self._asked = False  # for a new epoch
        self._shown = False  # how much memory this rank has
        self._gone = set(gone)  # ranks whose memory does not count

    # Measuring

    def decide(self, number: int, decision: Decision) -> None:
        """Post what a pass is for; without a stage, for all passes that follow."""
        assert self.leads
        self._measuring = decision.stage is not None
        self._board.post(self._key(number if self._measuring else "end"), decision)

    def decision(self, number: int) -> Decision:
        """Wait for what a pass is for."""
        assert not self.leads
        key = self._board.find([self._key(number), self._key("end")], LIMIT)
        if key is None:
            waited = f"Rank {self._board.rank} waited {LIMIT:.0f} s for rank {self.leader}"
            raise LostRankError(f"{waited} in pass {number} of the model.")
        found: Decision = self._board.take(key, len(self._board.ranks) - 1)
        if found.stage is None and found.found is None:
            raise LostRankError(f"In rank {self.leader} offloading was ended during the first steps.")
        return found

    def post_room(self, room: Room) -> None:
        """Post how much memory this rank has without offloading, as measured first."""
        if not self._shown:
            self._shown = True
            self._board.post(self._key(f"room {self._board.rank}"), room)

    def room_of_all(self, own: Room) -> Room:
        """Return the room with which a plan fits in all ranks."""
        return own.for_all(self._rooms())

    def _rooms(self) -> list[Room]:
        until, found, missing = time.monotonic() + LIMIT / 2, list[Room](), list[int]()
        for rank in self._board.ranks[1:]:
            own, gone = self._key(f"room {rank}"), f"gone {rank}"
            if rank in self._gone:
                continue
            key = self._board.find([own, gone], max(until - time.monotonic(), 0.0))
            if key == own:
                found.append(self._board.take(own))
            else:
                self._gone.add(rank)
                missing += [rank] if key is None else []
        if missing:
            absent = ", ".join(map(str, missing))
            warn(
                f"Rank {self.leader} waited {LIMIT / 2:.0f} s for rank {absent}, whose memory counts no more. Call the "
                "model equally often in all ranks."
            )
        return found

    # Later

    def begins_again(self, number: int, *, wanted: bool) -> bool:
        """Return whether a new epoch begins with this pass, which is a multiple of `WINDOW`.

        Where it is wanted, the leading rank announces it; another rank asks for it.
        """
        board = self._board
        if self.leads:
            if self._again is None and (wanted or board.has(self._key("ask"))):
                self._again = number + WINDOW
                board.post(self._key("again"), self._again)
        else:
            if self._again is None and board.has(self._key("again")):
                self._again = board.take(self._key("again"), len(board.ranks) - 1)
            if self._again is None and wanted and not self._asked:
                self._asked = True
                board.post(self._key("ask"), True)
        if self._again is None or number < self._again:
            return False
        if self.leads and board.has(self._key("ask")):
            board.take(self._key("ask"))
        late, self._again = number > self._again, None
        self._measuring, self._asked, self._shown = True, False, False
        self._epoch += 1
        if late and not self.leads:
            self.post_room(Room())  # it may have missed the pass that shows its memory
        return True

    def leave(self) -> None:
        """Say that this rank takes no further part."""
        if not self.leads:
            self._board.post(f"gone {self._board.rank}", True)
        elif self._measuring or self._again is not None:
            self._epoch += not self._measuring  # the others begin the next epoch as announced
            self.decide(0, Decision())

    def _key(self, name: int | str) -> str:
        return f"{self._epoch}/{name}"


T = TypeVar("T")

ALONE = (
    "So this rank decides alone from here on what is offloaded, and steps may take longer. Call the model equally "
    "often in all ranks, and end or change offloading in all of them."
)

_met = Counter[tuple[int, ...]]()  # models of the same ranks so far: in all of them the first forwards have one order


def ranks_of(model: Module) -> tuple[int, ...]:
    """Return the global ranks that run a model together, ascending; empty if it runs in this process alone.

    Parameters
    ----------
    model : torch.nn.Module
        With parameters that are distributed over a device mesh (``fully_shard``, ``parallelize_module``), or wrapped in
        ``DistributedDataParallel`` or ``FullyShardedDataParallel``: from outside, as a whole or in part.
    """
    if default_store is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return ()
    found = max(_groups_of(model), key=len, default=())
    return found if len(found) > 1 and dist.get_rank() in found else ()


def _groups_of(model: Module) -> Iterator[tuple[int, ...]]:
    meshes = {
        id(mesh): mesh for weight in model.parameters() if (mesh := getattr(weight, "device_mesh", None)) is not None
    }
    for mesh in meshes.values():
        yield tuple(sorted(mesh.mesh.flatten().tolist()))
    for module in (active_data_parallel(), *model.modules()):
        if any(base.__name__ in DATA_PARALLEL for base in type(module).__mro__):
            yield tuple(sorted(dist.get_process_group_ranks(module.process_group)))


class Ranks:
    """The ranks of one model, which meet in its first forward.

    Parameters
    ----------
    model : weak reference to a module
        The model.
    arguments : mapping of str to str
        What this rank passed to `offload`, as text.
    """

    def __init__(self, model: weakref.ref[Module] | None = None, arguments: Mapping[str, str] | None = None) -> None:
        self._model, self._arguments = model, dict(arguments or {})
        self.lockstep: Lockstep | None = None

    def meet(self) -> None:
        """Find the other ranks, and compare the arguments.

        Raises
        ------
        ValueError
            In all ranks, if arguments differ.
        """
        model = None if self._model is None else self._model()
        board = None if model is None else board_of(model)
        if board is None:
            return
        try:
            leads = board.rank == board.ranks[0]
            problem, gone = (_lead if leads else _follow)(board, self._arguments)
        except LostRankError as lost:
            warn(f"{lost} {ALONE}")
            return
        if problem:
            raise ValueError(problem)
        self.lockstep = Lockstep(board, gone)

    def together(self, act: Callable[[Lockstep], T]) -> T | None:
        """Return what a function of the lockstep returns; None without other ranks, or from when on one is lost."""
        if self.lockstep is None:
            return None
        try:
            return act(self.lockstep)
        except LostRankError as lost:
            self.lockstep = None
            warn(f"{lost} {ALONE}")
            return None

    def room_of_all(self, own: Room) -> Room:
        """Return the room with which a plan fits in all ranks."""
        return self.together(lambda lockstep: lockstep.room_of_all(own)) or own

    def leave(self) -> None:
        """Take no further part."""
        if self.lockstep is not None:
            with suppress(LostRankError):
                self.lockstep.leave()
            self.lockstep = None


def board_of(model: Module) -> Board | None:
    """Return where the ranks of a model post messages; None if it runs in this process alone."""
    ranks = ranks_of(model)
    if not ranks:
        return None
    _met[ranks] += 1
    return Board(f"actoffload/{zlib.crc32(repr(ranks).encode())}/{_met[ranks]}", dist.get_rank(), ranks)


def _lead(board: Board, own: dict[str, str]) -> tuple[str, list[int]]:
    """Compare the arguments of all ranks; return what differs, in a sentence, and the ranks that did not come."""
    until, found = time.monotonic() + LIMIT / 2, {board.rank: own}
    for rank in board.ranks[1:]:
        key = f"arguments {rank}"
        if board.find([key], max(until - time.monotonic(), 0.0)) is not None:
            found[rank] = board.take(key)
    missing = [rank for rank in board.ranks if rank not in found]
    if missing:
        absent = ", ".join(map(str, missing))
        warn(
            f"Rank {board.rank} waited {LIMIT / 2:.0f} s for rank {absent} in the first forward, and goes on. Call "
            "actoffload.offload in all ranks of a sharded or data-parallel model."
        )
    problem = _difference(found)
    board.post("problem", (problem, own))
    return problem, missing


def _follow(board: Board, own: dict[str, str]) -> tuple[str, list[int]]:
    """Post the arguments of this rank; return what differs among all of them, in a sentence."""
    board.post(f"arguments {board.rank}", own)
    if board.find(["problem"], LIMIT) is None:
        raise LostRankError(f"Rank {board.rank} waited {LIMIT:.0f} s for rank {board.ranks[0]} in the first forward.")
    problem, theirs = board.take("problem", len(board.ranks) - 1)
    return problem or _difference({board.ranks[0]: theirs, board.rank: own}), []  # it may have come too late


def _difference(arguments: Mapping[int, Mapping[str, str]]) -> str:
    """Return which argument differs between two ranks, in a sentence; empty if none does."""
    (first, own), *others = arguments.items()
    for rank, theirs in others:
        for name, value in own.items():
            if theirs.get(name) != value:
                values = f"{value} in rank {first} and {theirs.get(name)} in rank {rank}"
                return (
                    f"The ranks of this model got different arguments of actoffload.offload: {name} is {values}. Pass "
                    "the same in all ranks of a sharded or data-parallel model."
                )
    return ""
