"""The stages of a rank: their groups, the handle that follows the module of each, and the ranks that run the others.

`[Note: exchanges]`  All ranks of a pipeline make the same exchanges: one when the first step begins, one behind each
kind of measured steps, and one after each trial of a plan.  Steps with backward are counted, and all ranks run the same
number.  If a rank has not measured a whole step, all ranks see that, and try again when the next step begins.
A rank that later runs another order plans anew alone, with what the others sent before, because they do not know of it.

`[Note: replicas]`  With tensor or data parallelism several pipelines run copies of the same stages, and their ranks
communicate inside of these stages, also in what is recomputed.  So the ranks of one stage must recompute the same:
what the pipelines exchange is exchanged among them, too, and the costs of the first pipeline count for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from ..model.discovery import BLOCK, find_groups, followed_modules
from ..model.follow import Steering, handle_of, refuse_scripted
from ..model.handle import OffloadHandle
from ..model.reporting import PassLog
from ..model.select import Names, choose, choose_kept
from ..model.tuning.ranks import ranks_of
from ..model.tuning.steering import Finder
from ..replay import Policy
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.schedules import GroupSchedule
from ..tune.exchange import Exchange, RefusedError, register
from ..tune.exchange import disagreement as different_arguments
from .conductor import Conductor
from .steering import StageSteering

__all__ = [
    "PipelineRanks",
    "RankStage",
    "Settings",
    "disagreement",
    "entries_of",
    "problem_of",
    "replicas_of",
]


class RankStage:
    """One stage of a rank, whose module is followed.

    Its `entries` are those of `layers` and `keep`, each with the reason if it means nothing in this stage; another
    stage may have it.  A module without groups, or one that is offloaded already, is a `ValueError`.
    """

    def __init__(
        self,
        stage: Any,
        conductor: Conductor,
        layers: Any,
        keep: Any,
        policy: Policy | None,
    ) -> None:
        module: Module = stage.submod
        self.index = int(stage.stage_index)
        title = f"the module of stage {self.index}"
        refuse_scripted(module, f"stage {self.index}")
        if handle_of(module) is not None:
            raise ValueError(f"{title} is offloaded already: call remove() of its handle before offload(schedule).")
        names = Names(module)
        layers, self.entries = _matching(layers, lambda entry: choose(names, [entry]))
        if layers == () and self.entries:
            raise ValueError(f"{title}: {next(iter(self.entries.values()))}")
        keep, entries = _matching(keep, lambda entry: choose_kept(names, [entry]))
        self.entries |= entries
        try:
            # Blocks are groups as they are: what each saves exists for each microbatch, so they need not be divided.
            chosen, kept, searching = find_groups(names, layers, keep, by_blocks=True)
        except ValueError as error:
            raise ValueError(f"{title}: {error}") from None
        plans = GroupPlans(GroupSchedule(), [group.kind for group in chosen])
        if searching:
            plans.learn([GroupKey(k) for k, group in enumerate(chosen) if group.kind == BLOCK])
        modules = followed_modules(module, chosen, kept)
        policies = {} if policy is None else dict.fromkeys(range(len(chosen)), policy)

        log, groups = PassLog(), modules[1 : len(chosen) + 1]
        self.steering = StageSteering(self.index, conductor, groups, plans, log, policies)
        steering: Steering = self.steering
        if searching:
            steering = Finder(groups, plans, log, weakref.ref(module), steering)
        self.handle = OffloadHandle(modules, plans, conductor.engine, steering, log)


def entries_of(stages: Iterable[RankStage]) -> dict[str, str]:
    """Return the entries of `layers` and `keep`, each with the reason if it means nothing in any stage of a rank."""
    found: dict[str, str] = {}
    for stage in stages:
        for entry, reason in stage.entries.items():
            found[entry] = reason and found.get(entry, reason)
    return found


def _matching(given: Any, meaning: Callable[[Any], object]) -> tuple[Any, dict[str, str]]:
    """Return the entries of an argument that mean something in a module, and all with the reason if they do not."""
    single = isinstance(given, (str, type))
    if not (single or isinstance(given, (list, tuple, set, frozenset))):
        return given, {}
    found, entries = [], {}
    for entry in (given,) if single else given:
        try:
            if entry is not ...:
                meaning(entry)
            found.append(entry)
            entries[str(entry)] = ""
        except ValueError as error:
            entries[str(entry)] = str(error)
    return (given if single and found else tuple(found)), entries


def replicas_of(stages: Iterable[Any]) -> tuple[int, ...]:
    """Return the global ranks that run copies of the stages of a rank, ascending; empty if no others do."""
    modules = (getattr(stage, "submod", None) for stage in stages)
    return max((ranks_of(module) for module in modules if isinstance(module, Module)), key=len, default=())


def problem_of(stages: Sequence[Any]) -> str:
    """Return why the stages of a rank cannot be offloaded; empty if they can."""
    if not stages:
        return "the schedule has no stages."
    without = [stage for stage in stages if not isinstance(getattr(stage, "submod", None), Module)]
    return f"stage {without[0].stage_index} has no module." if without else ""


# The ranks of a pipeline

T = TypeVar("T")

OTHERS = "of the pipeline"


@dataclass(frozen=True)
class Settings:
    """The arguments of one rank, and what is wrong with them."""

    rank: int  # global
    arguments: Mapping[str, Any]  # those that have to be the same on all ranks
    problem: str = ""
    # Entries of `layers` and `keep`, each with the reason if no stage of this rank has such modules.
    entries: Mapping[str, str] = field(default_factory=dict)


register(Settings)


class PipelineRanks:
    """The exchanges of one rank, which may raise a `LostRankError`; see [Note: exchanges] and [Note: replicas].

    Made where `offload` is called, with the process group of the pipeline.
    """

    def __init__(self, group: Any = None) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if initialized else ()
        self.group, self._pipeline, self._copies = group, _exchange("pipeline", ranks), _exchange("stage", ())
        self.replicas: tuple[int, ...] = ()  # global ranks that run the same stages
        self._number = 0  # of values that were exchanged

    def meet(self, settings: Settings, replicas: Sequence[int]) -> list[Settings]:
        """Return the settings of all ranks, or only those of a rank that refuses.

        `replicas` are the global ranks that run the stages of this rank, ascending; empty if no others do.  They count
        if there are equally many of each rank of the pipeline.
        """
        copies = _exchange("stage", replicas)
        try:
            own = self._gather(self._pipeline, (settings, tuple(replicas)))
            if len({len(each) for _, each in own}) == 1:
                self.replicas, self._copies = tuple(replicas), copies
            return [each for ranks in self._gather(self._copies, [each for each, _ in own]) for each in ranks]
        except RefusedError as error:
            refused: Settings = error.args[0]
            self._refuse(refused, copies)  # the other pipelines wait for this one
            return [refused]

    def refuse(self, problem: str, replicas: Sequence[int]) -> None:
        """Take no part, and let the others raise what is wrong with the arguments of this rank."""
        if dist.is_available() and dist.is_initialized():
            self._refuse(Settings(dist.get_rank(), {}, problem), _exchange("stage", replicas))

    def _refuse(self, settings: Settings, copies: Exchange | None) -> None:
        for exchange in (self._pipeline, copies):
            if exchange is not None:
                exchange.refuse(settings)

    def gather(self, value: T) -> list[list[T]]:
        """Return the values of the ranks of each pipeline that runs these stages, in the order of their ranks."""
        return self._gather(self._copies, self._gather(self._pipeline, value))

    def _gather(self, exchange: Exchange | None, value: Any) -> list[Any]:
        self._number += 1
        return [value] if exchange is None else exchange.gather(str(self._number), value, OTHERS)

    def leave(self) -> None:
        """Take no further part, and let the others not wait."""
        for exchange in (self._pipeline, self._copies):
            if exchange is not None:
                exchange.leave()


def _exchange(name: str, ranks: Sequence[int]) -> Exchange | None:
    """Return the next exchange of some ranks; None for one rank."""
    return Exchange.of(name, ranks) if len(ranks) > 1 else None


def disagreement(settings: Sequence[Settings]) -> str:
    """Return what is wrong with the arguments of the ranks, in words that are the same on each; empty if nothing is."""
    matched = {entry for each in settings for entry, reason in each.entries.items() if not reason}
    for each in settings:
        unmatched = (reason for entry, reason in each.entries.items() if entry not in matched)
        problem = each.problem or next(unmatched, "")
        if problem:
            return f"Rank {each.rank} of the pipeline: {problem}"
    return different_arguments({each.rank: each.arguments for each in settings})
