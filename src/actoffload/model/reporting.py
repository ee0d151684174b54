"""What a handle prints: the choice of groups, and the report of the latest pass and of the recorded step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn import Module

from .._folding import fold_names
from ..engine.engine import Engine
from ..engine.passes import ModelPass, latest_pass, pass_in_backward
from ..engine.statistics import Reason, Statistics, TimelineRecorder
from ..planner import GroupPlan
from ..report.build import Held, PassHistory, PassStatistics, build, on_device
from ..report.groups import GroupReport, Holder, StepFacts
from ..report.holders import find_all_holders
from ..report.memory import Memory, add_note
from ..report.report import Report
from ..report.step_timeline import StepTimeline
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.plan import OUTSIDE
from ..schedule.schedules import GroupSchedule
from .conduct import DROPPED, GROUP, KEPT, FollowedModule, Steering, group_name
from .module_names import Names, starred

__all__ = ["PassLog", "Recording", "build_report", "describe", "explain", "group_names"]


def group_names(groups: Sequence[FollowedModule], sequence: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Return a readable name for each group of a sequence."""
    return tuple(group_name(groups[group].name, part) for group, part in sequence)


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
    if plan.recomputed:
        lines.append(f"  {len(plan.recomputed)} of {len(names)} groups are recomputed")
    if any(of.role is KEPT for of in modules):
        lines.append(f"  keep: {fold_names([of.name for of in modules if of.role is KEPT], most=6)}")
    if plan.because:
        lines.append(f"  {plan.because}")
    return "\n".join(lines)


@dataclass(frozen=True)
class LatestPass:
    """The latest pass whose forward has ended."""

    statistics: PassStatistics
    outside: dict[Reason, tuple[int, int]]  # count and bytes of what was kept outside of the groups
    saved_outside: tuple[tuple[int, weakref.ref[Module]], ...]  # bytes and module, a storage; only while recording
    sequence: tuple[GroupKey, ...]
    as_before: bool  # whether the groups ran in the order of the pass before
    partly: bool = False  # groups that are kept were seen in an earlier pass only
    because: str = ""  # this pass did what it did, where that is not what the plan says
    unseen: frozenset[int] = frozenset()  # positions of kept groups that no pass has seen as they ran in this one

    @staticmethod
    def of(done: ModelPass[GroupKey], sequence: Sequence[GroupKey], last: Sequence[GroupKey] | None) -> LatestPass:
        """Return what a pass whose forward has just ended did; `last` is the sequence of the previous pass."""
        with done.lock:
            statistics = PassStatistics.of(done, done.inputs)
            refs = ((ref(), module) for ref, module in done.saved_outside)
            saved = tuple((of.nbytes, module) for of, module in refs if of and module and OUTSIDE in of.layers)
        as_before = last is None or tuple(last) == tuple(sequence)
        outside = {reason: (count, nbytes) for reason, (count, nbytes) in done.kept_outside.items()}
        return LatestPass(statistics, outside, saved, tuple(sequence), as_before)

    def called(self) -> list[GroupKey]:
        """Return the groups in the order of their calls; in the pass that found them a call may have several rows."""
        return [key for key, (_, row) in zip(self.sequence, self.statistics.groups, strict=True) if row.calls]

    def with_kept(self, seen: Seen) -> LatestPass:
        """Return this pass with what its kept groups, and the code outside of groups, saved in earlier ones."""
        groups, unseen = list(self.statistics.groups), set[int]()
        for k, (key, (layer, own)) in enumerate(zip(self.sequence, groups, strict=True)):
            if own.offloaded:
                continue
            row = seen.rows.get(key, {}).get(layer.recomputed)
            if row is None:
                unseen.add(k)
            else:
                groups[k] = layer, _kept(row)
        statistics = replace(self.statistics, groups=tuple(groups))
        return replace(self, statistics=statistics, outside=seen.outside, partly=True, unseen=frozenset(unseen))

    def with_sizes(self, plan: GroupPlan, names: Sequence[str]) -> LatestPass:
        """Return this pass with the bytes that a plan has of recomputed groups, and of those that were not seen."""
        less = dict(zip(plan.names, plan.recomputed_nbytes, strict=False))
        expected = dict(zip(plan.names, plan.nbytes, strict=True))
        groups = list(self.statistics.groups)
        for k, (name, (layer, row)) in enumerate(zip(names, groups, strict=True)):
            saved = max(row.bytes_saved, expected.get(name, 0)) if k in self.unseen else row.bytes_saved
            again = less.get(name, 0) if row.recomputed else 0
            groups[k] = layer, replace(row, bytes_saved=saved, bytes_recomputed=again)
        return replace(self, statistics=replace(self.statistics, groups=tuple(groups)))


def _kept(row: GroupReport) -> GroupReport:
    """Return what a group saves if it is kept."""
    kept: dict[Reason, tuple[int, int]] = {
        reason: amount for reason, amount in row.kept.items() if reason is not Reason.SHARED
    }
    return replace(row, offloaded=False, bytes_offloaded=0, bytes_wasted=0, kept=kept)


@dataclass(eq=False)
class Seen:
    """What passes saved in which all groups were seen, by the way in which each group ran: plain data."""

    rows: dict[GroupKey, dict[Hashable, GroupReport]] = field(default_factory=dict)  # by `Layer.recomputed`
    outside: dict[Reason, tuple[int, int]] = field(default_factory=dict)  # in the latest of them

    def add(self, latest: LatestPass) -> None:
        """Add a pass."""
        self.outside = latest.outside
        for key, (layer, row) in zip(latest.sequence, latest.statistics.groups, strict=True):
            self.rows.setdefault(key, {})[layer.recomputed] = row


@dataclass(eq=False)
class PassLog:
    """The latest pass of a model, and the recorded step.  It does not reference the handle."""

    latest: LatestPass | None = None
    full: LatestPass | None = None  # the latest that saved at least half as much as the largest
    first: Callable[[], None] | None = None  # called once, after the first pass
    recording: Recording | None = None
    seen: Seen = field(default_factory=Seen)
    history: PassHistory = field(default_factory=PassHistory)

    @property
    def records(self) -> bool:
        """Whether a step is being recorded."""
        return self.recording is not None and self.recording.open

    def bytes_of(self, order: Sequence[GroupKey]) -> tuple[int, ...]:
        """Return how many bytes that can be offloaded each group saved in the latest full pass; 0 if not known."""
        latest, saved = self.full or self.latest, dict[GroupKey, int]()
        for key, (_, row) in () if latest is None else zip(latest.sequence, latest.statistics.groups, strict=True):
            saved[key] = row.bytes_saved
        return tuple(saved.get(key, 0) for key in order)

    def forward_done(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take the statistics of a pass whose forward has ended."""
        latest = LatestPass.of(done, sequence, None if self.latest is None else self.latest.called())
        if done.partly:
            latest = latest.with_kept(self.seen)
        self.history.add(done)
        self.take(replace(latest, statistics=self.history.before(done, latest.statistics)))

    def nothing_offloaded(self, *, replayed: bool = False) -> None:
        """Note that the rows of passes from here on are known, because every group is kept, or `replayed` as so far."""
        latest = self.latest
        if latest is None:
            return
        groups, unseen = [], set[int]()
        for k, (key, (layer, own)) in enumerate(zip(latest.sequence, latest.statistics.groups, strict=True)):
            row = own if replayed else self.seen.rows.get(key, {}).get(None)
            if row is None:  # [guard: groups that were replayed in all passes so far]
                unseen.add(k)
            groups.append((layer, replace(_kept(row or own), recomputed=replayed and own.recomputed)))
        nothing: dict[str, Any] = {"expected_bytes": 0, "freed_bytes": 0, "later_bytes": 0, "held": ()}
        statistics = replace(latest.statistics, groups=tuple(groups), **nothing)
        outside = self.seen.outside
        self.take(replace(latest, statistics=statistics, outside=outside, partly=True, unseen=frozenset(unseen)))

    def take(self, latest: LatestPass, followed: Sequence[GroupKey] | None = None) -> None:
        """Take the statistics of a pass; `followed` is what ran in it if that was not the groups alone."""
        if not latest.partly:
            self.seen.add(latest)
        first = self.latest is None
        self.latest = latest
        if self.history.note(latest.statistics):
            self.full = latest
        if self.recording is not None and self.records:
            self.recording.note(self.latest, followed)
        if first and self.first is not None:
            self.first()

    def reset(self) -> None:
        """Compare the passes from here on with each other, and not with earlier ones."""
        self.history.reset()
        self.full = None


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

    def note(self, latest: LatestPass, followed: Sequence[GroupKey] | None = None) -> None:
        """Note the names of a pass, and what else references its memory, as long as that can be found."""
        self.passes += 1
        names = group_names(self.groups, latest.sequence if followed is None else followed)
        self.finding |= names != group_names(self.groups, latest.sequence)
        # Layers of the timeline are numbered by pass: in the pass that found the groups there are others.
        self.names = names if self.passes == 1 or not self.finding else ()
        self.held, self.holders = latest.statistics.held, {}
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
                outside[starred(named[module].clean)] += nbytes
            self.outside = dict(sorted(outside.items(), key=lambda item: (-item[1], item[0])))
        if self.held:
            with self.recorder.apart():
                self.holders = find_all_holders([held.address for held in self.held], modules)


def build_report(
    plans: GroupPlans,
    groups: Sequence[FollowedModule],
    latest: LatestPass,
    recording: Recording | None,
    statistics: Statistics,
    plan: GroupPlan,
    facts: StepFacts | None = None,
    largest_bytes: int = 0,
) -> Report:
    """Return the report of a pass, with the times and holders of a recorded step of the same groups."""
    names, kinds = group_names(groups, latest.sequence), plans.kinds(latest.sequence)
    latest = latest.with_sizes(plan, names)
    same = recording if recording is not None and recording.names == names else None
    done = same is not None and not same.open
    there = {GroupKey(k) for k, of in enumerate(groups) if of.role is not DROPPED}
    absent = sorted(there - {GroupKey(key.group) for key in latest.sequence})
    absent_names = group_names(groups, absent)
    report = build(
        names,
        kinds,
        latest.statistics,
        statistics,
        recorded=same.timeline() if same is not None and done else None,
        holders=_holders(latest, recording),
        outside=latest.outside,
        absent=[GroupReport(name, groups[k].kind, calls=0) for (k, _), name in zip(absent, absent_names, strict=True)],
        facts=facts,
        largest_bytes=largest_bytes,
        outside_modules={} if same is None else dict(same.outside),
        num_layers=None if _is_measured(facts) else _number(plans.schedule, kinds),
        step_passes=same.passes if same is not None and done else 0,
        order="" if latest.as_before else "The groups ran in another order than in the previous pass.",
    )
    return replace(report, peak_resident_bytes=None) if latest.partly else report


def _is_measured(facts: StepFacts | None) -> bool:
    """Return whether the plan comes from measurement, which does not go by kinds of groups."""
    if facts is None or not facts.times or facts.arguments is None:
        return False
    return all(facts.arguments.get(name) is None for name in ("num_layers", "fraction", "max_inflight"))


def _number(schedule: GroupSchedule, kinds: Sequence[str]) -> int:
    """Return the num_layers that offloads as many groups of a kind as this schedule."""
    if schedule.num_layers is not None:
        return schedule.num_layers
    eligible = Counter(kinds[k] for k in GroupSchedule().offloaded(kinds))
    return max(eligible.values(), default=0)


def _holders(latest: LatestPass, recording: Recording | None) -> dict[int, tuple[Holder, ...]] | None:
    """Return what else references memory, if the recorded pass left the same amounts in the same groups."""
    held = latest.statistics.held
    if recording is None or [of[:2] for of in recording.held] != [of[:2] for of in held]:
        return None
    now = {of.address: entry.address for of, entry in zip(recording.held, held, strict=True)}
    return {now[at]: holders for at, holders in recording.holders.items()}


# Errors


def explain(
    error: BaseException,
    modules: Sequence[FollowedModule],
    engine: Engine,
    current: ModelPass[GroupKey] | None,
    calls: Sequence[FollowedModule],
    steering: Steering,
    *,
    idle: bool,
) -> None:
    """Add a note to an out-of-memory error: what holds the memory, and what would help.

    `current` and `calls` are the pass and the calls in progress in this thread; `idle`: the forward is not followed.
    """
    with suppress(Exception):  # the error matters more than the note
        plan, groups = steering.plan(), [module for module in modules if module.group >= 0]
        done = None if idle else current or pass_in_backward(engine) or latest_pass(engine)
        if not (idle or isinstance(done, ModelPass)):
            return
        memory = Memory(modules[0].module, engine.backend, plan, steering.facts().get("next_choice", ""))
        again = {plan.names[k] for k in (*plan.offloaded, *plan.recomputed)}
        kept = {name: nbytes for name, nbytes in zip(plan.names, plan.nbytes, strict=True) if name not in again}
        if isinstance(done, ModelPass):
            with done.lock:
                for name, layer in zip(group_names(groups, done.order.started), done.layers, strict=False):
                    own = kept.get(name, 0) if done.partly else 0  # kept groups are not followed
                    memory.saved[name] = max(on_device([layer]), own)
                    memory.refused += sum(storage.nbytes for storage in layer.living() if storage.refused)
                memory.outside = done.kept_outside.get(Reason.OUTSIDE, [0, 0])[1]
        else:
            memory.saved.update(kept)
        if calls:
            memory.where = f"in the forward of {group_name(calls[-1].name)}"
            memory.is_outside = not idle and calls[-1].role is not GROUP
        add_note(error, memory)
