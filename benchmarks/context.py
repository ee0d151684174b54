"""The longest sequence that trains, by arm: a search among the lengths of `jobs.LENGTHS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from harness import DEVICE, Sample, run_arms
from jobs import JOBS, LENGTHS
from trainer import SMALL, Sizes, train

__all__ = ["longest", "search"]

FIRST = {"none": 8, "checkpoint": 64, "checkpoint_offload": 128, "trl": 128, "offload": 128}
"""Thousands of tokens that are tried first."""


class _UnusableError(Exception):
    """An arm does not run here at any length."""


def longest(lengths: Sequence[int], first: int, trains: Callable[[int], bool]) -> int | None:
    """Return the longest of ascending lengths that trains, or None; each is tried once, and the first one first.

    If it trains, the second next follows, and so on, so that a long search takes few tries.
    """
    low, high = -1, len(lengths)  # the last known to train, and the first known not to
    at = min(range(len(lengths)), key=lambda k: abs(lengths[k] - first))
    while high - low > 1:
        if trains(lengths[at]):
            low = at
            at = min(at + 2, high - 1) if high == len(lengths) else (low + high) // 2
        else:
            high = at
            at = max(at - 2, low + 1) if low < 0 else (low + high) // 2
    return lengths[low] if low >= 0 else None


def search(
    name: str,
    write: Callable[[Sample], object],
    *,
    rehearse: bool,
    arms: tuple[str, ...] = (),
    memory: float | None = None,
) -> None:
    """Search the longest sequence of each arm, in at most `memory` GB of device memory."""
    job = JOBS[name]
    base = Sizes(0, four_bit=name == "context-qlora", liger=True)
    lengths: Sequence[int] = LENGTHS
    if rehearse:
        base, lengths = replace(base, **SMALL), (16, 32, 64)
    if memory is not None and DEVICE.type == "cuda":
        whole = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory * 1e9 / whole))

    for arm in arms or job.arms:

        def trains(tokens: int, arm: str = arm) -> bool:
            sizes = replace(base, tokens=tokens)
            more = {"tokens": tokens, "memory_gb": memory}
            (sample,) = run_arms(job, partial(train, sizes), write, (arm,), **more)
            if sample["status"] == "skipped":  # at any length
                raise _UnusableError
            return bool(sample["status"] == "ok")

        # A smaller device trains about as much shorter sequences.
        first = FIRST[arm] * 1024 * (1.0 if memory is None else max(0.05, (memory - 18) / 62))
        try:
            found = longest(lengths, 32 if rehearse else int(first), trains)
        except _UnusableError:
            continue
        print(f"{arm}: {found} tokens train", flush=True)
