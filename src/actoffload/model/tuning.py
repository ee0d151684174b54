"""The default of `offload`: measure during the first steps, then offload what costs no time.

`[Note: the first steps]`  Nothing is known before the first step, and it must not run out of memory where any plan
fits.  So the first two passes offload everything that can be: the first warms up, in the second the bytes, the device
memory and the rates of the copies are measured.  If the model fits without offloading too, two passes run without; the
times of the groups come from the second of these.  The planner then chooses, from costs alone.  Because costs do not
say everything that makes a step longer, whole passes with the plan and without are compared before it is kept.

A pass is timed on the device, from the start of the forward to the end of its backward.  The events are read passes
later; the host waits for the device at most twice, where the device is more than a whole pass behind.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from .._torch import is_compiled
from ..engine.engine import Engine
from ..engine.layer import tensors_in
from ..engine.model_pass import ModelPass
from ..planner import GroupPlan, choose
from ..schedule.execution_order import GroupKey, GroupPlans
from ..schedule.plan import Plan
from ..schedule.timeline import milliseconds, size
from .metering import Meter, Stage, TimedPass, hook_seconds, layer_costs, measured_link
from .reporting import PassLog, group_names
from .steering import RolesOfPlan
from .tracker import Conduct, FollowedModule, Mode

__all__ = ["Tuner"]

logger = logging.getLogger("actoffload")

TOLERANCE, SHORT_TOLERANCE, SHORT = 0.01, 0.02, 0.020  # of the time of a pass; for passes shorter than so many seconds
ROOM = 0.03  # fraction of the device memory that predictions leave free
MOVED = 0.10  # change of a cost from which on another plan is looked for
CAUTION = 0.7  # a plan that turned out to cost too much is cut to this part of what its cost allows
MOST = 0.03  # cost, as a fraction of the time of a pass, from which on nothing is offloaded
WINDOW = 8  # passes over which costs are compared
PATIENCE = 64  # passes before a plan is replaced, doubled each time
HOST_SECONDS = 60e-6  # of the host for one tensor that is offloaded, unless measured
UNFINISHED = 4  # forwards in a row that run before the backward of the one before


class StepTimes(NamedTuple):
    """Seconds of a pass with the plan and without offloading, and the numbers of the first and last pass compared."""

    offloaded: float
    without: float
    first: int
    last: int


Script = Generator[Stage, TimedPass, GroupPlan]


class Tuner:
    """Measures, plans, and keeps the plan as long as costs stay what they were."""

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[FollowedModule],
        plans: GroupPlans,
        log: PassLog,
        title: str = "the model",
        *,
        warm: bool = False,
    ) -> None:
        self._title = title
        self._engine, self._groups, self._plans, self._log = engine, groups, plans, log
        self._lock = threading.Lock()
        self._current: TimedPass | None = None
        self._number = 0
        self._unfinished = 0
        self._script: Script | None = self._measure(warm=warm)
        self._stage: Stage | None = next(self._script)
        self._chosen: RolesOfPlan | None = None
        self._adopts = False  # groups are offloaded with what was saved before them
        self._limit: int | None = None
        self._size = self._least_size = 0  # elements of the inputs planned for, and fewest for which hooks cost nothing
        self._replan_at = 0
        self._patience = PATIENCE
        self._sizes: deque[int] = deque(maxlen=WINDOW)
        self._seconds: deque[TimedPass] = deque(maxlen=WINDOW)
        self._reference: float | None = None  # seconds of a pass when the plan was new
        self._planning = 0.0  # seconds
        self.times: StepTimes | None = None

    def plan(self) -> GroupPlan:
        """Return the plan, or what is done until there is one."""
        if self._chosen is None:
            return self._leanest("This is the plan of the first steps, which are measured.")
        return self._chosen.plan.remapped(group_names(self._groups, self._plans.order))

    # One pass

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> Conduct:
        """Return how this pass is followed; plan first if enough was measured."""
        with self._lock:
            recorder = self._engine.recorder
            if alone or busy or not (recorder is None or isinstance(recorder, Meter)):
                return self._whole()
            self._close()
            self._number += 1
            elements = sum(tensor.numel() for tensor in tensors_in(inputs))
            if self._stage is None:
                return self._steady(elements)
            timed = self._begin(self._stage, elements)
            if timed.stage in (Stage.FIRST, Stage.LEAN):
                return Conduct(Mode.WHOLE, self._plans.order, self._plans.roles)
            if timed.stage is Stage.BARE:
                return Conduct(Mode.SCOPED, self._plans.order)
            return self._planned() if timed.stage is Stage.PLAN else self._idle()

    def forward_ends(self, output: Any) -> None:
        """Time the pass until the end of its backward."""
        if self._current is not None:
            self._current.watch(self._engine.backend, tensors_in(output))

    def pass_ends(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> None:
        """Take what a forward saved."""
        self._plans.learn(sequence)
        timed = self._current
        if timed is not None:
            timed.saw(done, sequence)
        if not done.partly or (timed is not None and timed.stage is Stage.PLAN):
            self._log.forward_done(done, sequence)

    def _begin(self, stage: Stage, elements: int) -> TimedPass:
        engine = self._engine
        timed = self._current = TimedPass.begin(stage, self._number, elements, engine.backend)
        if stage in (Stage.LEAN, Stage.BARE):
            timed.meter = Meter(engine.backend, engine.counters, memory=stage is Stage.LEAN)
            engine.record(timed.meter)
        return timed

    def _close(self) -> None:
        """End the pass before this one, and go on in the script if its backward has ended."""
        timed, self._current = self._current, None
        if timed is None:
            return
        if timed.meter is not None:
            self._engine.record(None)
        if timed.ended is None:
            self._unfinished += 1
            if self._script is not None and self._unfinished >= UNFINISHED:
                self._settle(self._leanest("Several forwards run before a backward, so no pass can be timed."))
            return
        self._unfinished = 0
        if self._script is None:
            self._seconds.append(timed)
            return
        try:
            self._stage = self._script.send(timed)
        except StopIteration as stop:
            self._settle(stop.value)

    def _planned(self) -> Conduct:
        chosen = self._chosen
        if chosen is None or not chosen.plan.offloaded:
            return self._idle()
        mode = Mode.WHOLE if self._adopts or chosen.incremental else Mode.SCOPED
        return Conduct(mode, self._plans.order, chosen)

    def _idle(self) -> Conduct:
        self._engine.counters.passes += 1
        return Conduct(Mode.IDLE)

    def _whole(self) -> Conduct:
        """Follow the whole forward, by the plan if there is one."""
        return Conduct(Mode.WHOLE, self._plans.order, self._plans.roles if self._chosen is None else self._chosen)

    # The first steps

    def _measure(self, *, warm: bool) -> Script:
        """Yield what the next pass is for, get it when it is over, and return a plan; see [Note: the first steps]."""
        if not warm:
            yield Stage.FIRST
        lean = yield Stage.LEAN
        bare = None
        if self._fits(lean):
            yield Stage.WARM
            bare = yield Stage.BARE
        plan = self._choose(lean, bare)
        if bare is None or not plan.offloaded:
            return plan
        self._chosen = RolesOfPlan(self._groups, plan)
        # The first pass after a change warms up; without offloading is timed before and behind, because the device gets
        # slower when it gets warm.
        yield Stage.PLAN
        offloaded = [(yield Stage.PLAN), (yield Stage.PLAN)]
        yield Stage.WARM
        return self._compare(plan, offloaded, [bare, (yield Stage.NONE)])

    def _fits(self, lean: TimedPass) -> bool:
        """Return whether a pass without offloading fits into the memory of the device."""
        assert lean.meter is not None
        limit = self._engine.backend.memory_limit()
        if limit is None or not lean.meter.borders:
            return True
        self._limit = round(limit * (1 - ROOM))
        held = max(border.allocated for border in lean.meter.borders)
        between = max(lean.peak - held, 0)  # allocated for a time between two borders
        return max(lean.levels()) + between <= self._limit

    def _choose(self, lean: TimedPass, bare: TimedPass | None) -> GroupPlan:
        """Plan from what was measured in a pass that offloaded everything and one that offloaded nothing."""
        assert lean.meter is not None
        timed = lean if bare is None else bare
        assert timed.meter is not None
        timed.wait(self._engine.backend)
        begun = time.perf_counter()
        self._adopts = lean.adopted > 0
        self._size, names = timed.elements, group_names(self._groups, lean.sequence)
        link = measured_link(lean.meter)
        if link is None:
            return self._keep("Nothing that these groups save can be offloaded.")
        if timed.sequence != lean.sequence:
            because = "The groups ran in another order in each of the first passes, so their costs are not known."
            return self._keep(because) if bare is not None else self._leanest(because)
        temporary = 0 if bare is None or bare.peak <= lean.peak else max(bare.peak - max(lean.levels()), 0)
        compiled = {k for k, key in enumerate(lean.sequence) if is_compiled(self._groups[key.group].module)}
        layers = layer_costs(lean.sizes, timed.meter, lean.meter, temporary, compiled)
        each = hook_seconds(lean.sizes, lean.meter, timed.meter) if timed is not lean else None
        each = HOST_SECONDS if each is None else each
        self._choose_among = partial(choose, names, layers, link, limit=self._limit, host_seconds=each)
        plan = self._choose_among()
        device = sum(layer.forward + layer.backward + layer.gap_forward + layer.gap_backward for layer in layers)
        tensors = sum(len(layers[k].saved) for k in plan.offloaded)
        host = sum(layer.host_forward + layer.host_backward for layer in layers) + 2 * tensors * each
        self._least_size = round(self._size * min(host / device, 1.0)) if device else 0
        self._planning = time.perf_counter() - begun
        return plan

    def _compare(self, plan: GroupPlan, offloaded: list[TimedPass], without: list[TimedPass]) -> GroupPlan:
        """Return the plan if passes with it are as short as without, and otherwise one that offloads less."""
        backend = self._engine.backend
        without[-1].wait(backend)
        slow, fast = (min(timed.seconds(backend) for timed in passes) for passes in (offloaded, without))
        numbers = [timed.number for timed in (*offloaded, *without)]
        self.times = StepTimes(slow, fast, min(numbers), max(numbers))
        allowed, cost = SHORT_TOLERANCE if fast < SHORT else TOLERANCE, slow / fast - 1
        if cost <= allowed:
            return plan
        number = len(plan.offloaded)
        less = math.floor(number * min(CAUTION * allowed / cost, 1.0))
        tried = f"with {number} groups offloaded ({size(plan.offloaded_bytes)}) a pass took {milliseconds(slow)}"
        because = f"{tried}, without offloading {milliseconds(fast)}, although copies should have taken no time"
        self.times = None
        if cost > MOST or not less:
            return self._keep(f"Nothing is offloaded, because {because}.")
        found = self._choose_among(among=plan.offloaded[:less])
        return replace(found, because=f"{less} groups are offloaded, because {because}.")

    def _keep(self, because: str) -> GroupPlan:
        names = group_names(self._groups, self._plans.order)
        return GroupPlan(names, Plan(max(len(names), 1)), self._log.bytes_of(self._plans.order), because=because)

    def _leanest(self, because: str) -> GroupPlan:
        names = group_names(self._groups, self._plans.order)
        plan = self._plans.roles(self._plans.order).plan
        return GroupPlan(names, plan, self._log.bytes_of(self._plans.order), because=because)

    def _settle(self, plan: GroupPlan) -> None:
        """Keep a plan from now on."""
        if self._script is not None:
            self._script.close()
        self._script = self._stage = None
        self._chosen = RolesOfPlan(self._groups, plan)
        self._replan_at = self._number + self._patience
        self._patience *= 2
        self._reference = None
        self._seconds.clear()
        if not plan.offloaded:
            self._log.nothing_offloaded()
        self._report(plan)

    def _report(self, plan: GroupPlan) -> None:
        number = f"{len(plan.offloaded)} of {len(plan.names)} groups of {self._title}"
        what = f"{number} are offloaded ({size(plan.offloaded_bytes)})"
        measured = f"measured in passes 1 to {self._number}"
        times = ""
        if self.times is not None:
            with_, without = milliseconds(self.times.offloaded), milliseconds(self.times.without)
            times = f"; a pass takes {with_}, {without} without offloading"
        because = f". {plan.because}" if plan.because else ""
        planned = f", planned in {milliseconds(self._planning)}" if self._planning else ""
        logger.info("%s: %s%s%s%s", what, measured, planned, times, because)

    def facts(self) -> dict[str, Any]:
        """Return what was measured of whole passes, as fields of `StepFacts`."""
        plan, times = self.plan(), self.times
        found: dict[str, Any] = {"because": plan.because}
        if times is not None:
            found["step_seconds_with"], found["step_seconds_without"] = times.offloaded, times.without
            found["measured_steps"] = times.first, times.last
        return found

    # Later

    def _steady(self, elements: int) -> Conduct:
        """Return how a pass is followed once there is a plan."""
        assert self._chosen is not None
        plan = self._chosen.plan
        self._sizes.append(elements)
        if self._moved():
            self._script = self._measure(warm=True)
            self._stage = next(self._script)
            self._begin(self._stage, elements)
            return Conduct(Mode.WHOLE, self._plans.order, self._plans.roles)
        if self._number % WINDOW == 0:
            self._current = TimedPass.begin(Stage.PLAN, self._number, elements, self._engine.backend)
        limit, peak = self._limit, plan.peak_bytes
        # An upper bound: activations grow with the inputs, weights do not.
        if limit is not None and peak is not None and peak * elements > limit * max(self._size, 1):
            return Conduct(Mode.WHOLE, self._plans.order, self._plans.roles)
        return self._idle() if elements < self._least_size else self._planned()

    def _moved(self) -> bool:
        """Return whether costs are others than those of the plan, and have been for some passes."""
        backend, sizes = self._engine.backend, self._sizes
        done = [timed.seconds(backend) for timed in self._seconds if timed.ended and backend.passed(timed.ended)]
        now = median(done) if len(done) == WINDOW else None
        if self._reference is None and now is not None:
            self._reference = now
            self._seconds.clear()
        if self._number < self._replan_at:
            return False
        settled = len(sizes) == WINDOW and max(sizes) <= min(sizes) * (1 + MOVED)
        if settled and self._size and abs(sizes[0] / self._size - 1) > MOVED:
            return True
        return now is not None and self._reference is not None and abs(now / self._reference - 1) > MOVED
