"""Build a report from the statistics of the latest pass and the recorded step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..engine.statistics import Statistics
from .advice import advise
from .facts import StepFacts
from .groups import Amounts, GroupReport, HeldStorage, Holder, sum_groups
from .pass_statistics import PassStatistics
from .report import Report
from .step_timeline import StepTimeline

__all__ = ["build"]

INPUT = Holder("input", ("",), "the model")
CALLERS = {"input", "local variable"}  # the kinds of holders of an input that the caller refers to, and nothing else


def build(
    names: Sequence[str],
    kinds: Sequence[str],
    latest: PassStatistics,
    statistics: Statistics,
    *,
    recorded: StepTimeline | None = None,
    holders: Mapping[int, tuple[Holder, ...]] | None = None,
    outside: Amounts | None = None,
    absent: Sequence[GroupReport] = (),
    facts: StepFacts | None = None,
    **more: Any,
) -> Report:
    """Return the report of a pass, with advice.

    Parameters
    ----------
    names, kinds : sequence of str
        Of the groups of the pass; groups with the same name are calls of one group, and added up.
    latest, statistics : PassStatistics, Statistics
        The latest pass whose forward has ended, and what the engine has counted.
    recorded : StepTimeline or None
        The recorded step of the same groups.
    holders : mapping of int to tuple of Holder, or None
        What else references memory, by address; None unless it was searched.
    outside : mapping of Reason to (int, int), or None
        What was kept outside of the groups; None if that is not known.
    absent : sequence of GroupReport
        Groups that did not run.
    facts : StepFacts or None
        What whole steps showed.
    **more
        Further fields of `Report`.
    """
    seconds = [{} for _ in names] if recorded is None else [vars(times) for times in recorded.by_layer()]
    not_freed, rows = Counter[int](), dict[str, list[GroupReport]]()
    for entry in latest.held:
        not_freed[entry.place] += entry.nbytes
    for k, (layer, saved) in enumerate(latest.groups):
        row = replace(
            saved,
            name=names[k],
            kind=kinds[k],
            reloaded_ahead=layer.ahead,
            reloaded_on_demand=layer.on_demand,
            bytes_reloaded=layer.bytes_reloaded,
            bytes_not_freed=not_freed[k],
            **{f"{name}_seconds": value for name, value in seconds[k].items()},
        )
        rows.setdefault(row.name, []).append(row)
    groups = [calls[0] if len(calls) == 1 else sum_groups(calls, name) for name, calls in rows.items()]
    report = Report(
        groups=(*groups, *absent),
        outside=outside or {},
        passes=statistics.passes,
        peak_resident_bytes=statistics.peak_resident_bytes,
        host_bytes=statistics.host_bytes,
        host_bytes_high_water=statistics.host_bytes_high_water,
        held=_held(latest, names, holders),
        expected_bytes=latest.expected_bytes,
        dropped_bytes=latest.freed_bytes - not_freed.total(),
        later_bytes=latest.later_bytes,
        waiting_passes=latest.waiting,
        waiting_bytes=latest.waiting_bytes,
        step_seconds=None if recorded is None else _duration(recorded),
        **{**({} if facts is None else vars(facts)), **more},
    )
    if recorded is not None and recorded.timeline.source == "reference device":
        report = replace(report, times=False)
    if outside is not None and report.coverage is None:
        report = replace(report, coverage=report.share_in_groups)
    return replace(report, advice=advise(report))


def _duration(recorded: StepTimeline) -> float:
    """Return the seconds from the first group to the end of the recording, which notes the resident bytes last."""
    return max(recorded.timeline.end, *(seconds for seconds, _ in recorded.timeline.resident[-1:]), 0.0)


def _held(
    latest: PassStatistics, names: Sequence[str], holders: Mapping[int, tuple[Holder, ...]] | None
) -> tuple[HeldStorage, ...]:
    """Return what else references memory; without a search only the inputs of the model, which the caller holds."""
    found = []
    for held in latest.held:
        known = (holders or {}).get(held.address, ())
        is_input = held.is_input and {holder.kind for holder in known} <= CALLERS
        if holders is not None or is_input:
            found.append(HeldStorage(names[held.place], held.nbytes, known or (INPUT,) * is_input, is_input))
    return tuple(found)
