"""Messages between the ranks of a model or a pipeline, through the key-value store of `torch.distributed`.

`[Note: no collectives]`  A rank that deviates, because it ends early or runs another forward, must not make the others
hang, as it would in a collective.  A message lies in the store until it is read, and waiting for one has a limit.  The
store is polled, because a wait inside of it blocks its other users in this process.  It is looked up for each message:
a reference would keep the port of a destroyed process group in use.  Messages are plain data, see [Note: messages].

What ranks do together is one operation: each sends a value, the first rank collects them, and answers with all.  It
waits half as long as the others wait for it, so that they learn from it who is missing.  A rank that takes no further
part leaves, so that no other one waits for it.

`[Note: exchanges]`  All ranks of a pipeline make the same exchanges when one of the first steps begins.  Steps with
backward are counted, and all ranks run the same number.  If a rank has not measured a whole step, all ranks see that,
and try again when the next step begins.  A rank that later runs other groups plans anew alone, with what the others
sent before, because they do not know of it.

`[Note: replicas]`  With tensor or data parallelism several pipelines run copies of the same stages, and their ranks
communicate inside of these stages, also in what is recomputed.  So the ranks of one stage must recompute the same:
what the pipelines exchange is exchanged among them, too, and the costs of the first pipeline count for all.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from .._text import UnreadableError, read, register, written
from .._torch.modules import DATA_PARALLEL, active_data_parallel, default_store
from .._warnings import warn

LIMIT = 120.0  # seconds for which a rank waits for the first one, which itself waits half as long for the others
SHORTEST, LONGEST, PART = 1e-4, 0.02, 0.01  # pauses between two looks: seconds, and part of the time waited so far

GOES_ON = (
    "This rank goes on without it. Call actoffload.offload in all ranks of a sharded or data-parallel model, and the "
    "model equally often."
)
ALONE = (
    "So this rank decides alone from here on what is offloaded, and steps may take longer. Call the model equally "
    "often in all ranks, and end or change offloading in all of them."
)
WINDOW = 8  # passes between two looks for an announcement

T = TypeVar("T")

_meetings = Counter[tuple[str, tuple[int, ...]]]()  # so far, by name and ranks


class LostRankError(Exception):
    """Another rank does not answer; the message says which, in a sentence."""


class Exchange:
    """The messages of one meeting of global ranks, with a `name` of its own; any method may raise a `LostRankError`.

    The first rank leads; alone it posts nothing.  `store` returns the store, None if there is none any more.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], store: Callable[[], Any] | None = None) -> None:
        self.rank, self.ranks, self._name, self._store = rank, tuple(ranks), name, store or _store
        self.leader = self.ranks[0]
        self.leads, self.alone = rank == self.leader, len(self.ranks) == 1
        self._gone = set[int]()  # ranks that take no further part
        self._number = 0  # of values that were gathered

    @staticmethod
    def of(name: str, ranks: Iterable[int]) -> Exchange:
        """Return the next meeting of some ranks, for which all of them call this equally often."""
        ranks = tuple(ranks)
        if len(ranks) < 2:
            return LONE
        _meetings[name, ranks] += 1
        path = f"actoffload/{name}/{zlib.crc32(repr(ranks).encode())}/{_meetings[name, ranks]}"
        return Exchange(path, dist.get_rank(), ranks)

    # Messages

    def post(self, key: str, message: Any) -> None:
        """Post a message, in place of an earlier one with this key."""
        if not self.alone:
            self._call("set", self._path(key), written(message))

    def has(self, key: str) -> bool:
        """Return whether there is a message."""
        return bool(self._call("check", [self._path(key)]))

    def find(self, keys: Sequence[str], limit: float) -> str | None:
        """Wait until there is a message with one of some keys, and return the first of these; None after the limit."""
        begun = time.monotonic()
        while not any(map(self.has, keys)):
            waited = time.monotonic() - begun
            if waited > limit:
                return None
            time.sleep(min(max(PART * waited, SHORTEST), LONGEST))
        # A rank answers before it leaves, and both may have come since the first look.
        return next(key for key in keys if self.has(key))

    def take(self, key: str, readers: int = 1) -> Any:
        """Return a message that is there, and delete it once that number of ranks has read it."""
        path = self._path(key)
        try:
            found = read(self._call("get", path))
        except UnreadableError as error:
            raise LostRankError(f"A message in the store of the process group cannot be read ({error}).") from error
        count = path + "/read"
        if readers > 1 and self._call("add", count, 1) < readers:
            return found
        for each in [count, path] if readers > 1 else [path]:
            self._call("delete_key", each)
        return found

    # What ranks do together

    def gather(self, value: T, where: str, *, needed: bool = True) -> list[T]:
        """Return the values of all ranks, in order; `where` says where this rank waits for the others.

        All ranks call this equally often.  If one that is `needed` is lost, the same `LostRankError` is raised in all.
        Another one takes no further part, and the first rank warns of it.
        """
        self._number += 1
        key = str(self._number)
        if self.leads:
            others, lost = self._collect(key, where, needed)
            found = [value, *others]
            if others:
                self.post(key, (found, lost))
        else:
            own = f"{key} {self.rank}"
            self.post(own, value)
            try:
                at = self.find([key, f"gone {self.leader}"], LIMIT)
                if at != key:
                    raise LostRankError(self.waited([self.leader], where) if at is None else _ended(self.leader))
                found, lost = self.take(key, len(self.ranks) - 1)
            except LostRankError:
                self._call("delete_key", self._path(own))  # its answer is not needed any more
                raise
        if lost:
            raise LostRankError(lost)
        return found

    def _collect(self, key: str, where: str, needed: bool) -> tuple[list[Any], str]:
        """Return what the other ranks sent in time, and which one that is `needed` did not, in a sentence."""
        until, found, missing = time.monotonic() + LIMIT / 2, list[Any](), list[int]()
        for rank in self.ranks[1:]:
            if rank in self._gone:
                continue
            own = f"{key} {rank}"
            at = self.find([own, f"gone {rank}"], max(until - time.monotonic(), 0.0))
            if at == own:
                found.append(self.take(own))
                continue
            self._gone.add(rank)
            missing += [rank] if at is None else []
        if missing and not needed:
            warn(f"{self.waited(missing, where)} {GOES_ON}")
        left = self._gone.difference(missing)
        lost = self.waited(missing, where) if missing else _ended(min(left)) if left else ""
        return found, lost if needed else ""

    def waited(self, missing: Collection[int], where: str) -> str:
        """Return for which ranks this one has waited, in a sentence."""
        seconds = LIMIT / 2 if self.leads else LIMIT
        return f"Rank {self.rank} waited {seconds:.0f} s for rank {', '.join(map(str, missing))} {where}."

    def leave(self) -> None:
        """Let the others not wait for this rank."""
        with suppress(LostRankError):
            self.post(f"gone {self.rank}", True)

    # The store

    def _path(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store."""
        store = self._store()
        if store is None:
            raise LostRankError("The process group was destroyed.")
        try:
            return getattr(store, method)(*arguments)
        except Exception as error:  # each kind of store has errors of its own
            raise LostRankError(f"The store of the process group does not answer ({type(error).__name__}).") from error


def _store() -> Any:
    return default_store() if default_store is not None and dist.is_available() and dist.is_initialized() else None


LONE = Exchange("", 0, (0,))
"""That of a rank which meets no others."""


def _ended(rank: int) -> str:
    return f"Offloading has ended on rank {rank}."


# The ranks of a model or a pipeline


def ranks_of(model: Module) -> tuple[int, ...]:
    """Return the global ranks that run a sharded or data-parallel model together, ascending; empty if it runs alone."""
    if _store() is None or dist.get_world_size() < 2:
        return ()
    found = max(_groups_of(model), key=len, default=())
    return found if len(found) > 1 and dist.get_rank() in found else ()


def _groups_of(model: Module) -> Iterator[tuple[int, ...]]:
    meshes = (getattr(weight, "device_mesh", None) for weight in model.parameters())
    for mesh in {id(mesh): mesh for mesh in meshes if mesh is not None}.values():
        yield tuple(sorted(mesh.mesh.flatten().tolist()))
    for module in (active_data_parallel(), *model.modules()):
        if any(base.__name__ in DATA_PARALLEL for base in type(module).__mro__):
            yield tuple(sorted(dist.get_process_group_ranks(module.process_group)))


@dataclass(frozen=True)
class Settings:
    """The arguments of one rank, and what is wrong with them."""

    arguments: Mapping[str, Any]  # those that have to be the same on all ranks
    problem: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)  # entries that no stage has, with the reasons
    rank: int = 0  # global


register(Settings)


class Ranks:
    """The ranks that run a model, or the stages of a pipeline; see `script` [Note: ranks decide together].

    A model is the stage of a pipeline with one rank, and the ranks that share it run copies of that stage.  They go on
    without one that is lost, unless it is the first.  The ranks of a `pipeline`, which is a process group, need each
    other, see [Note: exchanges] and [Note: replicas].

    When a plan no longer fits in a rank of a model, it announces a pass that all ranks have still ahead, and that is a
    multiple of `WINDOW`.  Ranks look for an announcement at these passes only: a steady pass needs no message.
    """

    def __init__(self, *, pipeline: bool = False, group: Any = None) -> None:
        initialized = pipeline and dist.is_available() and dist.is_initialized()
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if initialized else ()
        self.group, self._needed = group, pipeline
        self._pipeline = Exchange.of("pipeline", ranks) if pipeline else LONE
        self.copies = LONE
        self.replicas: tuple[int, ...] = ()  # global ranks that run the same stages
        self._epoch = 0  # number of announcements
        self._again: int | None = None  # the pass that is announced

    def meet(self, settings: Settings, modules: Iterable[Any], where: str = "") -> str:
        """Return what is wrong with the arguments of all ranks that meet here; empty if nothing is.

        Ranks that run copies of the modules of this one count if there are equally many of each rank of the pipeline.
        """
        replicas = self._find_copies(modules)
        own = replace(settings, rank=max(self._pipeline.rank, self.copies.rank))
        found = self._gather(self._pipeline, (own, replicas), where)
        if len({len(each) for _, each in found}) == 1:
            self.replicas = replicas
        else:
            self.copies = LONE
        all_ranks = self._gather(self.copies, [each for each, _ in found], where)
        return disagreement_of([*(each for ranks in all_ranks for each in ranks), own])

    def meet_for(self, model: weakref.ref[Module], arguments: Mapping[str, str]) -> None:
        """Find the other ranks of a model; if they passed other arguments to `offload`, all raise a `ValueError`."""
        try:
            problem = self.meet(Settings(arguments), [model()], "in the first forward")
        except LostRankError as lost:
            self.lose(lost)
            return
        if problem:
            self.copies = LONE
            raise ValueError(problem)

    def refuse(self, stages: Iterable[Any]) -> None:
        """Take no part, because something is wrong with the arguments of this rank."""
        self._find_copies(getattr(stage, "submod", None) for stage in stages)
        self.leave()

    def _find_copies(self, modules: Iterable[Any]) -> tuple[int, ...]:
        """Find the global ranks that run copies of the modules of this rank, ascending; none if no others do."""
        found = max((ranks_of(module) for module in modules if isinstance(module, Module)), key=len, default=())
        self.copies = Exchange.of("copies", found)
        return tuple(found)

    def gather(self, value: T) -> list[list[T]]:
        """Return the values of the ranks of each copy of the pipeline, in the order of their ranks.

        Raises a `LostRankError` if a rank that is needed does not answer.
        """
        return self._gather(self.copies, self._gather(self._pipeline, value))

    def _gather(self, exchange: Exchange, value: T, where: str = "") -> list[T]:
        where = where or ("of the pipeline" if self._needed else "while passes of the model are measured")
        return exchange.gather(value, where, needed=self._needed)

    def lose(self, lost: LostRankError) -> None:
        """Go on without the other ranks of a model."""
        self.copies = LONE
        warn(f"{lost} {ALONE}")

    def begins_again(self, number: int, *, wanted: bool) -> bool:
        """Return whether a model is measured anew from this pass on; a rank in which it is `wanted` announces it."""
        exchange, key = self.copies, f"again {self._epoch}"
        if exchange.alone:
            return wanted
        try:
            if self._again is None and wanted and not exchange.has(key):
                exchange.post(key, number + WINDOW)
            if self._again is None and exchange.has(key):
                self._again = exchange.take(key, len(exchange.ranks))
        except LostRankError as lost:
            self.lose(lost)
        if self._again is None or number < self._again:
            return False
        self._again = None
        self._epoch += 1
        return True

    def leave(self) -> None:
        """Take no further part, and let the others not wait."""
        for exchange in (self._pipeline, self.copies):
            exchange.leave()
        self._pipeline = self.copies = LONE


def disagreement_of(settings: Sequence[Settings]) -> str:
    """Return what is wrong with the arguments of the ranks, in words that are the same on each; empty if nothing is."""
    everywhere = set(settings[0].missing).intersection(*(each.missing for each in settings))
    for each in settings:
        problem = each.problem or next((each.missing[entry] for entry in each.missing if entry in everywhere), "")
        if problem:
            return f"Rank {each.rank} of the pipeline: {problem}"
    first, *others = settings
    for each in others:
        for name, value in first.arguments.items():
            if each.arguments.get(name) != value:
                return (
                    f"The ranks called actoffload.offload with different arguments: {name} is {value} on rank "
                    f"{first.rank} and {each.arguments.get(name)} on rank {each.rank}. Pass the same on every rank."
                )
    return ""
