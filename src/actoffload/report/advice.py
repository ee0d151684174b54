"""What to do about a report, in sentences: each says what was seen, in numbers, and what changes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ..engine.statistics import Reason
from ..schedule.costs import LayerCost, Link
from ..schedule.plan import Plan
from ..schedule.simulate import Simulation, simulate
from .folding import name_of_all
from .held import Holder, merge_held
from .report import WEIGHTS, Report
from .tables import milliseconds, percent, size

__all__ = ["DOING", "KEEP_ARGUMENTS", "RETURN_LESS", "advise", "most_layers_without_stall"]

DOING = {
    Reason.MARKED: "take the calls of mark_not_offload away if they may leave",
    Reason.KEPT: "take their module out of keep if they may leave",
    Reason.LEAF: "whoever made them holds them as well, so a copy would free nothing; pass them without "
    "requires_grad if nobody needs their gradients",
    Reason.SUBCLASS: "a subclass travels in parts if its class has __tensor_flatten__ and __tensor_unflatten__, or "
    "prepare_for_saving",
    Reason.SHARED: "they leave only if all groups that save them do: raise num_layers, unless the last group of a "
    "kind, which always stays, is one of them",
    Reason.LAYOUT: "only strided tensors can leave; a dense form of them would",
}

RETURN_LESS = (
    (r"past_key_values", "pass use_cache=False to the model, or set model.config.use_cache = False, for training"),
    (r"\w*hidden_states", "pass output_hidden_states=False to the model if the loss does not need them"),
    (r"\w*attentions", "pass output_attentions=False to the model if the loss does not need them"),
    (r"", "return only what the loss needs from forward while training"),
)
"""By the name of what a model returns: how to have it return less.  The names are those of Hugging Face's models."""

KEEP_ARGUMENTS = "they go when that call ends, if its caller lets go of them; mark_not_offload spares their copies"


LARGE = 0.1
"""A share of the activations that is worth a sentence."""

TOLERANCE = 0.005
"""A step that takes longer than this is said to stall."""

HOST_STEP = 2**21
"""Page-locked memory is taken in multiples of this, in bytes."""

Weighted: TypeAlias = tuple[int, str]
"""The bytes that a sentence is about, and the sentence."""

IN_ORDER = WEIGHTS | {Reason.DEVICE}
"""Weights stay in any case, and what is on another device takes no memory of this one."""


def advise(
    report: Report,
    *,
    costs: Sequence[LayerCost] | None = None,
    link: Link | None = None,
    plan_for: Callable[[int], Plan] | None = None,
) -> tuple[str, ...]:
    """Return what to do about a report.

    Parameters
    ----------
    report : Report
        Its own `Report.advice` is not looked at.
    costs : sequence of LayerCost, optional
        Measured cost of each group, in the order of the plan.  With the two below, what other values of `num_layers`
        would cost is simulated.
    link : Link, optional
        Measured bandwidths.
    plan_for : callable, optional
        Returns the plan for a number of layers; a `ValueError` says that there is none.

    Returns
    -------
    tuple of str
        One sentence each, with numbers; about the most bytes first.  If there is nothing to do, a sentence that
        says so.

    Examples
    --------
    >>> from actoffload.report.advice import advise
    >>> from actoffload.report.report import GroupReport, Report
    >>> block = GroupReport("blocks.0", leaves=True, bytes_saved=2**30, bytes_offloaded=2**30, bytes_reloaded=2**30)
    >>> print(*advise(Report((block, block, GroupReport("blocks.2", bytes_saved=2**30)))))
    Nothing to do: 2048.0 MiB of 3072.0 MiB of activations (66.7 %) left the device in 2 of 3 groups, and 0 storages
    were reloaded on demand.
    """
    if not report.groups or not any(group.calls for group in report.groups):
        return (f"No group has run: {report.passes} forward passes with a graph were seen since the statistics began.",)
    found = [*_leaving(report), *_kept(report), *_not_freed(report), *_on_demand(report), *_stalled(report)]
    more: list[Weighted] = []
    if costs and link is not None and plan_for is not None and report.num_layers is not None:
        predicted, more = _other_numbers(report.num_layers, costs, link, plan_for)
        found += predicted if _stall_share(report) is None or _stalls(report) else []  # what was measured counts
    sentences = [sentence for _, sentence in sorted(found, key=lambda entry: (-entry[0], entry[1]))]
    return (*(sentences or [_fine(report)]), *(sentence for _, sentence in more))


def most_layers_without_stall(
    costs: Sequence[LayerCost], link: Link, plan_for: Callable[[int], Plan], tolerance: float = TOLERANCE
) -> int:
    """Return the largest number of layers to offload with which the simulated step takes no longer than without.

    Parameters
    ----------
    costs : sequence of LayerCost
        Cost of each group, in the order of the plan.
    link : Link
        Bandwidths.
    plan_for : callable
        Returns the plan for a number of layers; a `ValueError` says that there is none.
    tolerance : float
        By which fraction the step may be longer.

    Returns
    -------
    int
        From 0, for none, to the number of layers.
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
    """Return what to change because it stalls, and what could be changed because it would not."""
    best = most_layers_without_stall(costs, link, plan_for)
    here, there = _simulate(now, costs, link, plan_for), _simulate(best, costs, link, plan_for)
    if here is None or there is None or now == best:
        return [], []
    speed = f"simulated with {link.d2h / 1e9:.1f} GB/s to the host and {link.h2d / 1e9:.1f} GB/s back"
    if here.slowdown > 1 + TOLERANCE:
        takes = f"With num_layers={now} a step takes {here.slowdown:.3f} times as long as without offload"
        other = f"with num_layers={best} it would take {there.slowdown:.3f} times as long"
        return [
            (
                max(here.bytes_offloaded - there.bytes_offloaded, 0),
                f"{takes}, as compute waits for {milliseconds(here.stall_seconds)} of it; "
                f"{other if best else 'every other number would stall it as well'} ({speed}).",
            )
        ], []
    drop = here.peak_bytes - there.peak_bytes
    if drop <= 0:
        return [], []
    words = f"num_layers={best} would not stall either, and would hold {size(drop)} less at the peak than"
    return [], [(drop, f"{words} num_layers={now} ({speed}).")]


def _leaving(report: Report) -> Iterator[Weighted]:
    totals, groups = report.totals, len(report.groups)
    saved = totals.bytes_saved
    if not report.leaving:
        yield saved, f"None of {groups} groups leaves the device: {_let_leave(report)}."
    elif not totals.bytes_offloaded:
        theirs = [(group.bytes_saved, group.activation_bytes) for group in report.leaving]
        could, everything = (size(sum(column)) for column in zip(*theirs, strict=True))
        yield (
            report.activation_bytes,
            f"Nothing was copied, although {len(report.leaving)} of {groups} groups should leave: of {everything} of "
            f"activations in these groups {could} could.",
        )
    if groups < 3 and totals.calls < 3:
        yield (
            saved,
            f"Only {'one group was' if groups == 1 else f'{groups} groups were'} chosen, so copies have little compute "
            "to run beside: let the argument layers choose smaller modules, at least 3.",
        )


def _let_leave(report: Report) -> str:
    """Return what keeps all groups on the device, as what to change."""
    runs = Counter[str]()
    for group in report.groups:
        runs[group.kind] += group.calls
    if max(runs.values()) < 2:
        return "of each kind only one ran, and the last of a kind stays; let layers choose several of a kind"
    return "raise fraction" if report.num_layers else "raise num_layers above 0"


def _kept(report: Report) -> Iterator[Weighted]:
    everything = report.activation_bytes
    for reason, (count, nbytes) in report.kept.items():
        share = nbytes / everything if everything else 0.0
        if reason in IN_ORDER or (share < LARGE and reason is not Reason.HOST_FULL):
            continue
        yield (
            nbytes,
            f"{percent(share)} of the activations ({size(nbytes)} in {count} tensor{'s' * (count > 1)}) stayed for the "
            f'reason "{reason.value}": {_to_do(report, reason, count, nbytes)}.',
        )


def _to_do(report: Report, reason: Reason, count: int, nbytes: int) -> str:
    if reason is Reason.SMALL:
        mean = max(nbytes // max(count, 1), 1)
        lower = 1 << max(mean.bit_length() - 2, 0)  # smaller ones than half the mean have less than half the bytes
        return f"they have {size(mean)} on average; with min_bytes={lower} most of these bytes could leave"
    if reason is Reason.HOST_FULL:
        # More than the limit in any case: it forbade to add the steps that this needs to what is held.
        enough = max(report.host_bytes, report.host_bytes_high_water) + -(-nbytes // HOST_STEP) * HOST_STEP
        return (
            f"raise max_host_bytes to at least {enough} ({size(enough)}); if no limit is set, the host itself has no "
            "more page-locked memory"
        )
    if reason is Reason.OUTSIDE:
        return _choose(report)
    return DOING[reason]


def _choose(report: Report) -> str:
    modules, everything = report.outside_modules, report.activation_bytes
    if not modules:
        return "record a step with handle.recording() to learn which modules save them, and let layers choose these"
    # A pattern stands for several modules; of one alone, the last of its kind, nothing would leave.
    several = {name: nbytes for name, nbytes in modules.items() if "*" in name and nbytes >= LARGE * everything}
    name, nbytes = max((several or modules).items(), key=lambda item: (item[1], item[0]))
    if "*" in name:
        return f"add `{name}`, which saves {size(nbytes)} of them, to layers"
    return f"`{name}` saves {size(nbytes)} of them, and would stay as a group too, as the only one of its kind"


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
        because = "somebody holds references; record a step with handle.recording() to learn who"
        yield from _not_freed_because(tuple(rest), sum(rest.values()), offloaded, because)


def _not_freed_because(
    names: Sequence[str], nbytes: int, offloaded: Mapping[str, int], because: str
) -> Iterator[Weighted]:
    of = sum(offloaded.get(name, 0) for name in names)
    if nbytes <= TOLERANCE * sum(offloaded.values()):
        return
    groups = name_of_all(names) if len(names) == 1 else f"{len(names)} groups ({name_of_all(names)})"
    share = f"{_share(nbytes / of)} the bytes of {groups} ({size(nbytes)} of {size(of)})" if of else size(nbytes)
    yield nbytes, f"{share} are still on the device after their copy because {because}."


def _because(holders: Sequence[Holder], groups: int) -> str:
    if not holders:
        return "a reference that Python does not see keeps it: autograd of another graph, or C++"
    lines = list(map(str, holders))
    words = " and ".join(filter(None, (", ".join(lines[:-1]), lines[-1])))
    several = len(holders) > 1 or len(holders[0].paths) > 1
    if all(holder.is_call for holder in holders):  # their paths are for all groups already
        several = several or "*" in holders[0].paths[0]
        return f"{words} {'keep' if several else 'keeps'} a reference: {_return_less(holders)}"
    words += ", and the same in the other groups," if groups > 1 else ""
    return f"{words} {'keep' if several or groups > 1 else 'keeps'} a reference"


def _return_less(holders: Sequence[Holder]) -> str:
    """Return what to do about inputs and outputs: about the outputs, if there are any."""
    output = next((holder.paths[0] for holder in holders if holder.kind == "output"), None)
    if output is None:
        return KEEP_ARGUMENTS
    return next(advice for name, advice in RETURN_LESS if not name or re.search(rf"\b{name}\b", output))


def _share(fraction: float) -> str:
    """Return how one speaks of a fraction: "A third of"."""
    words = {1.0: "All of", 2 / 3: "Two thirds of", 1 / 2: "Half of", 1 / 3: "A third of", 1 / 4: "A quarter of"}
    for value, spoken in words.items():
        if abs(fraction - value) < 0.01:
            return spoken
    return f"{percent(fraction)} of"


def _on_demand(report: Report) -> Iterator[Weighted]:
    late = [group for group in report.groups if group.reloaded_on_demand]
    if not late:
        return
    totals, names = report.totals, list(dict.fromkeys(group.name for group in late))
    count, of = totals.reloaded_on_demand, totals.reloaded_on_demand + totals.reloaded_ahead
    behind = report.groups[report.groups.index(late[-1]) + 1 :]
    if any(not group.calls for group in behind):
        why = "groups behind them did not run, whose backward would have asked for them"
    else:
        why = "the groups ran in another order than the pass before, or backward did not follow the order of forward"
    yield (
        sum(group.bytes_offloaded for group in late),
        f"{count} of {of} reloads ({percent(count / of)}) came only when backward needed them, for "
        f"{name_of_all(names)}: {why}.",
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
        f"Compute waited for copies for {share} of the step ({forward} in forward, {backward} in backward), longest "
        f"for those of {worst.name} ({milliseconds(worst.stall_seconds or 0.0)}): let fewer groups leave.",
    )


def _fine(report: Report) -> str:
    totals, everything = report.totals, report.activation_bytes
    left = totals.bytes_offloaded - totals.bytes_in_vain
    share = percent(left / everything) if everything else percent(0)
    words = (
        f"Nothing to do: {size(left)} of {size(everything)} of activations ({share}) left the device "
        f"in {len(report.leaving)} of {len(report.groups)} groups, and {totals.reloaded_on_demand} storages were "
        "reloaded on demand"
    )
    stalled = _stall_share(report)
    if stalled is not None:
        words += f"; compute waited for {percent(stalled)} of the step"
    return f"{words}."
