"""Build the report of a handle from its latest pass and its recorded step."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from torch.nn import Module

from ..engine.model_pass import ModelPass
from ..engine.recorder import TimelineRecorder
from ..engine.statistics import Statistics
from ..report.advice import advise
from ..report.groups import GroupReport, HeldStorage, Holder, sum_groups
from ..report.holders import find_all_holders
from ..report.report import Report
from ..report.step_timeline import LayerTimes, StepTimeline
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.schedules import GroupSchedule
from .describe import group_names
from .module_names import Names
from .pass_statistics import GroupStatistics, Held, PassStatistics
from .tracker import FollowedModule

__all__ = ["PassLog", "Recording", "build_report"]


class PassLog:
    """The latest pass of a model, and the recorded step.  It does not reference the handle.

    Parameters
    ----------
    groups : sequence of FollowedModule
        The chosen modules.
    """

    def __init__(self, groups: Sequence[FollowedModule]) -> None:
        self.groups = groups
        self.latest: PassStatistics | None = None
        self.recording: Recording | None = None

    def forward_done(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take the statistics of a pass whose forward has ended."""
        self.latest = PassStatistics.of(done, sequence, None if self.latest is None else self.latest.sequence)
        if self.recording is not None and self.recording.open:
            _note_pass(self.recording, self.latest)


@dataclass(eq=False)
class Recording:
    """A step that is, or was, recorded.

    Parameters
    ----------
    recorder : TimelineRecorder
        Its events.
    root : weakref of torch.nn.Module
        The model.
    groups : sequence of FollowedModule
        The chosen modules.
    """

    recorder: TimelineRecorder
    root: weakref.ref[Module]
    groups: Sequence[FollowedModule]
    open: bool = True
    names: tuple[str, ...] = ()
    passes: int = 0
    outside: Counter[str] = field(default_factory=Counter)
    held: tuple[Held, ...] = ()
    holders: dict[int, tuple[Holder, ...]] = field(default_factory=dict)

    def timeline(self) -> StepTimeline:
        """Return the recorded step."""
        return StepTimeline(self.recorder.timeline(), self.names)

    def name_of(self, layer: int) -> str:
        """Return the name of a group by its position in the pass."""
        return self.names[layer] if layer < len(self.names) else f"group {layer}"


def _note_pass(recording: Recording, latest: PassStatistics) -> None:
    """Note the names of a recorded pass, and what else references its memory, as long as that can be found."""
    recording.passes += 1
    recording.names = group_names(recording.groups, latest.sequence)
    recording.held, recording.holders = latest.held, {}
    root = recording.root()
    modules = {} if root is None else {module: name or "the model" for name, module in root.named_modules()}
    saved = Counter[Module]()
    for nbytes, saver in latest.saved_outside:
        module = saver()
        if module is not None and module is not root and module in modules:
            saved[module] += nbytes
    recording.outside = Counter[str]()
    if root is not None:
        names, may = Names(root), {*saved, *(group.ref() for group in recording.groups)}
        for module, nbytes in saved.items():
            recording.outside[_pattern(names, modules[module], may)] += nbytes
    if latest.held:
        with recording.recorder.apart():
            recording.holders = find_all_holders([held.address for held in latest.held], modules)


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
    """Return the report of the latest pass.

    Parameters
    ----------
    plans : GroupPlans
        Plans of the groups.
    groups : sequence of FollowedModule
        The chosen modules.
    latest : PassStatistics
        The latest pass.
    recording : Recording or None
        The recorded step, for times and holders.
    statistics : Statistics
        Sums since the last reset.
    """
    names = group_names(groups, latest.sequence)
    kinds = plans.kinds(latest.sequence)
    recorded = None if recording is None or recording.open or recording.names != names else recording.timeline()
    timeline = None if recorded is None else recorded.timeline
    seconds = () if recorded is None else recorded.by_layer()
    passes = 0 if recorded is None or recording is None else recording.passes
    held = _holders(latest, names, recording)
    rows = [
        _row(group, name, kind, seconds[k] if recorded else None, _not_freed(k, latest.held))
        for k, (group, name, kind) in enumerate(zip(latest.groups, names, kinds, strict=True))
    ]
    ran = {key.group for key in latest.sequence}
    chosen = group_names(groups, [GroupKey(k) for k in range(len(groups))])
    absent = [(k, name) for k, name in enumerate(chosen) if k not in ran]
    expected = sum(group.bytes_expected for group in latest.groups if group.offloaded)
    gone = sum(group.bytes_freed for group in latest.groups if group.offloaded)
    schedule = plans.schedule
    report = Report(
        groups=(
            *_by_name(rows),
            *(GroupReport(name, groups[k].kind, calls=0) for k, name in absent),
        ),
        outside=latest.outside,
        outside_modules={} if recording is None or recording.names != names else dict(recording.outside),
        passes=statistics.passes,
        num_layers=_number(schedule, kinds),
        peak_resident_bytes=statistics.peak_resident_bytes,
        host_bytes=statistics.host_bytes,
        host_bytes_high_water=statistics.host_bytes_high_water,
        held=held,
        expected_bytes=expected,
        dropped_bytes=gone - sum(entry.nbytes for entry in latest.held),
        step_seconds=None if timeline is None else timeline.end,
        step_passes=passes,
        order="" if latest.as_before else "The groups ran in another order than in the previous pass.",
    )
    return replace(report, advice=advise(report))


def _number(schedule: GroupSchedule, kinds: Sequence[str]) -> int:
    """Return the num_layers that offloads as many groups of a kind as this schedule."""
    if schedule.num_layers is not None:
        return schedule.num_layers
    leaving = [kinds[k] for k in GroupSchedule().offloaded(kinds)]  # of which a fraction leaves
    return max((leaving.count(kind) for kind in set(leaving)), default=0)


def _not_freed(place: int, held: Sequence[Held]) -> int:
    return sum(entry.nbytes for entry in held if entry.place == place)


def _holders(latest: PassStatistics, names: Sequence[str], recording: Recording | None) -> tuple[HeldStorage, ...]:
    """Return what else references memory, if the recorded pass left the same amounts in the same groups."""
    if recording is None or [of.amount for of in recording.held] != [of.amount for of in latest.held]:
        return ()
    found = recording.holders
    return tuple(HeldStorage(names[of.place], of.nbytes, found.get(of.address, ())) for of in recording.held)


def _row(group: GroupStatistics, name: str, kind: str, times: LayerTimes | None, not_freed: int) -> GroupReport:
    layer = group.layer
    return GroupReport(
        name,
        kind,
        offloaded=group.offloaded,
        storages=group.storages,
        bytes_saved=group.bytes_saved,
        bytes_offloaded=group.bytes_offloaded,
        bytes_wasted=group.bytes_wasted,
        kept=group.kept,
        reloaded_ahead=layer.ahead,
        reloaded_on_demand=layer.on_demand,
        bytes_reloaded=layer.bytes_reloaded,
        bytes_not_freed=not_freed,
        forward_seconds=None if times is None else times.forward,
        backward_seconds=None if times is None else times.backward,
        forward_stall_seconds=None if times is None else times.forward_stall,
        backward_stall_seconds=None if times is None else times.backward_stall,
    )


def _by_name(rows: Sequence[GroupReport]) -> list[GroupReport]:
    """Sum the calls of each group."""
    of: dict[str, list[GroupReport]] = {}
    for row in rows:
        of.setdefault(row.name, []).append(row)
    return [mine[0] if len(mine) == 1 else sum_groups(mine, name) for name, mine in of.items()]
