"""Advise on what takes time: reloads on demand, passes that got slower, stalls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .._folding import fold_names
from ..schedule.timeline import milliseconds, percent
from .facts import pass_time
from .report import Advice, Report

__all__ = ["TOLERANCE", "advise_on_time", "stall_share"]

TOLERANCE = 0.005  # of the step time, or of the offloaded bytes: what is reported at all
SLOWER = 0.01  # of the step without offloading: a slowdown that is worth a sentence


def advise_on_time(report: Report) -> tuple[Advice, ...]:
    """Return what to change because it takes time, one sentence each."""
    return *_on_demand(report), *_slower(report), *_stalled(report)


def _on_demand(report: Report) -> Iterator[Advice]:
    late = [group for group in report.groups if group.reloaded_on_demand]
    if not late:
        return
    totals, names = report.totals, list(dict.fromkeys(group.name for group in late))
    count, of = totals.reloaded_on_demand, totals.reloaded_on_demand + totals.reloaded_ahead
    behind = report.groups[report.groups.index(late[-1]) + 1 :]
    why = "the execution order changed since the pass before, or backward did not run in the reverse order"
    if any(not group.calls for group in behind):
        why = "later groups, whose backward reloads them, did not run"
    reloads = f"{count} of {of} reloads ({percent(count / of)}) were on demand, when backward needed them"
    nbytes = sum(group.bytes_offloaded for group in late)
    yield Advice(f"{reloads}, for {fold_names(names)}: {why}.", nbytes)


def _slower(report: Report) -> Iterator[Advice]:
    if not report.times or report.slowdown is None or report.slowdown <= 1 + SLOWER:
        return
    do, change = _fewer(report)
    sentence = pass_time(report)
    yield Advice(f"{sentence[0].upper()}{sentence[1:]}: {do}.", report.totals.bytes_offloaded, **change)


def _fewer(report: Report) -> tuple[str, dict[str, Any]]:
    """Return how to offload less, and the arguments that do."""
    if report.next_choice:
        return report.next_choice.rstrip("."), {}
    if not report.takes("num_layers"):
        return "offload fewer groups", {}
    offloaded = Counter(group.kind for group in report.offloaded_groups)
    number = min(max(offloaded.values(), default=1), report.num_layers or len(report.groups)) - 1
    return f"offload fewer groups: pass num_layers={number}", {"num_layers": number}


def stall_share(report: Report) -> float | None:
    """Return the share of the recorded step for which compute stalled; None if that is not known."""
    waited = report.totals.stall_seconds
    return None if not report.times or not report.step_seconds or waited is None else waited / report.step_seconds


def _stalled(report: Report) -> Iterator[Advice]:
    share = stall_share(report) or 0.0
    if share <= TOLERANCE:
        return
    totals = report.totals
    worst = max(report.groups, key=lambda group: group.stall_seconds or 0.0)
    forward, backward = (milliseconds(s or 0.0) for s in (totals.forward_stall_seconds, totals.backward_stall_seconds))
    stalled = f"Compute stalled for {percent(share)} of the step ({forward} in forward, {backward} in backward)"
    longest = f"longest for copies of {worst.name} ({milliseconds(worst.stall_seconds or 0.0)})"
    do, change = _fewer(report)
    yield Advice(f"{stalled}, {longest}: {do}.", totals.bytes_offloaded, **change)
