"""What plans are predicted to take, beside what they take: Llama layers, eager and compiled, with several plans.

`offload(model)` measures the costs of the groups in its first passes and gives them to the planner.  Here they are also
given to `simulate`, for the plans with some numbers of layers.  Then steps with these plans are measured, and the clock
of the device during them, which is higher in steps that wait for copies.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from harness import AGAIN, settle
from workloads import FULL, REHEARSAL, Settings, Stack

import actoffload
from actoffload.measure import measure_peak, measure_step_times
from actoffload.planner import choose
from actoffload.schedule import simulate

DEFAULT, NONE = "default", "none"
REPEATS, FEWER = 5, 3  # of each arm beside the default's plan, and beside numbers of layers
CLOCK_SECONDS = 1.5  # in which the clock is read, twenty times a second


@dataclass(frozen=True)
class Part:
    """A stack of layers, compiled one by one or not."""

    settings: Settings
    compiled: bool


def _parts(eight: Settings, thirty_two: Settings) -> dict[str, Part]:
    stacks = {"8k": eight, "32k": thirty_two}
    return {f"{name}{'-compiled' * how}": Part(of, how) for how in (False, True) for name, of in stacks.items()}


PARTS = _parts(replace(FULL["8k"], layers=16, counts=(4, 8, 12, 15)), replace(FULL["32k"], layers=4, counts=(1, 2, 3)))
SMALL_PARTS = _parts(replace(REHEARSAL["8k"], counts=(1, 3)), replace(REHEARSAL["32k"], counts=(1, 2)))

Predict = Callable[[Any], dict[str, float]]
"""From a plan to seconds and bytes."""


def measured_costs(handle: Any) -> Predict | None:
    """Return a function that predicts plans from what the first steps of a handle measured.

    None if nothing was measured, or if the planner chose among ways to recompute groups, which `simulate` does not
    take.
    """
    found = getattr(handle._tracker.steering, "_chosen", None)
    if found is None or found.choose is None or found.choose.func is not choose:
        return None
    _, layers, link = found.choose.args
    return partial(predicted, layers, link, found.choose.keywords.get("host_seconds", 0.0))


def predicted(layers: Any, link: Any, host_seconds: float, plan: Any) -> dict[str, float]:
    """Return what `simulate` gives for a plan."""
    result = simulate(plan, layers, link, host_seconds=host_seconds)
    return {"seconds": result.step_time, "peak_bytes": result.device_peak_bytes}


class Plans:
    """The model of a stack with the plan of the default, then with numbers of layers; its twin is without offload."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.stack = Stack(part.settings, device)
        if part.compiled:
            for layer in (*self.stack.model.layers, *self.stack.twin.layers):
                layer.compile()
        self.handle = actoffload.offload(self.stack.model, min_bytes=part.settings.min_bytes)
        settle(self.handle, partial(self.step, DEFAULT), steps=1)
        self.predict = measured_costs(self.handle)
        self._count: int | str = DEFAULT

    def step(self, plan: int | str) -> None:
        """Run a step with a plan; the plan is changed only if it has to be, so not in what is timed."""
        if isinstance(plan, int) and plan != self._count:
            self._count = plan
            self.handle.reschedule(num_layers=plan)
        model = self.stack.twin if plan == NONE else self.stack.model
        model.zero_grad()  # as in training: gradients come during backward, while activations go
        self.stack.step(model)

    def clock(self, plan: int | str) -> dict[str, float]:
        """Return the median clock in Hz during steps with a plan, as ``nvidia-smi`` reads it; nothing without that."""
        if self.stack.device.type != "cuda" or shutil.which("nvidia-smi") is None:
            return {}
        number = torch.cuda.get_device_properties(self.stack.device).uuid
        query = [
            "nvidia-smi",
            f"--id=GPU-{number}",
            "--query-gpu=clocks.sm",
            "--format=csv,noheader,nounits",
            "-lms",
            "50",
        ]
        with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
            try:
                end = time.monotonic() + CLOCK_SECONDS
                while time.monotonic() < end:
                    self.step(plan)
                    torch.accelerator.synchronize()
            finally:
                process.terminate()  # it never ends by itself
            lines, _ = process.communicate()
        values = [float(line) * 1e6 for line in lines.split() if line.isdecimal()]
        # The first third may still be the clock of other steps.
        return {"clock": median(values[len(values) // 3 :])} if values else {}

    def measure(self, plans: list[int | str], repeats: int) -> list[dict[str, Any]]:
        """Measure plans side by side, without offload first; peaks in the order that is given.

        Steps without offload are timed as two arms; ratios refer to the mean of both, their difference is the noise.
        """
        rows: dict[int | str, dict[str, Any]] = {}
        for plan in (NONE, *plans):
            row = rows[plan] = {"plan": plan, "peak_bytes": measure_peak(partial(self.step, plan), warmup=2)}
            if plan == DEFAULT:
                of_plan = {key: getattr(self.handle.plan, key, None) for key in ("seconds", "peak_bytes")}
                row["predicted"] = {key: value for key, value in of_plan.items() if value is not None}
                row["text"] = str(self.handle.plan)
            elif plan != NONE and self.predict is not None:
                row["predicted"] = self.predict(self.handle.plan.plan)
            row |= self.clock(plan)
        names = [*rows, AGAIN]
        steps: Any = {plan: partial(self.step, NONE if plan == AGAIN else plan) for plan in names}
        times = {plan: median(of) for plan, of in measure_step_times(steps, repeats=repeats, warmup=0).items()}
        baseline = mean((times[NONE], times[AGAIN]))
        rows[NONE]["noise"] = abs(times[AGAIN] - times[NONE]) / baseline
        for plan, row in rows.items():
            row |= {"seconds": times[plan], "ratio": times[plan] / baseline}
            row["distance"] = {key: value / row[key] - 1 for key, value in row.get("predicted", {}).items()}
            print(f"  {plan}: {row['seconds'] * 1e3:.1f} ms, {row['peak_bytes'] / 2**30:.2f} GiB", flush=True)
        return list(rows.values())


def measure_part(part: Part, device: torch.device) -> dict[str, Any]:
    """Measure the plan of the default, then those with numbers of layers, from the most on."""
    plans = Plans(part, device)
    rows = plans.measure([DEFAULT], REPEATS)
    none, *others = plans.measure(sorted(part.settings.counts, reverse=True), FEWER)
    plans.handle.remove()
    noise = max(none["noise"], rows[0]["noise"])
    return {"settings": part.settings.to_json(), "compiled": part.compiled, "noise": noise, "plans": [*rows, *others]}
