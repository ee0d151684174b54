"""What a handle prints: the choice of groups, and the report of the latest pass and of the recorded step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn import Module

from .._text import fold_names
from ..device.base import Backend
from ..engine.passes import ModelPass
from ..engine.statistics import Reason, Statistics, TimelineRecorder
from ..report.build import Held, PassHistory, PassStatistics, build, on_device
from ..report.holders import Holder, find_all_holders
from ..report.memory import Memory, add_note
from ..report.plots import StepTimeline
from ..report.report import GroupReport, Report
from ..schedule.execution_order import OUTSIDE, GroupKey, GroupPlans
from ..schedule.plan import Plan
from .follow import DROPPED, GROUP, KEPT, FollowedModule, Steering, group_name
from .select import Names, starred

__all__ = ["PassLog", "Recording", "build_report", "count_pass", "describe", "explain", "group_names"]

NOTHING: dict[str, Any] = {"offloaded": False, "bytes_offloaded": 0, "bytes_wasted": 0}


def group_names(groups: Sequence[FollowedModule], sequence: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Return a readable name for each group of a sequence."""
    return tuple(group_name(groups[group].name, part) for group, part in sequence)


def describe(modules: Sequence[FollowedModule], plans: GroupPlans, plan: Plan, state: str) -> str:
    """Return which groups were chosen and which of them are offloaded; `state` is "paused", "removed" or empty."""
    groups = [module for module in modules if module.group >= 0]
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
    if plan.recomputed:
        lines.append(f"  {len(plan.recomputed)} of {len(names)} groups are recomputed")
    if excluded := [module.name for module in modules if module.role is KEPT]:
        lines.append(f"  keep: {fold_names(excluded, most=6)}")
    if plan.because:
        lines.append(f"  {plan.because}")
    return "\n".join(lines)


def count_pass(done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> PassStatistics:
    """Return what a pass of a model did whose forward has just ended."""
    with done.lock:
        refs = ((ref(), module) for ref, module in done.saved_outside)
        return replace(
            PassStatistics.of(done, done.inputs),
            sequence=tuple(sequence),
            outside={reason: (count, nbytes) for reason, (count, nbytes) in done.kept_outside.items()},
            saved_outside=tuple((s.nbytes, module) for s, module in refs if s and module and OUTSIDE in s.layers),
            partly=done.partly,
        )


def add_planned_bytes(latest: PassStatistics, plan: Plan, names: Sequence[str]) -> PassStatistics:
    """Return statistics with the bytes that a plan has of groups that are recomputed, or were not followed."""
    less = dict(zip(plan.names, plan.recomputed_nbytes, strict=False))
    saved, groups = dict(zip(plan.names, plan.nbytes, strict=False)), []
    for name, (layer, row) in zip(names, latest.groups, strict=True):
        unseen = latest.partly and not row.offloaded and not row.recomputed
        nbytes = max(row.bytes_saved, saved.get(name, 0) * unseen)
        again = less.get(name, 0) * row.recomputed
        groups.append((layer, replace(row, bytes_saved=nbytes, bytes_recomputed=again)))
    return replace(latest, groups=tuple(groups))


@dataclass(eq=False)
class PassLog:
    """The latest pass of a model, and the recorded step.  It does not reference the handle."""

    latest: PassStatistics | None = None
    full: PassStatistics | None = None  # the latest that saved at least half as much as the largest: the one to report
    first: Callable[[], None] | None = None  # called once, after the first pass
    recording: Recording | None = None
    history: PassHistory = field(default_factory=PassHistory)

    @property
    def records(self) -> bool:
        """Whether a step is being recorded."""
        return self.recording is not None and self.recording.open

    def bytes_of(self, order: Sequence[GroupKey]) -> tuple[int, ...]:
        """Return how many bytes that can be offloaded each group saved in the latest full pass; 0 if not known."""
        full = () if self.full is None else zip(self.full.sequence, self.full.groups, strict=True)
        saved = {key: row.bytes_saved for key, (_, row) in full}
        return tuple(saved.get(key, 0) for key in order)

    def forward_done(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take the statistics of a pass whose forward has ended."""
        self.history.add(done)
        self.take(replace(count_pass(done, sequence), waiting=self.history.waiting(done)))

    def nothing_offloaded(self, *, replayed: bool = False) -> None:
        """Note that passes from here on are not followed: every group is kept, or `replayed` as in the latest."""
        if self.latest is not None:
            groups = [
                (layer, replace(row, **NOTHING) if replayed and row.recomputed else GroupReport("", calls=row.calls))
                for layer, row in self.latest.groups
            ]
            latest = replace(self.latest, expected_bytes=0, freed_bytes=0, later_bytes=0, held=(), waiting=0)
            self.take(replace(latest, groups=tuple(groups), partly=True))
            self.full = self.latest

    def take(self, latest: PassStatistics, followed: Sequence[GroupKey] | None = None) -> None:
        """Take the statistics of a pass; `followed` is what ran in it if that was not the groups alone."""
        first = self.latest is None
        if latest.partly and self.latest is not None:
            latest = replace(latest, outside=self.latest.outside)
        self.latest = latest
        if self.history.is_full(latest):
            self.full = latest
        if self.recording is not None and self.records:
            self.recording.note(latest, followed)
        if first and self.first is not None:
            self.first()

    def reset(self) -> None:
        """Compare the passes from here on with each other, and not with earlier ones."""
        self.history.reset()


@dataclass(eq=False)
class Recording:
    """A step that is, or was, recorded."""

    recorder: TimelineRecorder
    root: weakref.ref[Module]
    groups: Sequence[FollowedModule]  # the chosen modules
    names: tuple[str, ...]  # of the groups as they run
    open: bool = True
    passes: int = 0
    finding: bool = False  # other modules than the groups were followed in one of the passes
    outside: dict[str, int] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    holders: dict[int, tuple[Holder, ...]] = field(default_factory=dict)

    def timeline(self) -> StepTimeline:
        """Return the recorded step."""
        return StepTimeline(self.recorder.timeline(), self.names)

    def name_of(self, layer: int) -> str:
        """Return the name of a group by its position in the pass."""
        return self.names[layer] if layer < len(self.names) else f"group {layer}"

    def note(self, latest: PassStatistics, followed: Sequence[GroupKey] | None = None) -> None:
        """Note the names of a pass, and what else references its memory, as long as that can be found."""
        self.passes += 1
        names = group_names(self.groups, latest.sequence if followed is None else followed)
        self.finding |= names != group_names(self.groups, latest.sequence)
        # Layers of the timeline are numbered by pass: in the pass that found the groups there are others.
        self.names = names if self.passes == 1 or not self.finding else ()
        self.held, self.holders = latest.held, {}
        root, saved = self.root(), Counter[Module]()
        modules = {} if root is None else {module: name or "the model" for name, module in root.named_modules()}
        for nbytes, saver in latest.saved_outside:
            module = saver()
            if module is not None and module is not root and module in modules:
                saved[module] += nbytes
        self.outside = {}
        if root is not None and saved:
            named, outside = Names(root).first, Counter[str]()
            for module, nbytes in saved.items():
                outside[starred(named[module])] += nbytes
            self.outside = dict(sorted(outside.items(), key=lambda item: (-item[1], item[0])))
        if self.held:
            with self.recorder.apart():
                self.holders = find_all_holders([held.address for held in self.held], modules)


def build_report(
    plans: GroupPlans,
    groups: Sequence[FollowedModule],
    latest: PassStatistics,
    recording: Recording | None,
    statistics: Statistics,
    plan: Plan,
    **more: Any,
) -> Report:
    """Return the report of a pass, with the times and holders of a recorded step of the same groups.

    `more` are further fields of `Report`.
    """
    names, kinds = group_names(groups, latest.sequence), plans.kinds(latest.sequence)
    done = recording is not None and recording.names == names and not recording.open
    called = {key.group for key in latest.sequence}
    absent = [group for group in groups if group.role is not DROPPED and group.group not in called]
    held, holders = latest.held, None
    if recording is not None and [each[:2] for each in recording.held] == [each[:2] for each in held]:
        now = {each.address: entry.address for each, entry in zip(recording.held, held, strict=True)}
        holders = {now[at]: found for at, found in recording.holders.items()}
    if recording is not None and done:
        more |= {"recorded": recording.timeline(), "step_passes": recording.passes}
    if recording is not None and recording.names == names:
        more["outside_modules"] = dict(recording.outside)
    if latest.partly:
        more["peak_resident_bytes"] = None
    return build(
        names,
        kinds,
        add_planned_bytes(latest, plan, names),
        statistics,
        holders=holders,
        absent=[GroupReport(group_name(group.name), group.kind, calls=0) for group in absent],
        **more,
    )


# Errors


def explain(
    error: BaseException,
    modules: Sequence[FollowedModule],
    backend: Backend,
    done: ModelPass[GroupKey] | None,
    calls: Sequence[FollowedModule],
    steering: Steering,
) -> None:
    """Add a note to an out-of-memory error: what holds the memory, and what would help.

    `done` is the pass, None in a forward that is not followed; `calls` are those in progress in this thread.
    """
    with suppress(Exception):  # the error matters more than the note
        plan, groups = steering.plan(), [module for module in modules if module.group >= 0]
        memory = Memory(modules[0].module, backend, plan, steering.facts().get("next_choice", ""))
        again = {plan.names[k] for k in (*plan.offloaded, *plan.recomputed)}
        kept = {name: nbytes for name, nbytes in zip(plan.names, plan.nbytes, strict=False) if name not in again}
        if done is None:
            memory.saved.update(kept)
        else:
            with done.lock:
                for name, layer in zip(group_names(groups, done.order.started), done.layers, strict=False):
                    own = kept.get(name, 0) if done.partly else 0  # kept groups are not followed
                    memory.saved[name] = max(on_device(layer), own)
                    memory.refused += sum(storage.nbytes for storage in layer.living() if storage.refused)
                memory.outside = done.kept_outside.get(Reason.OUTSIDE, [0, 0])[1]
        if calls:
            memory.where = f"in the forward of {group_name(calls[-1].name)}"
            memory.is_outside = done is not None and calls[-1].role is not GROUP
        add_note(error, memory)
