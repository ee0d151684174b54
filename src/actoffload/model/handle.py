"""What `offload` returns: the way to look at offloading a model, to pause it and to end it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from .. import device as devices
from ..engine.engine import Engine
from ..engine.recorder import TimelineRecorder
from ..engine.statistics import Statistics
from ..report.step_timeline import StepTimeline
from ..schedule.execution_order import GroupKey, Planner, check_number, check_types
from ..schedule.plan import Plan
from ..schedule.schedules import GroupSchedule
from .describe import describe, group_names
from .module_hooks import ModuleHooks, hooks_of
from .reporting import Recording, Seen, build_report
from .tracker import Place, Tracker

if TYPE_CHECKING:
    from ..report.report import Report

__all__ = ["OffloadHandle"]


class OffloadHandle:
    """Offloading of one model; made by `offload`, and ended with `remove` or by leaving it as a context manager.

    ``print(handle)`` shows which groups were chosen, and which of them leave.
    """

    def __init__(self, places: Sequence[Place], planner: Planner, engine: Engine) -> None:
        self._places = tuple(places)
        self._groups = tuple(place for place in places if place.group >= 0)
        self._planner = planner
        self._engine = engine
        self._seen = Seen(self._groups)
        self._tracker = Tracker(places[0], engine, planner, self._seen.forward_done)
        self._hooks: ModuleHooks | None = ModuleHooks(self._tracker, places, (planner, engine, self._seen))

    @classmethod
    def of(cls, model: Module) -> OffloadHandle | None:
        """Return a handle of a model that is offloaded, as where the first one was not kept; None if it is not.

        Parameters
        ----------
        model : torch.nn.Module
            What `offload` was called with.

        Examples
        --------
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
        >>> _ = actoffload.offload(model)
        >>> actoffload.OffloadHandle.of(model).remove()
        >>> actoffload.OffloadHandle.of(model) is None
        True
        """
        hooks = hooks_of(model)
        if hooks is None:
            return None
        assert hooks.tracker is not None
        found = cls.__new__(cls)
        found._places, found._tracker, found._hooks = hooks.places, hooks.tracker, hooks
        found._groups = tuple(place for place in hooks.places if place.group >= 0)
        found._planner, found._engine, found._seen = hooks.behind
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a handle that was removed: a copy of the model is another one, which nobody follows."""
        places = [(place.role, place.name, place.group, place.kind) for place in self._places]
        return _removed, (places, self._planner.schedule, self._planner.expected, *self._engine.limits)

    # On and off

    def remove(self) -> None:
        """Take all hooks off the model and give the host memory back; the model is as it was before `offload`.

        Passes in flight finish as they began, and their memory goes when they do.  Doing it twice is fine.
        """
        if self.installed:
            assert self._hooks is not None
            self._hooks.remove()
            self._engine.close()
        self._hooks = None

    @property
    def active(self) -> bool:
        """Whether a forward of the model that began now would be offloaded."""
        return self.installed and not self._tracker.paused

    @property
    def installed(self) -> bool:
        """Whether the model still carries the hooks of this handle."""
        return self._hooks is not None and self._hooks.tracker is not None

    @contextmanager
    def paused(self) -> Iterator[OffloadHandle]:
        """Offload nothing in a ``with`` block; a forward that began before goes on as it began."""
        self._tracker.paused += 1
        try:
            yield self
        finally:
            self._tracker.paused -= 1

    def reschedule(
        self, *, num_layers: int | None = None, fraction: float = 1.0, max_inflight: int | None = None
    ) -> None:
        """Change how many groups leave, from the next forward on; the host memory is kept.

        Parameters
        ----------
        num_layers, fraction, max_inflight
            As in `offload`.

        Raises
        ------
        RuntimeError
            If the handle was removed.
        ValueError
            If a number is out of its range.
        TypeError
            If what should be a number is none.
        """
        self._need_hooks("be scheduled anew")
        check_types(num_layers=num_layers, fraction=fraction, max_inflight=max_inflight)
        schedule = GroupSchedule(num_layers, fraction, max_inflight)
        check_number(num_layers, [place.kind for place in self._groups], self._planner.kinds(self._planner.expected))
        self._planner.reschedule(schedule)

    def _need_hooks(self, what: str) -> None:
        if not self.installed:
            raise RuntimeError(f"This handle was removed, so it cannot {what}: call offload again and use its handle.")

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    # What was chosen

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in the order in which they are expected to run."""
        return group_names(self._groups, self._planner.expected)

    @property
    def plan(self) -> Plan:
        """What is done at which event, for the groups in `groups`."""
        return self._planner.roles(self._planner.expected).plan

    def __str__(self) -> str:
        state = "" if self.active else "paused" if self.installed else "removed"
        return describe(self._places, self._planner, state)

    def __repr__(self) -> str:
        return f"<OffloadHandle of {self._places[0].name}: {len(self.plan.offloaded)} of {len(self.groups)} groups>"

    # What happened

    def statistics(self) -> Statistics:
        """Return counts and bytes since `offload` or `reset_statistics` was called."""
        return self._engine.statistics()

    def reset_statistics(self) -> None:
        """Start all counts and sums anew, and the peaks from what is held now."""
        with self._engine.lock:
            self._engine.counters.reset()

    def trim(self) -> int:
        """Free page-locked memory that no saved tensor uses now, and return the bytes freed.

        Useful after a batch that was larger than those to come.  The next step allocates what it is short of.
        """
        return self._engine.trim()

    @contextmanager
    def recording(self, *, nvtx: bool = False) -> Iterator[None]:
        """Measure what happens in a ``with`` block, which is one training step, for `timeline` and `report`.

        Events are recorded around compute, copies and stalls, and what holds memory that was copied and given up is
        looked for, which takes a moment.  Outside of such a block nothing of this is done.

        Parameters
        ----------
        nvtx : bool
            Also mark the forward and backward of each group, and the copies, as NVTX ranges where NVTX exists.

        Raises
        ------
        RuntimeError
            If a step is being recorded already, or the handle was removed.

        Warns
        -----
        UserWarning
            If no forward of the model has ended in the block; what was recorded before is kept then.
        """
        self._need_hooks("record a step")
        before = self._seen.recording
        if before is not None and before.open:
            raise RuntimeError("A step is being recorded already: leave that `with handle.recording():` block first.")
        recorder = TimelineRecorder(self._engine.backend, self._engine.counters)
        recording = Recording(recorder, self._places[0].ref, self._groups, names=self.groups)
        if nvtx:
            recorder.mark_ranges(recording.name_of)
        self._engine.record(recorder)
        self._seen.recording = recording
        try:
            yield
            recorder.level()
            if not recording.passes:
                warnings.warn(
                    "Nothing was recorded: no forward of the model with a graph has ended in the recording block. Run "
                    "a whole training step there.",
                    UserWarning,
                    stacklevel=3,
                )
        finally:
            self._engine.record(None)
            recording.open = False
            if not recording.passes:
                self._seen.recording = before

    def timeline(self) -> StepTimeline:
        """Return the recorded step: compute, copies in both directions and stalls.

        Raises
        ------
        RuntimeError
            If no step was recorded, or the block is not left yet.
        """
        recording = self._seen.recording
        if recording is None or recording.open:
            raise RuntimeError(
                "No step was recorded: run one training step inside `with handle.recording():`, leave the block, then "
                "ask again."
            )
        return recording.timeline()

    def report(self) -> Report:
        """Return what the latest pass did, group by group, with what to do about it.

        Times and stalls, and the names of those who hold memory that was copied, need a step that was run inside of
        `recording`.

        Raises
        ------
        RuntimeError
            If no forward with a graph has ended since `offload` was called.
        """
        if self._seen.tally is None:
            raise RuntimeError(
                "There is nothing to report yet: no forward of the model has ended. Run a training step first."
            )
        return build_report(self._planner, self._groups, self._seen.tally, self._seen.recording, self.statistics())


def _removed(
    places: Sequence[tuple[str, str, int, str]],
    schedule: GroupSchedule,
    expected: tuple[GroupKey, ...],
    max_host_bytes: int | None,
    min_bytes: int | None,
) -> OffloadHandle:
    """Return a handle like another one that was removed from its model."""
    nobody = weakref.ref(Module())
    copied = [Place(role, name, nobody, group, kind) for role, name, group, kind in places]
    handle = OffloadHandle.__new__(OffloadHandle)
    handle._places = tuple(copied)
    handle._groups = tuple(place for place in copied if place.group >= 0)
    handle._planner = Planner(schedule, [place.kind for place in handle._groups])
    handle._planner.learn(expected)
    handle._engine = Engine(Plan(1), devices.backend(), max_host_bytes, min_bytes=min_bytes)
    handle._seen = Seen(handle._groups)
    handle._tracker = Tracker(copied[0], handle._engine, handle._planner, handle._seen.forward_done)
    handle._hooks = None
    return handle
