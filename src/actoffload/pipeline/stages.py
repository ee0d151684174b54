"""The stages of a rank: their groups, and the handle that follows the module of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from ..model.discovery import BLOCK, candidates
from ..model.follow import followers_of, refuse_scripted
from ..model.followed import GROUP, KEPT, ROOT, FollowedModule, Steering
from ..model.handle import OffloadHandle
from ..model.module_tree import find_stacks, written
from ..model.reporting import PassLog
from ..model.select import Chosen, choose, find_kept, split_default
from ..model.tuning.ranks import ranks_of
from ..model.tuning.steering import Finder
from ..replay import Policy
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.schedules import GroupSchedule
from .conductor import Conductor
from .steering import StageSteering

__all__ = ["RankStage", "entries_of", "problem_of", "replicas_of"]


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
        arguments: Mapping[str, Any],
    ) -> None:
        module: Module = stage.submod
        self.index = int(stage.stage_index)
        title = f"the module of stage {self.index}"
        refuse_scripted(module, f"stage {self.index}")
        if followers_of(module) is not None:
            raise ValueError(f"{title} is offloaded already: call remove() of its handle before offload(schedule).")
        layers, self.entries = _matching(layers, lambda entry: choose(module, [entry]))
        if layers == () and self.entries:
            raise ValueError(f"{title}: {next(iter(self.entries.values()))}")
        keep, entries = _matching(keep, lambda entry: find_kept(module, [entry]))
        self.entries |= entries
        chosen, kept, searching = _groups(module, layers, keep, title)
        plans = GroupPlans(GroupSchedule(), [group.kind for group in chosen])
        if searching:
            plans.learn([GroupKey(k) for k, group in enumerate(chosen) if group.kind == BLOCK])
        modules = [
            FollowedModule(ROOT, type(module).__name__, weakref.ref(module)),
            *(
                FollowedModule(GROUP, group.name, weakref.ref(group.module), k, group.kind)
                for k, group in enumerate(chosen)
            ),
            *(FollowedModule(KEPT, name, weakref.ref(module)) for name, module in kept),
        ]
        policies = {} if policy is None else dict.fromkeys(range(len(chosen)), policy)

        log, groups = PassLog(), modules[1 : len(chosen) + 1]
        self.steering = StageSteering(self.index, conductor, groups, plans, log, policies)
        steering: Steering = self.steering
        if searching:
            steering = Finder(groups, plans, log, weakref.ref(module), steering)
        shown = {**arguments, "layers": written(module, layers), "keep": written(module, keep)}
        self.handle = OffloadHandle(modules, plans, conductor.engine, steering, log, arguments=shown)


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


def _groups(
    module: Module, layers: Any, keep: Any, title: str
) -> tuple[Sequence[Chosen], Sequence[tuple[str, Module]], bool]:
    """Return the groups that may be offloaded, the kept modules, and whether the first forward chooses among them."""
    kept = find_kept(module, keep)
    default, others = split_default(layers)
    # Blocks are groups as they are: what each of them saves exists for each microbatch, so they need not be divided.
    searching = default and not find_stacks(module, alone=True)
    if default and not searching:
        chosen = choose(module, [..., *others] if others else None, alone=True)
    elif default:
        chosen = candidates(module, choose(module, others) if others else (), [module for _, module in kept])
    else:
        chosen = choose(module, others)
    if not chosen:
        raise ValueError(
            f"{title}, a {type(module).__name__}, has no modules inside that could be offloaded. Put at least one "
            "layer on each stage."
        )
    both = {name for name, _ in kept} & {group.name for group in chosen}
    if both:
        raise ValueError(f"{title}: '{min(both)}' is chosen by layers and by keep: take it out of one of them.")
    return chosen, kept, searching


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
