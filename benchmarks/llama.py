"""Llama layers at 8k and 32k tokens, every number of layers offloaded, and the host time that offloading adds.

    PYTHONPATH=src python benchmarks/llama.py --out benchmarks/results

Each length is one model under one `actoffload.offload`, whose number of layers changes; so page-locked memory is taken
from the system once.  No offload is the same weights in modules without hooks, timed as two arms, whose difference is
the noise.  The numbers of layers whose copies fit beside compute are timed in a group of their own with more repeats,
because little is to be seen there.  The result is written after every part.  ``--rehearse`` takes small sizes, for
machines without an accelerator.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from llama_arms import Offloaded, driver_calls, forward_share
from llama_host import measure_host
from llama_model import LlamaSettings, SavedStorage, Stack, absent_bytes, saved_storages
from results_file import RESULTS, write
from torch.nn.attention import SDPBackend, sdpa_kernel

import actoffload
from actoffload.measure import MemoryMeter, measure_link, measure_step_times
from actoffload.schedule import Link

NOTHING, AGAIN, OURS = "no offload", "no offload, again", "actoffload"
Arm = tuple[str, int]

FULL = {
    "8k": LlamaSettings(8192, 12, steps=2, seconds=60),
    "32k": LlamaSettings(32768, 8, steps=1, seconds=65),
}
HOST = LlamaSettings(256, 12, min_bytes=2**20 * 256 // 8192)
"""As many tensors as at 8k tokens, because the limit is as much smaller; and kernels shorter than their launches."""

# The same parts with an eighth of the width, small enough for the reference device; never published.
SMALL = {"hidden": 512, "intermediate": 1792, "heads": 4, "kv_heads": 1, "seconds": 1.0}
REHEARSAL = {
    "8k": replace(FULL["8k"], tokens=128, layers=6, min_bytes=128 * 4 * 4, **SMALL),
    "32k": replace(FULL["32k"], tokens=256, layers=4, min_bytes=128 * 4 * 4, **SMALL),
}
REHEARSAL_HOST = replace(HOST, tokens=64, min_bytes=64 * 4 * 4, **SMALL)
SHARE = 0.45
"""Of the time for measurements, what the numbers of layers whose copies fit get."""


def fits(row: dict[str, Any], compute: dict[str, float]) -> bool:
    """Whether the copies of an arm fit beside compute: the rule by which an arm has to be as fast as no offload.

    What is copied out must take no longer on the link than forward computes, and what comes back no longer than
    backward computes, at the link's bandwidth as measured in this run.
    """
    return bool(row["d2h_seconds"] <= compute["forward"] and row["h2d_seconds"] <= compute["backward"])


def bound_seconds(row: dict[str, Any], compute: dict[str, float]) -> float:
    """Return how long compute and copies take that run beside each other, as fast as each ran by itself."""
    return max(compute["forward"], row["d2h_seconds"]) + max(compute["backward"], row["h2d_seconds"])


def copies(statistics: actoffload.report.Statistics, link: Link) -> dict[str, Any]:
    """Return what one step moved, and how long the link takes for it."""
    return {
        "tensors_offloaded": statistics.tensors_offloaded,
        "bytes_offloaded": statistics.bytes_offloaded,
        "bytes_reloaded": statistics.bytes_reloaded,
        "d2h_seconds": statistics.bytes_offloaded / link.d2h,
        "h2d_seconds": statistics.bytes_reloaded / link.h2d,
        "reloaded_on_demand": statistics.reloaded_on_demand,
        "host_bytes": statistics.host_bytes,
    }


def timed(
    functions: dict[Arm, Callable[[], object]], share: float, rough: dict[Arm, float], seconds: float, steps: int
) -> dict[Arm, dict[str, Any]]:
    """Time some arms side by side, with as many repeats as there is time for.

    Parameters
    ----------
    functions : dict
        One step of each arm; the first arm is no offload.
    share : float
        Part of a step without offload that is forward.
    rough : dict
        About how long a step takes, in seconds.
    seconds : float
        For all of it.
    steps : int
        Steps in one measurement.

    Returns
    -------
    dict
        For each arm seconds, samples, the ratio to no offload, and the compute of no offload, all of this group.
    """
    once = sum(rough[arm] for arm in functions) * (1 + steps)
    repeats = min(7, max(2, round(seconds / once)))
    samples = measure_step_times(functions, repeats=repeats, steps=steps, warmup=0)
    baseline = median(samples[NOTHING, 0])
    compute = {"forward": baseline * share, "backward": baseline * (1 - share)}
    print(f"  {len(functions)} arms timed, {repeats} repeats", flush=True)
    return {
        arm: {"seconds": median(found), "samples": found, "ratio": median(found) / baseline, "compute": compute}
        for arm, found in samples.items()
    }


def measure(name: str, settings: LlamaSettings, device: torch.device) -> dict[str, Any]:
    """Measure one length; return its part of the result file."""
    begun = time.perf_counter()

    def say(what: str) -> None:
        print(f"{name}: {what} after {time.perf_counter() - begun:.0f} s", flush=True)

    stack = Stack(settings, device)
    functions: dict[Arm, Callable[[], object]] = {(NOTHING, 0): partial(stack.step, stack.twin)}
    functions[AGAIN, 0] = functions[NOTHING, 0]
    functions[NOTHING, 0]()
    saved = saved_storages(stack)
    with MemoryMeter() as meter:
        functions[NOTHING, 0]()
    peak = meter.peak_bytes
    link = measure_link(*((2**20, 3) if device.type == "cpu" else ()))
    share = forward_share(stack)
    rough = dict.fromkeys(functions, _seconds(functions[NOTHING, 0]))
    say("no offload looked at")

    offloaded = Offloaded(stack)
    rows: dict[Arm, dict[str, Any]] = {arm: {"peak_bytes": peak, "drop_bytes": 0} for arm in functions}
    for count in reversed(range(1, settings.layers)):
        arm = OURS, count
        functions[arm] = partial(offloaded.step, count)
        statistics, low, rough[arm] = offloaded.counted(count)
        rows[arm] = {"peak_bytes": low, "drop_bytes": peak - low, **copies(statistics, link)}
        rows[arm] |= r(rows[arm], saved, count, settings)
        if count == settings.layers - 1:
            say("host memory taken")
    say("peaks and copies known")

    once = rough[NOTHING, 0]
    compute = {"forward": once * share, "backward": once * (1 - share)}
    free = [arm for arm in rows if arm[0] == OURS and fits(rows[arm], compute)]
    others = [arm for arm in rows if arm[0] == OURS and arm not in free]
    before = driver_calls(device)
    groups: Iterable[tuple[list[Arm], float]] = (
        ([(NOTHING, 0), (AGAIN, 0), *free], SHARE),
        ([(NOTHING, 0), *others], 1 - SHARE),
    )
    found: dict[Arm, dict[str, Any]] = {}
    for arms, part in groups:
        if len(arms) == 1:
            continue
        of = {arm: functions[arm] for arm in arms}
        found = timed(of, share, rough, settings.seconds * part, settings.steps) | found
    calls = {key: count - before[key] for key, count in driver_calls(device).items()}
    for arm, row in rows.items():
        row |= found[arm]
        if arm[0] == OURS:
            row |= {"fits": fits(row, row["compute"]), "bound_seconds": bound_seconds(row, row["compute"])}
            row["bound_ratio"] = row["seconds"] / row["bound_seconds"]
    say("timed")

    recorded = sorted({max((count for _, count in free), default=1), settings.layers - 2})
    timelines = [offloaded.timeline(count) for count in recorded]
    offloaded.handle.remove()
    say("recorded")
    return {
        "settings": settings.to_json(),
        "link": {"d2h": link.d2h, "h2d": link.h2d},
        "compute": rows[NOTHING, 0]["compute"],
        "noise": abs(rows[AGAIN, 0]["ratio"] - 1),
        "driver_calls": calls,
        "saved": [s.to_json() for s in saved if 1 in s.layers],
        "arms": [
            {"method": method, "num_layers": count, **row}
            for (method, count), row in sorted(rows.items(), key=lambda entry: entry[0][1])
        ],
        "timelines": timelines,
    }


def r(row: dict[str, Any], saved: list[SavedStorage], count: int, settings: LlamaSettings) -> dict[str, Any]:
    """Return R of an arm, and the bytes that should be absent at the peak: by autograd's account, not the library's."""
    absent = absent_bytes(saved, count, settings.min_bytes)
    return {"bytes_absent": absent, "r": row["drop_bytes"] / absent}


def _seconds(function: Callable[[], object]) -> float:
    """Return about how long a step takes."""
    return measure_step_times({"": function}, repeats=1, warmup=0)[""][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--parts", default="host,8k,32k", help="what to measure, with commas between")
    parser.add_argument("--seconds", type=float, help="for the measurements of each length; more are made in more time")
    parser.add_argument("--rehearse", action="store_true", help="small sizes")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    lengths = REHEARSAL if options.rehearse else FULL
    names = options.parts.split(",")
    unknown = sorted(set(names) - {"host", *lengths})
    if unknown:
        parser.error(f"--parts: no part {', '.join(unknown)}; expected host, {', '.join(lengths)}.")
    command = "PYTHONPATH=src python benchmarks/llama.py"
    command += "" if options.parts == parser.get_default("parts") else f" --parts {options.parts}"
    if options.seconds is not None:
        command += f" --seconds {options.seconds:g}"
        lengths = {name: replace(settings, seconds=options.seconds) for name, settings in lengths.items()}
    parts: dict[str, Any] = {}
    # On an accelerator whatever is slower than flash attention would hide copies; elsewhere the name means another one.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext():
        for name in names:
            if name == "host":
                parts[name] = measure_host(REHEARSAL_HOST if options.rehearse else HOST, device, small=options.rehearse)
            else:
                parts[name] = measure(name, lengths[name], device)
            path = write(options.out, "llama", {"parts": parts}, command)
            print(f"wrote {path.name} with {', '.join(parts)}", flush=True)
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()


if __name__ == "__main__":
    main()
