"""What a handle prints: the choice of groups, and the report of the latest pass and of the recorded step."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.nn import Module

from .._folding import fold_names
from .._torch import address
from ..engine.layer import Layer
from ..engine.model_pass import ModelPass
from ..engine.recorder import TimelineRecorder
from ..engine.reload import Residency
from ..engine.statistics import Reason, Statistics
from ..engine.storage import Resident
from ..engine.tensor_marks import StorageRef
from ..planner import GroupPlan
from ..report.advice import advise
from ..report.groups import GroupReport, HeldStorage, Holder, sum_groups
from ..report.holders import find_all_holders
from ..report.report import Report
from ..report.step_timeline import StepTimeline
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.plan import OUTSIDE, Do
from ..schedule.schedules import GroupSchedule
from .module_names import Names
from .tracker import DROPPED, KEPT, FollowedModule

__all__ = ["PassLog", "Recording", "build_report", "describe", "group_names"]


def group_names(groups: Sequence[FollowedModule], sequence: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Return a readable name for each group of a sequence."""
    names = []
    for group, part in sequence:
        name = groups[group].name or "(the whole model)"
        names.append(f"{name} (part {part + 1})" if part else name)
    return tuple(names)


def describe(modules: Sequence[FollowedModule], plans: GroupPlans, plan: GroupPlan, state: str) -> str:
    """Return which groups were chosen and which of them are offloaded; `state` is "paused", "removed" or empty."""
    groups = [of for of in modules if of.group >= 0]
    names, kinds = group_names(groups, plans.order), plans.kinds(plans.order)
    shown = f" ({state})" if state else ""
    lines = [f"offload of {modules[0].name}{shown}: {len(plan.offloaded)} of {len(names)} groups are offloaded"]
    for kind in dict.fromkeys(kinds):
        of_kind = [k for k, other in enumerate(kinds) if other == kind]
        offloaded = [names[k] for k in of_kind if k in plan.offloaded]
        kept = [names[k] for k in of_kind if k not in plan.offloaded]
        lines.append(f"  {kind}: {len(offloaded)} of {len(of_kind)} offloaded")
        lines += [f"    offloaded  {fold_names(offloaded, most=6)}"] if offloaded else []
        lines += [f"    kept       {fold_names(kept, most=6)}"] if kept else []
    if any(of.role is KEPT for of in modules):
        lines.append(f"  keep: {fold_names([of.name for of in modules if of.role is KEPT], most=6)}")
    if plan.because:
        lines.append(f"  {plan.because}")
    return "\n".join(lines)


class Held(NamedTuple):
    """Memory that was offloaded but not freed, because something else references it."""

    place: int  # position of its group in the sequence of groups
    nbytes: int
    storage: StorageRef  # keeps the address from being given to another storage
    address: int


@dataclass(frozen=True)
class PassStatistics:
    """All groups of one pass, in the order in which they ran."""

    groups: tuple[tuple[Layer, GroupReport], ...]  # its state, which backward changes, and what its forward saved
    expected_bytes: int  # that only offloaded groups saved
    freed_bytes: int  # of offloaded groups, in the forward
    outside: dict[Reason, tuple[int, int]]  # count and bytes of what was kept outside of the groups
    held: tuple[Held, ...]
    saved_outside: tuple[tuple[int, weakref.ref[Module]], ...]  # bytes and module, a storage; only while recording
    sequence: tuple[GroupKey, ...]
    as_before: bool  # whether the groups ran in the order of the pass before

    @staticmethod
    def of(done: ModelPass[GroupKey], sequence: Sequence[GroupKey], last: Sequence[GroupKey] | None) -> PassStatistics:
        """Return the statistics of a pass whose forward has just ended; `last` is the sequence of the previous pass."""
        stay, expected, freed = done.roles.stay, 0, 0
        groups, held = list[tuple[Layer, GroupReport]](), list[Held]()
        residents: set[Resident] = set()  # each counts in the first group that saved it
        with done.lock:
            for layer in done.layers:
                offloaded, sums = layer.index not in stay, Counter[str]()
                kept = {reason: (number, nbytes) for reason, (number, nbytes) in layer.kept.items()}
                for storage in layer.living():
                    if min(storage.layers) != layer.index:  # [guard: storage that several groups saved]
                        continue
                    shared = not stay.isdisjoint(storage.layers)  # [guard: storage shared with a kept group -> False]
                    sums.update(storages=1, bytes_saved=storage.nbytes, bytes_offloaded=storage.bytes_copied)
                    sums.update(bytes_wasted=storage.bytes_copied if shared else 0)
                    if offloaded:
                        expected += 0 if shared else storage.nbytes
                        freed += storage.nbytes if storage.residency is Residency.HOST else 0
                    if offloaded and (shared or storage.refused):  # [guard: reason of what an offloaded group keeps]
                        reason = Reason.SHARED if shared else Reason.HOST_FULL
                        before = kept.get(reason, (0, 0))
                        kept[reason] = before[0] + 1, before[1] + storage.nbytes
                    memory = done.registry.held_elsewhere(storage)
                    if memory is not None:
                        held.append(Held(layer.index, storage.nbytes, StorageRef(memory), address(memory)))
                for resident in filter(None, (ref() for ref in layer.residents)):
                    if resident not in residents:  # [guard: kept storage that several groups saved -> True]
                        residents.add(resident)
                        sums.update(storages=1, bytes_saved=resident.nbytes)
                        expected += resident.nbytes if offloaded else 0
                groups.append((layer, GroupReport("", "", offloaded=offloaded, kept=kept, **sums)))
            refs = ((ref(), module) for ref, module in done.saved_outside)
            saved = tuple((of.nbytes, module) for of, module in refs if of and module and OUTSIDE in of.layers)
        as_before = last is None or tuple(last) == tuple(sequence)
        outside = {reason: (count, nbytes) for reason, (count, nbytes) in done.kept_outside.items()}
        return PassStatistics(tuple(groups), expected, freed, outside, tuple(held), saved, tuple(sequence), as_before)


@dataclass(eq=False)
class PassLog:
    """The latest pass of a model, and the recorded step.  It does not reference the handle."""

    latest: PassStatistics | None = None
    recording: Recording | None = None
    saved: dict[str, int] = field(default_factory=dict)  # bytes by name of the group

    def bytes_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return how many bytes each group saved that can be offloaded; 0 if that is not known."""
        return tuple(self.saved.get(name, 0) for name in names)

    def forward_done(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take the statistics of a pass whose forward has ended."""
        self.take(PassStatistics.of(done, sequence, None if self.latest is None else self.latest.sequence))

    def take(self, latest: PassStatistics) -> None:
        """Take the statistics of a pass."""
        self.latest = latest
        if self.recording is not None and self.recording.open:
            self.recording.note(self.latest)


@dataclass(eq=False)
class Recording:
    """A step that is, or was, recorded."""

    recorder: TimelineRecorder
    root: weakref.ref[Module]
    groups: Sequence[FollowedModule]  # the chosen modules
    names: tuple[str, ...]  # of the groups as they run
    open: bool = True
    passes: int = 0
    outside: dict[str, int] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    holders: dict[int, tuple[Holder, ...]] = field(default_factory=dict)

    def timeline(self) -> StepTimeline:
        """Return the recorded step."""
        return StepTimeline(self.recorder.timeline(), self.names)

    def name_of(self, layer: int) -> str:
        """Return the name of a group by its position in the pass."""
        return self.names[layer] if layer < len(self.names) else f"group {layer}"

    def note(self, latest: PassStatistics) -> None:
        """Note the names of a pass, and what else references its memory, as long as that can be found."""
        self.passes += 1
        self.names = group_names(self.groups, latest.sequence)
        self.held, self.holders = latest.held, {}
        root, saved, outside = self.root(), Counter[Module](), Counter[str]()
        modules = {} if root is None else {module: name or "the model" for name, module in root.named_modules()}
        for nbytes, saver in latest.saved_outside:
            module = saver()
            if module is not None and module is not root and module in modules:
                saved[module] += nbytes
        if root is not None:
            names, may = Names(root), {*saved, *(group.ref() for group in self.groups)}
            for module, nbytes in saved.items():
                outside[_pattern(names, modules[module], may)] += nbytes
        self.outside = dict(outside)
        if latest.held:
            with self.recorder.apart():
                self.holders = find_all_holders([held.address for held in latest.held], modules)


def _pattern(names: Names, name: str, may: Set[Module | None]) -> str:
    """Return a pattern for a module and its siblings, for the argument layers; the name if others would match too."""
    pattern = re.sub(r"\b\d+\b", "*", name)
    found = names.matching(pattern)
    return pattern if len(found) > 1 and all(named.module in may for named in found) else name


def build_report(
    plans: GroupPlans,
    groups: Sequence[FollowedModule],
    latest: PassStatistics,
    recording: Recording | None,
    statistics: Statistics,
) -> Report:
    """Return the report of the latest pass, with the times and holders of a recorded step of the same groups."""
    names, kinds = group_names(groups, latest.sequence), plans.kinds(latest.sequence)
    same = recording if recording is not None and recording.names == names else None
    recorded = None if same is None or same.open else same.timeline()
    seconds = [{} for _ in names] if recorded is None else [vars(times) for times in recorded.by_layer()]
    not_freed, rows = Counter[int](), dict[str, list[GroupReport]]()
    for entry in latest.held:
        not_freed[entry.place] += entry.nbytes
    for k, (layer, saved) in enumerate(latest.groups):
        row = replace(
            saved,
            name=names[k],
            kind=kinds[k],
            reloaded_ahead=layer.ahead,
            reloaded_on_demand=layer.on_demand,
            bytes_reloaded=layer.bytes_reloaded,
            bytes_not_freed=not_freed[k],
            **{f"{name}_seconds": value for name, value in seconds[k].items()},
        )
        rows.setdefault(row.name, []).append(row)
    by_name = [calls[0] if len(calls) == 1 else sum_groups(calls, name) for name, calls in rows.items()]
    there = {GroupKey(k) for k, of in enumerate(groups) if of.role is not DROPPED}
    absent = sorted(there - {GroupKey(key.group) for key in latest.sequence})
    absent_names = group_names(groups, absent)
    by_name += [GroupReport(name, groups[k].kind, calls=0) for (k, _), name in zip(absent, absent_names, strict=True)]
    report = Report(
        groups=tuple(by_name),
        outside=latest.outside,
        outside_modules={} if same is None else dict(same.outside),
        passes=statistics.passes,
        num_layers=_number(plans.schedule, kinds),
        peak_resident_bytes=statistics.peak_resident_bytes,
        host_bytes=statistics.host_bytes,
        host_bytes_high_water=statistics.host_bytes_high_water,
        held=_held(latest, names, recording),
        expected_bytes=latest.expected_bytes,
        dropped_bytes=latest.freed_bytes - not_freed.total(),
        step_seconds=None if recorded is None else recorded.timeline.end,
        step_passes=0 if recorded is None or same is None else same.passes,
        order="" if latest.as_before else "The groups ran in another order than in the previous pass.",
    )
    return replace(report, advice=advise(report))


def _number(schedule: GroupSchedule, kinds: Sequence[str]) -> int:
    """Return the num_layers that offloads as many groups of a kind as this schedule."""
    if schedule.num_layers is not None:
        return schedule.num_layers
    eligible = Counter(kinds[k] for k in GroupSchedule().offloaded(kinds))
    return max(eligible.values(), default=0)


def _held(latest: PassStatistics, names: Sequence[str], recording: Recording | None) -> tuple[HeldStorage, ...]:
    """Return what else references memory, if the recorded pass left the same amounts in the same groups."""
    if recording is None or [of[:2] for of in recording.held] != [of[:2] for of in latest.held]:
        return ()
    found = recording.holders
    return tuple(HeldStorage(names[of.place], of.nbytes, found.get(of.address, ())) for of in recording.held)
