"""The function `offload` for a whole model and for a pipeline schedule, and the handle of a schedule."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, overload

import torch
from torch.nn import Module

from .. import device as devices
from .._arguments import checked_limits
from .._torch import unsupported
from .._warnings import warn
from ..engine.engine import Engine
from ..model import OffloadHandle, offload_model
from ..model.groups import read_entries
from ..model.handle import Handle
from ..replay.policy import Policy, PolicyArgument, policy_for
from ..report.build import counted
from ..report.report import GroupReport, RankReports, Report, gather_reports
from ..schedule.orders import Computation
from ..schedule.plan import Plan
from ..tune.exchange import LostRankError, Ranks, Settings
from ..tune.script import Plans, Steps
from .conductor import SUPPORTED, Conductor, classes_of, follow, handle_of, is_schedule, stages_of, unfollow
from .first_steps import FirstSteps, Limits, RankStage

logger = logging.getLogger("actoffload")

MEASURING = "This is done in the first steps, which are measured: everything is offloaded."
REMOVED = "This handle was removed: nothing is offloaded. Call offload(schedule) again on every rank."
NOT_MET = "So nothing is offloaded on this rank. Call actoffload.offload(schedule) again on every rank before a step."
LOST = (
    "So this rank offloads from here on what it offloads now. Run the same number of steps on every rank, and call "
    "remove() of the handles on all of them."
)


class PipelineHandle(Handle):
    """Offloading of the stages of one rank; made by `offload`, ended with `remove` or by leaving its ``with`` block.

    ``print(handle)`` shows the plan of this rank.  The handle may be dropped; offloading lasts as long as the schedule.
    """

    def __init__(self, schedule: Any, stages: Sequence[Any], first: FirstSteps, settings: Settings) -> None:
        self._conductor = first.conductor
        super().__init__(first.conductor.engine, first.stages)
        # Weak references: the schedule and its stages refer to this object.
        self._followed = [weakref.ref(each) for each in (*stages, schedule)]
        self._first, self._settings = first, settings
        self._script: Steps[Plans] | None = first.run()  # None once the plans are final
        self._number = 0  # of steps with backward that began
        follow(schedule, stages, self, self._step, self._conductor.computing)

    @classmethod
    def of(cls, schedule: Any) -> PipelineHandle | None:
        """Return the handle of the schedule that `offload` was called with; None for one that is not offloaded."""
        if not is_schedule(schedule):
            raise TypeError(f"PipelineHandle.of got {schedule!r}; expected the schedule that offload was called with.")
        handle: PipelineHandle | None = handle_of(schedule)
        return handle

    def remove(self) -> None:
        """End offloading on this rank and free the host memory; call it on every rank, between two steps.

        A second call does nothing.
        """
        if not self._removed:
            followed = [each for ref in self._followed if (each := ref()) is not None]
            if self._script is not None and self._number:  # the others wait for this rank
                self._first.ranks.leave()
            elif self._script is not None:  # they will in their first step
                self._first.ranks.refuse(followed)
            unfollow(followed)
            super().remove()

    # Steps

    @contextmanager
    def _step(self, schedule: Any) -> Iterator[None]:
        """Follow one step of the schedule."""
        # A step runs no backward in `eval`, and none without a loss.
        training = getattr(schedule, "_has_backward", True) and torch.is_grad_enabled()
        if training:
            self._before()
        self._conductor.begin(training=training)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._conductor.end(failed=failed)
            if training:
                self._first.end(failed=failed)

    def _before(self) -> None:
        """Begin a step; see `exchange` [Note: exchanges]."""
        self._number += 1
        try:
            if self._number == 1:
                # Find the ranks that run the same stages, and compare the arguments of all.
                modules = (getattr(ref(), "submod", None) for ref in self._followed)
                wrong = self._first.ranks.meet(self._settings, modules)
                if wrong:
                    self.remove()
                    raise ValueError(wrong)
            if self._script is not None:
                self._first.begin(next(self._script))
        except StopIteration as stop:
            if stop.value is None:
                self._lose("The first steps were interrupted.")
            else:
                self._keep(stop.value)
        except LostRankError as lost:
            self._lose(str(lost))

    def _lose(self, problem: str) -> None:
        """Go on without the other ranks: without offloading where they were never met."""
        self._first.ranks.leave()
        self._script = None
        if self._number == 1:
            self.remove()
        warn(f"{problem} {NOT_MET if self._number == 1 else LOST}")

    def _keep(self, plans: Plans) -> None:
        """Follow the plans that are final."""
        self._script = None
        self._first.follow(plans)
        plan = self.plan
        if plan is not None and self._engine.backend.times:
            self._engine.fit(plan.host_bytes)
        if self._first.rank == 0:
            logger.info("The plans of all ranks of the pipeline:\n\n%s", "\n\n".join(map(str, self.plans)))

    # What was chosen

    @property
    def plan(self) -> Plan | None:
        """The plan of this rank; None until the first steps are measured."""
        return self._conductor.plan

    @property
    def settling(self) -> bool:
        """Whether steps are still measured, and the plan may change at the begin of the next one.

        It is True until the plans of all ranks are final, so ``while handle.settling: schedule.step(...)`` ends in all
        ranks after the same step.
        """
        return self.installed and self._script is not None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all ranks, in order; none until the first steps are measured."""
        return self._first.plans

    def __str__(self) -> str:
        if not self.installed:
            return REMOVED
        return MEASURING if self.plan is None else str(self.plan)

    def __repr__(self) -> str:
        stages = ", ".join(str(stage.index) for stage in self._first.stages)
        return f"<PipelineHandle of rank {self._first.rank}, stages {stages}>"

    # What happened

    def report(self) -> Report:
        """Return what this rank saves and offloads in a step, and the peak since `offload` or `reset_statistics`.

        On an accelerator the statistics begin anew with each of the first steps, which are measured one by one.
        Raises a `RuntimeError` if no step has ended.
        """
        order, plan, counts = self._conductor.order, self.plan, counted(self.statistics())
        if not order:
            unrun = "There is nothing to report yet: no step of the schedule has ended. Run a step first."
            raise RuntimeError(unrun if self.installed else REMOVED)
        forwards = Counter(step.stage for step in order if step.computation is Computation.FORWARD)
        numbers, recomputed = (Counter[int](), ()) if plan is None else (Counter(plan.offloaded), plan.recomputed)
        groups = []
        for stage in self._first.stages:
            index, sizes = stage.index, stage.sizes
            part = slice(0) if plan is None else plan.part(index)
            if plan is not None and not stage.saved:  # no step has run with it yet
                sizes = plan.nbytes[part]
            for k, (name, nbytes) in enumerate(zip(stage.names, sizes, strict=False), start=part.start or 0):
                found = GroupReport(name, f"stage {index}", forwards[index], numbers[k], k in recomputed)
                groups.append(replace(found, bytes_saved=nbytes * found.calls, bytes_offloaded=nbytes * numbers[k]))
        if self._conductor.scoped:
            counts["peak_resident_bytes"] = self._first.peak
        because = plan.because if plan is not None else MEASURING if self.installed else REMOVED
        return Report(tuple(groups), because=because, times=self._engine.backend.times, **counts)

    def table(self) -> RankReports:
        """Return the reports of all ranks, in every rank; ``print`` shows them as a table.

        A collective: every rank of the pipeline calls it, between two steps.
        """
        return gather_reports(self.report(), self._first.ranks.group)


# The function


@overload
def offload(
    module: Module,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    num_layers: int | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int | str = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | str | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    recompute: bool | PolicyArgument | Literal["auto"] = "auto",
    plan: Plan | str | PathLike[str] | None = None,
) -> OffloadHandle: ...


@overload
def offload(
    module: Any,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int | str = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | str | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    delta_bytes_per_rank: int | str | None = None,
    recompute: bool | PolicyArgument | Literal["auto"] = "auto",
) -> PipelineHandle: ...


def offload(
    module: Any,
    *,
    layers: str | Module | type[Module] | Iterable[Any] | None = None,
    num_layers: int | None = None,
    keep: str | Module | type[Module] | Iterable[Any] = (),
    min_bytes: int | str = 1 << 20,
    fraction: float | None = None,
    max_host_bytes: int | str | None = None,
    max_inflight: int | None = None,
    memory_budget: int | float | str | None = None,
    delta_bytes_per_rank: int | str | None = None,
    recompute: bool | PolicyArgument | Literal["auto"] = "auto",
    plan: Plan | str | PathLike[str] | None = None,
) -> OffloadHandle | PipelineHandle:
    """Offload the activations of a model, or of the stages of a pipeline schedule; their code stays as it is.

    The chosen modules are *groups*: what autograd saves in one of them is kept, offloaded or recomputed together.

    Without `num_layers`, `fraction`, `max_inflight` and `plan` three to five steps are measured, of which the first two
    take the least memory.  If the model fits as it is, nothing is installed from then on.  Otherwise the fastest plan
    within the memory of the device, or within `memory_budget`, is followed.  `OffloadHandle.settling` is True until the
    plan is final.  All ranks of a model follow one plan.  Without an accelerator nothing is measured, and all groups
    but the last two and the last of each kind are offloaded.

    Of a schedule of ``torch.distributed.pipelining`` every rank passes its own, with the same arguments; one plan is
    made for all microbatches and stages of a rank.

    Parameters
    ----------
    module : torch.nn.Module or schedule
        The model, or any part of it; wrapped or not.  Call this object in training.  Or a pipeline schedule of PyTorch,
        also ``_PipelineScheduleRuntime`` with an order from a file.
    layers : str, module, type or iterable of these, optional
        What may be offloaded.  None finds the groups in the first forward: the repeated blocks, or the modules that
        together save most.  A string is the dotted path of a module, of a list of modules, whose children are meant
        then, or a glob pattern over dotted names: ``"*.self_attn"``.  Several entries give several kinds of groups; the
        entry ``...`` means what None does: ``[..., "*.head"]``.
    num_layers : int, optional
        Number of groups of each kind to offload, from the first on; the last of a kind is always kept.  Not for
        schedules.
    keep : str, module, type or iterable of these
        Modules whose saved tensors are kept on the device, given like `layers`: the router, the head, a norm.  Where
        chosen and kept modules are nested, the innermost decides.
    min_bytes : int or str
        Smaller tensors are kept: bytes, or text such as ``"256KiB"``.
    fraction : float, optional
        Fraction of the eligible groups of each kind to offload, from the first on; 0.0 to 1.0.  Eligible are all but
        the last two; with several kinds, all but the last of each, and not the last two of all.
    max_host_bytes : int or str, optional
        Largest amount of page-locked host memory to hold for each device: bytes, or text such as ``"64GiB"``.  It is
        allocated in steps of 2 MiB.  What does not fit is kept on the device, with one warning.
    max_inflight : int, optional
        Largest number of groups in flight whenever one has ended, in either direction; compute waits for the others.
        Of a schedule: largest number of groups that are copied to the host at a time, as planned; what would be one
        more is kept, and reloads are not limited.
    memory_budget : int, str or float, optional
        Limit for the peak of device memory in forward and backward: bytes, text such as ``"24GiB"``, or a fraction of
        the memory of the device.  The fastest plan within it is chosen; the measured passes are within it too.  None is
        the memory of the device.  With a schedule it is the limit of each rank.
    delta_bytes_per_rank : int or str, optional
        Of a schedule: bytes, or text such as ``"1GiB"``, by which each rank offloads less than the rank before it,
        because later ranks have fewer microbatches in flight.
    recompute : "auto", bool, callable or list
        What of the groups is computed again in backward, by running the operators whose results were dropped.
        ``"auto"`` lets the planner choose for each group, by measured times, where not everything fits.  True
        recomputes everything that can be, in all groups.  With a policy, the operators that it saves do not run again:
        a list of operators, or a function, as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes
        them.  False recomputes nothing.  Values that would not have the same bits are kept or offloaded.
    plan : Plan, str or PathLike, optional
        A plan of another run, or the file to which ``handle.plan.save`` wrote it; nothing is measured then.  Not for
        schedules.

    Returns
    -------
    OffloadHandle
        Prints what was chosen, reports what happened, pauses and ends offloading.  `PipelineHandle` for a schedule.

    Raises
    ------
    ValueError
        If nothing is found, a pattern matches nothing, a number is out of its range, or the model is offloaded already.
        In the first forward, if the ranks of a sharded or data-parallel model got different arguments.  For a schedule
        in its first step on every rank, if the arguments differ, or the stages of one rank have no groups.
    TypeError
        If `module` is not a module, or a ``ScriptModule``; if an entry of `layers` or `keep` is of another type; or if
        a numeric argument is not a number.

    Warns
    -----
    UserWarning
        If `plan` lacks repeated blocks of the model.  Once the first passes are measured, if no plan is within the
        memory budget.  For a schedule, if another rank takes no part in the first steps: this one goes on without it.

    Examples
    --------
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    >>> handle = actoffload.offload(model)
    >>> x = torch.randn(1024, 512, requires_grad=True)
    >>> model(x * 1.0).sum().backward()
    >>> handle.statistics().tensors_offloaded
    4
    >>> handle.remove()
    """
    common: dict[str, Any] = {
        "layers": layers,
        "keep": keep,
        "min_bytes": min_bytes,
        "fraction": fraction,
        "max_host_bytes": max_host_bytes,
        "max_inflight": max_inflight,
        "memory_budget": memory_budget,
        "recompute": recompute,
    }
    if is_schedule(module):
        stages = stages_of(module)
        first = stages[0] if stages else None
        rank, ranks = int(getattr(first, "group_rank", 0)), Ranks(pipeline=True, group=getattr(first, "group", None))
        try:
            if num_layers is not None or plan is not None:
                raise ValueError(
                    "num_layers and plan are for a single module: leave them out for a pipeline schedule, and use "
                    "fraction or delta_bytes_per_rank."
                )
            return _offload_schedule(module, stages, rank, ranks, delta_bytes_per_rank=delta_bytes_per_rank, **common)
        except (TypeError, ValueError):
            ranks.refuse(stages)
            raise
    if delta_bytes_per_rank is not None:
        raise ValueError("delta_bytes_per_rank is for pipeline schedules: call offload with the schedule object.")
    return offload_model(module, num_layers=num_layers, plan=plan, **common)


def _offload_schedule(
    schedule: Any,
    stages: list[Any],
    rank: int,
    ranks: Ranks,
    *,
    layers: Any,
    keep: Any,
    recompute: Any,
    **given: Any,
) -> PipelineHandle:
    """Offload the stages of this rank by one plan."""
    name = type(schedule).__name__
    if classes_of(schedule).isdisjoint(SUPPORTED):
        public = "ScheduleGPipe, Schedule1F1B or a schedule of several stages a rank, such as ScheduleInterleaved1F1B"
        raise ValueError(f"offload got a {name}, which is not supported; expected {public}.")
    if handle_of(schedule) is not None:
        raise ValueError(
            "This schedule is offloaded already: call remove() of its handle first; PipelineHandle.of(schedule) "
            "returns it."
        )
    backend = devices.backend()
    checked = checked_limits(backend.total_memory(), **given)
    layers, keep = read_entries("layers", ... if layers is None else layers), read_entries("keep", keep)
    min_bytes, max_host_bytes = checked.pop("min_bytes"), checked.pop("max_host_bytes")
    if not backend.times and all(number is None for number in checked.values()):
        checked["fraction"] = 1.0
    limits = Limits(**checked)
    limits = replace(limits, may_recompute=recompute == "auto" and backend.times and not limits.by_hand)
    engine = Engine(Plan(1), backend, max_host_bytes, min_bytes=min_bytes)
    conductor = Conductor(engine)
    again = limits.may_recompute if recompute == "auto" else recompute
    policy: Policy | None = None if again is False else policy_for(again)
    problem, made = "" if stages else "the schedule has no stages.", list[RankStage]()
    try:
        for stage in stages:
            made.append(RankStage(stage, conductor, layers, keep, policy))
    except (TypeError, ValueError) as error:  # raised in the first step, on every rank
        problem, made = str(error), []
    shown = {**given, "recompute": _shown(recompute)}
    arguments = {"schedule": name, "the number of microbatches": getattr(schedule, "_n_microbatches", 0), **shown}
    missing = {entry: each.missing[entry] for each in made for entry in each.missing}
    missing = {entry: reason for entry, reason in missing.items() if all(entry in each.missing for each in made)}
    settings = Settings(arguments, problem, missing)
    first = FirstSteps(made, conductor, rank, ranks, limits)
    found = PipelineHandle(schedule, stages, first, settings)
    incompatible = unsupported()
    if incompatible is not None:
        found.remove()
        warn(incompatible)
    return found


def _shown(recompute: Any) -> Any:
    """Return what the ranks compare of the argument `recompute`; a function is one of its process."""
    if isinstance(recompute, (bool, str)):
        return recompute
    return "a policy" if callable(recompute) else f"a policy of {', '.join(sorted(map(str, recompute)))}"
