"""Pipelines of several GPUs: step times, peaks and stalls of each rank, without offload, with it, and as simulated.

Every rank is a process.  One schedule of `torch.distributed.pipelining` runs without offload, with
``offload(schedule)``, without, with a memory budget of 40 % of the highest peak, and without again.  A ratio refers to
the mean of the phases without offload before and after.  R is the drop of a rank's peak over the drop that is
expected: the peak of each computation without offload, less the saved tensors that are not on the device there by the
simulation of the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from harness import AGAIN, NOTHING, OURS
from mixtures import set_waits
from pipeline_parts import PARTS, SMALL_PARTS, Part, available
from pipeline_phases import Pipeline
from processes import RankError, run_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["PARTS", "SMALL_PARTS", "Part", "available", "measure_parts"]

BUDGET, WAITING = "budget", "waiting"
SHARE = 0.4
"""Budget as a part of the highest peak without offload."""
LIMIT = 300.0
"""Seconds for a part."""


def _say(what: str) -> None:
    """Print a line of progress on the first rank."""
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def _arms(pipeline: Pipeline) -> list[tuple[str, dict[str, Any]]]:
    """Run all phases on this rank; return what each showed."""
    part = pipeline.part
    found: list[tuple[str, dict[str, Any]]] = []

    def add(method: str, phase: dict[str, Any]) -> None:
        found.append((method, phase))
        peak, seconds = max(phase["peaks"]) / 2**30, median(phase["seconds"])
        _say(f"  {method}: {seconds:.3f} s, {peak:.2f} GiB on the first rank")

    if part.mixture:
        set_waits(pipeline.modules, waits=True)
        add(WAITING, pipeline.phase(2, part.steps))
        set_waits(pipeline.modules, waits=False)
    add(NOTHING, pipeline.phase(1 if part.mixture else 2, part.steps))
    profile = pipeline.profile()
    add(OURS, pipeline.offloaded(profile))
    add(AGAIN, pipeline.phase(1, part.steps))
    peaks: list[Any] = [None] * part.world
    dist.all_gather_object(peaks, max(found[-1][1]["peaks"]))
    budget = int(SHARE * max(peaks))
    add(BUDGET, {**pipeline.offloaded(profile, memory_budget=budget), "budget": budget})
    add(AGAIN, pipeline.phase(1, part.steps))
    return found


def _measured(device: torch.device, part: Part) -> list[tuple[str, dict[str, Any]]]:
    """Measure a part as one rank; return what each phase showed."""
    # Slower attention than the flash kernel would hide copies.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if device.type == "cuda" else SDPBackend.MATH):
        return _arms(Pipeline(part, device))


def _result(part: Part, ranks: list[list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Return the data of a part from what all ranks measured."""
    arms = []
    for k, (method, first) in enumerate(ranks[0]):
        phases = [of[k][1] for of in ranks]
        samples = [max(step) for step in zip(*(of["seconds"] for of in phases), strict=True)]
        arm: dict[str, Any] = {"method": method, "seconds": median(samples), "samples": samples}
        arm |= {key: first[key] for key in ("budget", "because", "planning_steps") if key in first}
        arms.append({**arm, "ranks": [_of_rank(of) for of in phases]})
    still = [arm for arm in arms if arm["method"] in (NOTHING, AGAIN)]
    for k, arm in enumerate(arms):
        none = [arm] if arm in still else [each for each in arms[max(k - 1, 0) : k + 2] if each in still]
        arm["baseline_seconds"] = mean(each["seconds"] for each in none)
        arm["ratio"] = arm["seconds"] / arm["baseline_seconds"]
        for rank, row in enumerate(arm["ranks"]):
            row["peak_without"] = max(each["ranks"][rank]["peak_bytes"] for each in none)
            row["drop_bytes"] = row["peak_without"] - row["peak_bytes"]
            expected = row.get("predicted", {}).get("drop_bytes")
            if expected:
                row["r"] = row["drop_bytes"] / expected
    times = [arm["seconds"] for arm in still]
    described = {"schedule": part.schedule, "stages": part.stages, "microbatches": part.microbatches}
    described |= {"world": part.world, "data": part.data, "mixture": part.mixture, "settings": part.settings.to_json()}
    return {**described, "noise": (max(times) - min(times)) / mean(times), "arms": arms}


def _of_rank(phase: dict[str, Any]) -> dict[str, Any]:
    """Return what is written of a phase of one rank."""
    left = ("seconds", "budget", "because")
    return {"peak_bytes": max(phase["peaks"]), **{key: of for key, of in phase.items() if key not in left}}


def measure_parts(
    names: Sequence[str], device: torch.device, *, rehearse: bool, done: Callable[[str, dict[str, Any]], object]
) -> None:
    """Measure parts, each in processes of its own; call `done` with the name and the data of each.

    Raises `RankError` after the last part if one of them failed or took longer than `LIMIT`.
    """
    failed = []
    for name in names:
        part = (SMALL_PARTS if rehearse else PARTS)[name]
        print(f"{name}:", flush=True)
        try:
            ranks = run_ranks(_measured, part, world=part.world, device=device.type, limit=LIMIT)
        except RankError as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
        else:
            done(name, _result(part, ranks))
    if failed:
        raise RankError(f"Not measured: {', '.join(failed)}; the reason of each is printed above.")
