"""Advise what to change, in sentences with the numbers of a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ..engine.statistics import Reason
from ..schedule.costs import LayerCost, Link
from ..schedule.plan import Plan
from ..schedule.simulate import Simulation, simulate
from ..schedule.units import milliseconds, percent, size
from .groups import WEIGHTS, Holder, merge_held
from .report import Report
from .tables import fold_names

__all__ = ["advise", "most_layers_without_stall"]

DOING = {
    Reason.MARKED: "remove the calls of mark_not_offload to offload them",
    Reason.KEPT: "remove their module from keep to offload them",
    Reason.LEAF: "the program refers to them too, so a copy would free nothing; pass them without requires_grad if "
    "their gradients are not needed",
    Reason.SUBCLASS: "define __tensor_flatten__ and __tensor_unflatten__, or prepare_for_saving, in their class",
    Reason.SHARED: "they are offloaded only if all groups that save them are; raise num_layers, unless the last group "
    "of a kind, which is always kept, saves them",
    Reason.LAYOUT: "only strided tensors can be offloaded; use a dense layout",
}

RETURN_LESS = (
    (r"past_key_values", "pass use_cache=False to the model, or set model.config.use_cache = False, for training"),
    (r"\w*hidden_states", "pass output_hidden_states=False to the model if the loss does not need them"),
    (r"\w*attentions", "pass output_attentions=False to the model if the loss does not need them"),
    (r"", "return only what the loss needs from forward while training"),
)
"""By the name of an output of the model, how to return less.  The names are those of Hugging Face's models."""

KEEP_ARGUMENTS = "inputs are freed after the call if the caller drops them; use mark_not_offload to avoid their copies"

LARGE = 0.1
"""Fraction of the activations that is worth a sentence."""

TOLERANCE = 0.005
"""Fraction of the step time; a longer stall is reported."""

HOST_STEP = 2**21
"""Pinned memory is allocated in multiples of this, in bytes."""

Weighted: TypeAlias = tuple[int, str]
"""The bytes that a sentence is about, and the sentence."""

IN_ORDER = WEIGHTS | {Reason.DEVICE}
"""Weights are always kept, and tensors on another device take no memory of this one."""


def advise(
    report: Report,
    *,
    costs: Sequence[LayerCost] | None = None,
    link: Link | None = None,
    plan_for: Callable[[int], Plan] | None = None,
) -> tuple[str, ...]:
    """Return what to change, one sentence each, about the most bytes first.

    Parameters
    ----------
    report : Report
        Its own `Report.advice` is ignored.
    costs : sequence of LayerCost, optional
        Measured cost of each group, in execution order.  With `link` and `plan_for`, other values of `num_layers` are
        simulated.
    link : Link, optional
        Measured bandwidths.
    plan_for : callable, optional
        Returns the plan for a number of layers; raises `ValueError` if there is none.

    Returns
    -------
    tuple of str
        If nothing needs to change, one sentence that says so.

    Examples
    --------
    >>> from actoffload.report import GroupReport, Report
    >>> from actoffload.report.advice import advise
    >>> block = GroupReport("blocks.0", offloaded=True, bytes_saved=2**30, bytes_offloaded=2**30)
    >>> print(*advise(Report((block, block, GroupReport("blocks.2", bytes_saved=2**30)))))
    Nothing to do: 2048.0 MiB of 3072.0 MiB of activations (66.7 %) were offloaded from 2 of 3 groups, and 0 storages
    were reloaded on demand.
    """
    if not report.groups or not any(group.calls for group in report.groups):
        return (f"No group has run in {report.passes} forward passes with a graph since the statistics began.",)
    found = [*_offloaded(report), *_kept(report), *_not_freed(report), *_on_demand(report), *_stalled(report)]
    more: list[Weighted] = []
    if costs and link is not None and plan_for is not None and report.num_layers is not None:
        predicted, more = _other_numbers(report.num_layers, costs, link, plan_for)
        if _stall_share(report) is None or _stalls(report):  # what was measured counts more than a simulation
            found += predicted
    sentences = [sentence for _, sentence in sorted(found, key=lambda entry: (-entry[0], entry[1]))]
    return (*(sentences or [_fine(report)]), *(sentence for _, sentence in more))


def most_layers_without_stall(
    costs: Sequence[LayerCost], link: Link, plan_for: Callable[[int], Plan], tolerance: float = TOLERANCE
) -> int:
    """Return the largest number of layers to offload without a longer simulated step.

    Parameters
    ----------
    costs : sequence of LayerCost
        Cost of each group, in execution order.
    link : Link
        Bandwidths.
    plan_for : callable
        Returns the plan for a number of layers; raises `ValueError` if there is none.
    tolerance : float
        Fraction by which the step may be longer.

    Returns
    -------
    int
        Number of layers.
    """
    for num_layers in range(len(costs), 0, -1):
        predicted = _simulate(num_layers, costs, link, plan_for)
        if predicted is not None and predicted.slowdown <= 1 + tolerance:
            return num_layers
    return 0


def _simulate(
    num_layers: int, costs: Sequence[LayerCost], link: Link, plan_for: Callable[[int], Plan]
) -> Simulation | None:
    try:
        return simulate(plan_for(num_layers), costs, link)
    except ValueError:
        return None


def _other_numbers(
    now: int, costs: Sequence[LayerCost], link: Link, plan_for: Callable[[int], Plan]
) -> tuple[list[Weighted], list[Weighted]]:
    """Return advice against a stall, and advice to offload more where nothing would stall."""
    best = most_layers_without_stall(costs, link, plan_for)
    here, there = _simulate(now, costs, link, plan_for), _simulate(best, costs, link, plan_for)
    if here is None or there is None or now == best:
        return [], []
    speed = f"simulated with {link.d2h / 1e9:.1f} GB/s to the host and {link.h2d / 1e9:.1f} GB/s to the device"
    if here.slowdown > 1 + TOLERANCE:
        takes = f"With num_layers={now} a step takes {here.slowdown:.3f} times as long as without offload"
        other = f"with num_layers={best} it would take {there.slowdown:.3f} times as long"
        return [
            (
                max(here.bytes_offloaded - there.bytes_offloaded, 0),
                f"{takes}, with {milliseconds(here.stall_seconds)} of stalls; "
                f"{other if best else 'every other number stalls as well'} ({speed}).",
            )
        ], []
    drop = here.peak_bytes - there.peak_bytes
    if drop <= 0:
        return [], []
    words = f"num_layers={best} would not stall either, and would lower the peak by {size(drop)} against"
    return [], [(drop, f"{words} num_layers={now} ({speed}).")]


def _offloaded(report: Report) -> Iterator[Weighted]:
    totals, groups = report.totals, len(report.groups)
    saved = totals.bytes_saved
    if not report.offloaded_groups:
        yield saved, f"None of {groups} groups is offloaded: {_offload_more(report)}."
    elif not totals.bytes_offloaded:
        theirs = [(group.bytes_saved, group.activation_bytes) for group in report.offloaded_groups]
        could, everything = (size(sum(column)) for column in zip(*theirs, strict=True))
        yield (
            report.activation_bytes,
            f"Nothing was offloaded, although the plan offloads {len(report.offloaded_groups)} of {groups} groups: "
            f"{could} of {everything} of activations in these groups can be offloaded.",
        )
    if groups < 3 and totals.calls < 3:
        yield (
            saved,
            f"Only {'one group was' if groups == 1 else f'{groups} groups were'} chosen, so there is little compute to "
            "overlap copies with: choose at least 3 smaller modules with the argument layers.",
        )


def _offload_more(report: Report) -> str:
    """Return the argument to change if no group is offloaded."""
    runs = Counter[str]()
    for group in report.groups:
        runs[group.kind] += group.calls
    if max(runs.values()) < 2:
        return "only one group of each kind ran, and the last of a kind is always kept; choose several with layers"
    return "raise fraction" if report.num_layers else "raise num_layers above 0"


def _kept(report: Report) -> Iterator[Weighted]:
    everything = report.activation_bytes
    for reason, (count, nbytes) in report.kept.items():
        share = nbytes / everything if everything else 0.0
        if reason in IN_ORDER or (share < LARGE and reason is not Reason.HOST_FULL):
            continue
        yield (
            nbytes,
            f"{percent(share)} of the activations ({size(nbytes)} in {count} tensor{'s' * (count > 1)}) were kept for "
            f'the reason "{reason.value}": {_to_do(report, reason, count, nbytes)}.',
        )


def _to_do(report: Report, reason: Reason, count: int, nbytes: int) -> str:
    if reason is Reason.SMALL:
        mean = max(nbytes // max(count, 1), 1)
        lower = 1 << max(mean.bit_length() - 2, 0)  # smaller ones than half the mean have less than half the bytes
        return f"they have {size(mean)} on average; with min_bytes={lower} most of these bytes can be offloaded"
    if reason is Reason.HOST_FULL:
        # More than the limit in any case, which did not allow these steps beside what is allocated.
        enough = max(report.host_bytes, report.host_bytes_high_water) + -(-nbytes // HOST_STEP) * HOST_STEP
        return (
            f"raise max_host_bytes to at least {enough} ({size(enough)}); if no limit is set, the host has no more "
            "pinned memory"
        )
    if reason is Reason.OUTSIDE:
        return _choose(report)
    return DOING[reason]


def _choose(report: Report) -> str:
    modules, everything = report.outside_modules, report.activation_bytes
    if not modules:
        return "record a step with handle.recording() to find the modules that save them, and add these to layers"
    # A pattern means several modules; a single one would be kept, as the last of its kind.
    several = {name: nbytes for name, nbytes in modules.items() if "*" in name and nbytes >= LARGE * everything}
    name, nbytes = max((several or modules).items(), key=lambda item: (item[1], item[0]))
    if "*" in name:
        return f"add `{name}`, which saves {size(nbytes)} of them, to layers"
    return f"`{name}` saves {size(nbytes)} of them, but would be kept as a group too, as the only one of its kind"


def _not_freed(report: Report) -> Iterator[Weighted]:
    offloaded: dict[str, int] = {}
    unnamed: dict[str, int] = {}
    for group in report.groups:
        offloaded[group.name] = offloaded.get(group.name, 0) + group.bytes_offloaded
        unnamed[group.name] = unnamed.get(group.name, 0) + group.bytes_not_freed
    for held in report.held:
        unnamed[held.group] = unnamed.get(held.group, 0) - held.nbytes
    entries = merge_held(report.held)
    rest = {name: nbytes for name, nbytes in unnamed.items() if nbytes > 0}
    for names, nbytes, holders in entries:
        yield from _not_freed_because(names, nbytes, offloaded, _because(holders, len(names)))
    if rest:
        because = "something refers to them; record a step with handle.recording() to find it"
        yield from _not_freed_because(tuple(rest), sum(rest.values()), offloaded, because)


def _not_freed_because(
    names: Sequence[str], nbytes: int, offloaded: Mapping[str, int], because: str
) -> Iterator[Weighted]:
    of = sum(offloaded.get(name, 0) for name in names)
    if nbytes <= TOLERANCE * sum(offloaded.values()):
        return
    groups = fold_names(names) if len(names) == 1 else f"{len(names)} groups ({fold_names(names)})"
    share = f"{percent(nbytes / of)} of the bytes of {groups} ({size(nbytes)} of {size(of)})" if of else size(nbytes)
    yield nbytes, f"{share} were offloaded but not freed, because {because}."


def _because(holders: Sequence[Holder], groups: int) -> str:
    if not holders:
        return "something that Python does not see refers to them: autograd of another graph, or C++"
    lines = list(map(str, holders))
    words = " and ".join(filter(None, (", ".join(lines[:-1]), lines[-1])))
    several = len(holders) > 1 or len(holders[0].paths) > 1
    if all(holder.is_call for holder in holders):  # their paths are for all groups already
        several = several or "*" in holders[0].paths[0]
        return f"{words} {'refer' if several else 'refers'} to them: {_return_less(holders)}"
    words += ", and the same in the other groups," if groups > 1 else ""
    return f"{words} {'refer' if several or groups > 1 else 'refers'} to them"


def _return_less(holders: Sequence[Holder]) -> str:
    """Return what to do about inputs and outputs: about the outputs, if there are any."""
    output = next((holder.paths[0] for holder in holders if holder.kind == "output"), None)
    if output is None:
        return KEEP_ARGUMENTS
    return next(advice for name, advice in RETURN_LESS if not name or re.search(rf"\b{name}\b", output))


def _on_demand(report: Report) -> Iterator[Weighted]:
    late = [group for group in report.groups if group.reloaded_on_demand]
    if not late:
        return
    totals, names = report.totals, list(dict.fromkeys(group.name for group in late))
    count, of = totals.reloaded_on_demand, totals.reloaded_on_demand + totals.reloaded_ahead
    behind = report.groups[report.groups.index(late[-1]) + 1 :]
    if any(not group.calls for group in behind):
        why = "later groups, whose backward reloads them, did not run"
    else:
        why = "the execution order changed since the pass before, or backward did not run in the reverse order"
    yield (
        sum(group.bytes_offloaded for group in late),
        f"{count} of {of} reloads ({percent(count / of)}) were on demand, when backward needed them, for "
        f"{fold_names(names)}: {why}.",
    )


def _stall_share(report: Report) -> float | None:
    waited = report.totals.stall_seconds
    return None if not report.step_seconds or waited is None else waited / report.step_seconds


def _stalls(report: Report) -> bool:
    return (_stall_share(report) or 0.0) > TOLERANCE


def _stalled(report: Report) -> Iterator[Weighted]:
    if not _stalls(report):
        return
    totals, share = report.totals, percent(_stall_share(report) or 0.0)
    worst = max(report.groups, key=lambda group: group.stall_seconds or 0.0)
    forward, backward = (milliseconds(s or 0.0) for s in (totals.forward_stall_seconds, totals.backward_stall_seconds))
    yield (
        totals.bytes_offloaded,
        f"Compute stalled for {share} of the step ({forward} in forward, {backward} in backward), longest for copies "
        f"of {worst.name} ({milliseconds(worst.stall_seconds or 0.0)}): offload fewer groups.",
    )


def _fine(report: Report) -> str:
    totals, everything = report.totals, report.activation_bytes
    left = totals.bytes_offloaded - totals.bytes_wasted
    share = percent(left / everything) if everything else percent(0)
    words = (
        f"Nothing to do: {size(left)} of {size(everything)} of activations ({share}) were offloaded from "
        f"{len(report.offloaded_groups)} of {len(report.groups)} groups, and {totals.reloaded_on_demand} storages were "
        "reloaded on demand"
    )
    stalled = _stall_share(report)
    if stalled is not None:
        words += f"; compute stalled for {percent(stalled)} of the step"
    return f"{words}."
