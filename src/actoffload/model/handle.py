"""The handle that `offload` returns for a model: it describes, pauses, reports and ends offloading."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

from torch.nn import Module

from .. import device as devices
from .._arguments import check_num_layers, check_whole, checked_limits, number_of_bytes
from .._text import fold_names
from .._torch import unsupported
from .._warnings import warn
from ..engine.engine import Engine
from ..replay.policy import everything, policy_for
from ..report.build import Offloading, build
from ..report.plots import Frontier
from ..report.report import GroupReport, Report
from ..schedule.plan import Plan
from ..schedule.schedules import GroupSchedule
from ..schedule.timeline import Timeline
from ..tune.exchange import Ranks
from ..tune.findings import Findings, Fit
from .follow import KEPT, ModelState, follow, handle_of, refuse_scripted
from .groups import Names, find_modules, planned_modules, read_entries
from .reporting import describe
from .steering import Steering
from .tracker import Tracker
from .tuner import Tuner

UNRUN = "Run a training step first; under torch.no_grad nothing is saved."


class Handle(Offloading):
    """What the handles of a model and of a schedule have in common."""

    _removed = False

    def __init__(self, engine: Engine, models: Iterable[Steering]) -> None:
        self._engine, self._trackers = engine, [*map(Tracker, models)]
        self._logs = [tracker.state.log for tracker in self._trackers]
        follow(self._trackers, self)

    @property
    def installed(self) -> bool:
        """Whether this handle was not removed."""
        return not self._removed

    @property
    def active(self) -> bool:
        """Whether the next forward will be offloaded."""
        return self.installed and not any(tracker.paused for tracker in self._trackers)

    @contextmanager
    def paused(self) -> Iterator[Self]:
        """Offload nothing in a ``with`` block; a forward that began before it finishes as it began."""
        pause = _Pause()
        for tracker in self._trackers:
            tracker.pauses.add(pause)
        try:
            yield self
        finally:
            for tracker in self._trackers:
                tracker.pauses.discard(pause)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """End offloading and free the host memory; everything is as it was before `offload`.

        Passes in progress finish as they began, and their memory is freed when they do.  A second call does nothing.
        """
        if not self._removed:
            for tracker in self._trackers:
                tracker.retire()
            self._engine.close()
            self._removed = True  # last: after an interrupt it is called again

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None: copies of a model are not offloaded."""
        return type(None), ()


class OffloadHandle(Handle):
    """Offloading of one model; made by `offload`, and ended with `remove` or by leaving it as a context manager.

    ``print(handle)`` shows which groups were chosen, and which of them are offloaded.
    """

    def __init__(self, steering: Steering) -> None:
        self._state, self._log = steering.state, steering.state.log
        super().__init__(self._state.engine, [steering])
        (self._tracker,) = self._trackers

    @classmethod
    def of(cls, model: Module) -> OffloadHandle | None:
        """Return the handle of the module that `offload` was called with; None for modules that are not offloaded.

        >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
        >>> _ = actoffload.offload(model)
        >>> actoffload.OffloadHandle.of(model).remove()
        >>> actoffload.OffloadHandle.of(model) is None
        True
        """
        if not isinstance(model, Module):
            raise TypeError(f"OffloadHandle.of got {model!r}; expected the model that offload was called with.")
        handle = handle_of(model)
        return handle if isinstance(handle, OffloadHandle) else None

    def _check_installed(self, what: str) -> None:
        if not self.installed:
            raise RuntimeError(
                f"This handle was removed, so it cannot {what}: call offload again and use the handle that it returns."
            )

    # What was chosen

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in their expected execution order."""
        return self._state.names()

    @property
    def plan(self) -> Plan:
        """Which groups are kept, offloaded and recomputed, and what that costs; ``save`` writes it to a file."""
        plan, replays = self._tracker.steering.plan(), self._tracker.replays
        refused = replays.refused
        if not refused:
            return plan
        saves = [None if name in refused else own for name, own in zip(plan.names, plan.saves, strict=False)]
        return replace(plan, saves=tuple(saves), because=f"{plan.because} {replays.refusals()}".strip())

    @property
    def settling(self) -> bool:
        """Whether passes are still measured, so that the plan may change in the next one.

        ``while handle.settling: train_step()`` ends with the final plan, in all ranks of a model after the same step.
        It becomes True again if the plan no longer fits.  Where nothing is measured it is False, and
        ``handle.plan.because`` has the reason.
        """
        return self.active and self._tracker.steering.settling

    def __str__(self) -> str:
        condition = "" if self.active else "paused" if self.installed else "removed"
        return describe(self._state, self.plan, condition)

    def __repr__(self) -> str:
        groups = f"{len(self.plan.offloaded)} of {len(self.groups)} groups{', removed' * self._removed}"
        return f"<OffloadHandle of {self._state.root.name}: {groups}>"

    # What happened

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one training step, run in a ``with`` block, for `timeline` and `report`.

        Events are recorded around compute, copies and stalls.  What else references memory that should have been freed
        is searched for, which takes time.

        Raises
        ------
        RuntimeError
            If a step is being recorded already, or the handle was removed.

        Warns
        -----
        UserWarning
            If no forward ended in the block; the previous recording is kept then.
        """
        self._check_installed("record a step")
        if self._log.records:
            raise RuntimeError("A step is being recorded already: leave that `with handle.recording():` block first.")
        with self._log.record(self._engine, partial(_named_modules, self._state.root.ref)) as recording:
            yield
        if not recording.passes:
            warn(
                "Nothing was recorded: no forward of the model with a graph ended in the recording block. Run a "
                "whole training step there."
            )

    def timeline(self) -> Timeline:
        """Return the recorded step: compute, copies in both directions and stalls.

        `actoffload.report.plots.plot_timeline` draws it; its layers are the groups as they ran.
        Raises a `RuntimeError` if no step was recorded, or the block has not ended yet.
        """
        recording = self._log.recording
        if recording is None:
            raise RuntimeError(
                "No step was recorded: run one training step inside `with handle.recording():`, and call "
                "timeline() after the block."
            )
        return recording.recorder.timeline()

    def frontier(self) -> Frontier:
        """Search the plans of which none is both slower and larger than another, from what the first passes measured.

        They are for the groups and shapes of these passes.  Each call takes some seconds, and runs no pass.  Raises a
        `RuntimeError` if the costs are not known: while `settling` is True, after a choice by hand, and without an
        accelerator.
        """
        return Frontier(self._tracker.steering.costs().frontier(), self.plan)

    def fits(self, *, tokens: int | None = None, memory: int | str | None = None) -> Fit:
        """Predict the largest inputs that would train, or whether inputs of some size would, and what a pass takes.

        The plan is searched anew from what the first passes measured; no pass runs.  ``print`` gives a sentence.

        Parameters
        ----------
        tokens : int, optional
            Elements of the largest input, such as batch times sequence of `input_ids`.  By default the most that fit.
        memory : int or str, optional
            Device memory that forward and backward may take, as in `memory_budget`, such as "24GiB".  By default that
            of the device, or the budget.

        Raises
        ------
        RuntimeError
            If the costs are not known, as in `frontier`, or the inputs have no tensors; if several forwards run before
            a backward.

        Notes
        -----
        What was allocated before a pass, and gradients, stay the same; other memory and the times of the device grow
        with the elements.  Attention takes longer than that for longer sequences, and more memory if it saves scores.
        """
        self._check_installed("predict what fits")
        check_whole(tokens=tokens, optional=True, least=1)
        limit = number_of_bytes("memory", memory, optional=True)
        found: Findings = self._tracker.steering.costs()
        if found.in_flight > 1:
            raise RuntimeError("What fits is not known, because several forwards run before a backward.")
        if not found.tokens:
            raise RuntimeError("What fits is not known, because the inputs of the model have no tensors.")
        if found.limit is None and limit is None:
            raise RuntimeError("What fits is not known, because the device does not tell its memory: pass memory=.")
        host = self._engine.host_room()
        if tokens is None:
            return found.largest_fit(limit, host)
        return found.fit(tokens, limit, host)

    def report(self) -> Report:
        """Return what the latest pass did, group by group, with advice.

        It is the latest that saved at least half as much as the largest one since the statistics began, so not a small
        last batch.  With a measured or given plan it is one of the first passes with it: later ones are followed in
        parts.  Times, stalls, and the names of what else references offloaded memory need a step in `recording`.

        Raises
        ------
        RuntimeError
            If no forward with a graph ended since the call of `offload`, or none in which something could be offloaded.
        """
        latest, replays = self._log.full, self._tracker.replays
        if latest is None:
            told = self._tracker.warned
            raise RuntimeError(
                "There is nothing to report yet: no forward of the model with a graph has ended in which activations "
                f"could be offloaded. {told[0] if told else UNRUN}"
            )
        plan = self.plan
        every = [GroupReport(group.name, group.kind, calls=0) for group in self._state.groups]
        return build(
            latest,
            self.statistics(),
            self._log.recording,
            [group for group in every if group.name not in latest.names],
            because=plan.because,
            proven_bytes=replays.proven_bytes,
            samples=replays.alarm.samples,
            peak_bytes=plan.peak_bytes,
            baseline_peak_bytes=plan.baseline_peak_bytes,
            seconds=plan.seconds,
            baseline_seconds=plan.baseline_seconds,
            times=self._engine.backend.times,
            next_choice=self._tracker.steering.next_choice,
        )


class _Pause:
    """Pauses a tracker, which refers to it weakly: it ends with the ``with`` block, wherever an interrupt comes."""


def _named_modules(root: weakref.ref[Module]) -> Mapping[Module, str]:
    model = root()
    return {} if model is None else Names(model).first


# The function

ON_REFERENCE = (
    "Nothing is measured on a machine without an accelerator: all groups are offloaded but the last two and the "
    "last of each kind."
)
NO_BUDGET = "The memory budget is not kept there."


def offload_model(
    module: Module, *, layers: Any, num_layers: int | None, keep: Any, recompute: Any, plan: Any, **limits: Any
) -> OffloadHandle:
    """Offload the activations of a model; `actoffload.offload` describes the arguments."""
    if not isinstance(module, Module):
        raise TypeError(f"offload got a {type(module).__name__}; expected a torch.nn.Module, such as the whole model.")
    refuse_scripted(module, type(module).__name__)
    backend = devices.backend()
    given = checked_limits(backend.total_memory(), **limits)
    fraction, max_inflight, budget = given["fraction"], given["max_inflight"], given["memory_budget"]
    check_whole(num_layers=num_layers, optional=True)
    schedule = GroupSchedule(num_layers, 1.0 if fraction is None else fraction, max_inflight)
    entries = read_entries("layers", ... if layers is None else layers)
    keep = read_entries("keep", keep)
    by_hand = (num_layers, fraction, max_inflight) != (None, None, None)
    if limits["memory_budget"] is not None and (by_hand or plan is not None):
        raise ValueError(
            "memory_budget is kept by measuring: leave out num_layers, fraction, max_inflight and plan, which say by "
            "hand what is offloaded."
        )
    if plan is not None and (by_hand or layers is not None):
        raise ValueError("plan says what is offloaded: leave out layers, num_layers, fraction and max_inflight.")
    if plan is not None and not isinstance(plan, (Plan, str, PathLike)):
        raise TypeError(f"plan is {plan!r}; expected a Plan, such as handle.plan, or the path of a saved one.")
    if handle_of(module) is not None:
        raise ValueError(
            "This model is offloaded already: call remove() of its handle first; OffloadHandle.of(model) returns it."
        )
    names = Names(module)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        if plan.rank is not None:
            raise ValueError(f"plan is of rank {plan.rank} of a pipeline; give the plan of a model.")
        entries = planned_modules(names, plan.names)
    engine = Engine(Plan(1), backend, given["max_host_bytes"], min_bytes=given["min_bytes"])
    state = ModelState(find_modules(names, entries, keep), engine)
    check_num_layers(num_layers, [group.kind for group in state.groups])

    # With "auto" the planner chooses the operators that run again, from measured times.
    policy = everything if recompute == "auto" else policy_for(recompute) if recompute is not False else None
    policies = {} if policy is None else dict.fromkeys(range(len(state.groups)), policy)
    always = {} if recompute == "auto" else policies

    compared = {
        "layers": fold_names(state.names()),
        "num_layers": num_layers,
        "keep": fold_names(module.name for module in state.modules if module.role == KEPT),
        **limits,
        "recompute": recompute if isinstance(recompute, bool | str) else "a policy",
        "plan": None if plan is None else "a plan",
    }
    ranks, arguments = Ranks(), {name: repr(value) for name, value in compared.items()}
    state.meet = partial(ranks.meet_for, weakref.ref(module), arguments)
    state.checks_coverage = not by_hand and ... in entries

    steering: Steering
    if isinstance(plan, Plan):
        steering = Steering(state, plan if policies else replace(plan, saves=()), {})
    elif by_hand or not backend.times:
        because = "" if by_hand else ON_REFERENCE if limits["memory_budget"] is None else f"{ON_REFERENCE} {NO_BUDGET}"
        steering = Steering(state, schedule, always, because)
    else:
        steering = Tuner(state, budget, policies, ranks, always=bool(always))
    handle = OffloadHandle(steering)
    problem = unsupported()
    if problem is not None:
        warn(problem)
    return handle
