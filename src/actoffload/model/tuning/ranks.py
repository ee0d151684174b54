"""Find the ranks that run one sharded or data-parallel model, and compare what they pass to `offload`."""

from __future__ import annotations

import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from torch.nn import Module

from ..._torch.modules import DATA_PARALLEL, active_data_parallel, default_store
from ..._warnings import warn
from .board import Board, LostRankError
from .findings import Room
from .lockstep import LIMIT, Lockstep

__all__ = ["Ranks", "ranks_of"]

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
    if _world_size() < 2 or default_store is None:
        return ()
    found = max(_groups_of(model), key=len, default=())
    return found if len(found) > 1 and dist.get_rank() in found else ()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _groups_of(model: Module) -> Iterator[tuple[int, ...]]:
    meshes = {id(mesh): mesh for of in model.parameters() if (mesh := getattr(of, "device_mesh", None)) is not None}
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
        return self.together(lambda of: of.room_of_all(own)) or own

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
        waited = (
            f"Rank {board.rank} waited {LIMIT / 2:.0f} s for rank {', '.join(map(str, missing))} in the first forward"
        )
        warn(f"{waited}, and goes on. Call actoffload.offload in all ranks of a sharded or data-parallel model.")
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
