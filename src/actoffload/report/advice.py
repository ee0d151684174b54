"""Advise what to change, in sentences with the numbers of a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .._folding import fold_names
from ..engine.slabs import GRANULE
from ..engine.statistics import Reason
from ..schedule.timeline import milliseconds, percent, size
from .groups import WEIGHTS, Holder, merge_held
from .report import Report

__all__ = ["advise"]

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

# By the name of an output, in Hugging Face's models, how to return less.
RETURN_LESS = (
    (r"\bpast_key_values\b", "pass use_cache=False to the model, or set model.config.use_cache = False, for training"),
    (r"hidden_states\b", "pass output_hidden_states=False to the model if the loss does not need them"),
    (r"attentions\b", "pass output_attentions=False to the model if the loss does not need them"),
    (r"", "return only what the loss needs from forward while training"),
)
KEEP_ARGUMENTS = "inputs are freed after the call if the caller drops them; use mark_not_offload to avoid their copies"
LARGE = 0.1  # of the activations: what is worth a sentence
TOLERANCE = 0.005  # of the step time, or of the offloaded bytes: what is reported at all

Weighted: TypeAlias = tuple[int, str]  # the bytes that a sentence is about, and the sentence
IN_ORDER = WEIGHTS | {Reason.DEVICE}  # always kept; and on another device, where they take no memory of this one


def advise(report: Report) -> tuple[str, ...]:
    """Return what to change, one sentence each, about the most bytes first."""
    if not report.groups or not any(group.calls for group in report.groups):
        return (f"No group has run in {report.passes} forward passes with a graph since the statistics began.",)
    found = [*_offloaded(report), *_kept(report), *_not_freed(report), *_on_demand(report), *_stalled(report)]
    return tuple(words for _, words in sorted(found, key=lambda entry: (-entry[0], entry[1]))) or (_fine(report),)


def _offloaded(report: Report) -> Iterator[Weighted]:
    totals, groups = report.totals, len(report.groups)
    if not report.offloaded_groups:
        calls = Counter[str]()
        for group in report.groups:
            calls[group.kind] += group.calls
        do = "raise fraction" if report.num_layers else "raise num_layers above 0"
        if max(calls.values()) < 2:
            do = "only one group of each kind ran, and the last of a kind is always kept; choose several with layers"
        yield totals.bytes_saved, f"None of {groups} groups is offloaded: {do}."
    elif not totals.bytes_offloaded:
        could = size(sum(group.bytes_saved for group in report.offloaded_groups))
        everything = size(sum(group.activation_bytes for group in report.offloaded_groups))
        but = f"Nothing was offloaded, although the plan offloads {len(report.offloaded_groups)} of {groups} groups"
        yield (
            report.activation_bytes,
            f"{but}: {could} of {everything} of activations in these groups can be offloaded.",
        )


def _kept(report: Report) -> Iterator[Weighted]:
    everything = report.activation_bytes
    for reason, (count, nbytes) in report.kept.items():
        share = nbytes / everything if everything else 0.0
        if reason in IN_ORDER or (share < LARGE and reason is not Reason.HOST_FULL):
            continue
        what = f"{percent(share)} of the activations ({size(nbytes)} in {count} tensor{'s' * (count > 1)})"
        yield nbytes, f'{what} were kept for the reason "{reason.value}": {_to_do(report, reason, count, nbytes)}.'


def _to_do(report: Report, reason: Reason, count: int, nbytes: int) -> str:
    if reason is Reason.SMALL:
        mean = max(nbytes // max(count, 1), 1)
        lower = 1 << max(mean.bit_length() - 2, 0)  # smaller ones than half the mean have less than half the bytes
        return f"they have {size(mean)} on average; with min_bytes={lower} most of these bytes can be offloaded"
    if reason is Reason.HOST_FULL:
        # More than the limit in any case, which did not allow these steps beside what is allocated.
        enough = max(report.host_bytes, report.host_bytes_high_water) + -(-nbytes // GRANULE) * GRANULE
        limit = f"raise max_host_bytes to at least {enough} ({size(enough)})"
        return f"{limit}; if no limit is set, the host has no more pinned memory"
    if reason is not Reason.OUTSIDE:
        return DOING[reason]
    modules, everything = report.outside_modules, report.activation_bytes
    if not modules:
        return "record a step with handle.recording() to find the modules that save them, and add these to layers"
    # A pattern means several modules; a single one would be kept, as the last of its kind.
    several = {name: saved for name, saved in modules.items() if "*" in name and saved >= LARGE * everything}
    name, saved = max((several or modules).items(), key=lambda item: (item[1], item[0]))
    if "*" in name:
        return f"add `{name}`, which saves {size(saved)} of them, to layers"
    return f"`{name}` saves {size(saved)} of them, but would be kept as a group too, as the only one of its kind"


def _not_freed(report: Report) -> Iterator[Weighted]:
    offloaded, unnamed = Counter[str](), Counter[str]()
    for group in report.groups:
        offloaded[group.name] += group.bytes_offloaded
        unnamed[group.name] += group.bytes_not_freed
    for held in report.held:
        unnamed[held.group] -= held.nbytes
    found = [(names, nbytes, _because(holders, len(names))) for names, nbytes, holders in merge_held(report.held)]
    rest = +unnamed  # those that are positive
    unknown = "something that refers to them; record a step with handle.recording() to find it"
    for names, nbytes, because in [*found, (tuple(rest), rest.total(), unknown)]:
        if nbytes > TOLERANCE * offloaded.total():
            of = sum(offloaded[name] for name in names)
            groups = fold_names(names) if len(names) == 1 else f"{len(names)} groups ({fold_names(names)})"
            share = f"{percent(nbytes / of)} of the bytes of {groups} ({size(nbytes)} of {size(of)})" if of else ""
            yield nbytes, f"{share or size(nbytes)} were offloaded but not freed, because of {because}."


def _because(holders: Sequence[Holder], groups: int) -> str:
    if not holders:
        return "something that Python does not see: autograd of another graph, or C++"
    words = " and ".join(map(str, holders))
    if not {holder.kind for holder in holders} <= {"input", "output"}:
        return words + (", and the same in the other groups" if groups > 1 else "")
    outputs = [holder.paths[0] for holder in holders if holder.kind == "output"]
    less = (advice for name, advice in RETURN_LESS if outputs and re.search(name, outputs[0]))
    return f"{words}: {next(less, KEEP_ARGUMENTS)}"


def _on_demand(report: Report) -> Iterator[Weighted]:
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
    yield sum(group.bytes_offloaded for group in late), f"{reloads}, for {fold_names(names)}: {why}."


def _stall_share(report: Report) -> float | None:
    waited = report.totals.stall_seconds
    return None if not report.step_seconds or waited is None else waited / report.step_seconds


def _stalled(report: Report) -> Iterator[Weighted]:
    share = _stall_share(report) or 0.0
    if share <= TOLERANCE:
        return
    totals = report.totals
    worst = max(report.groups, key=lambda group: group.stall_seconds or 0.0)
    forward, backward = (milliseconds(s or 0.0) for s in (totals.forward_stall_seconds, totals.backward_stall_seconds))
    stalled = f"Compute stalled for {percent(share)} of the step ({forward} in forward, {backward} in backward)"
    longest = f"longest for copies of {worst.name} ({milliseconds(worst.stall_seconds or 0.0)})"
    yield totals.bytes_offloaded, f"{stalled}, {longest}: offload fewer groups."


def _fine(report: Report) -> str:
    totals, everything, stalled = report.totals, report.activation_bytes, _stall_share(report)
    left = totals.bytes_offloaded - totals.bytes_wasted
    share = percent(left / everything if everything else 0)
    return (
        f"Nothing to do: {size(left)} of {size(everything)} of activations ({share}) were offloaded from "
        f"{len(report.offloaded_groups)} of {len(report.groups)} groups, and {totals.reloaded_on_demand} storages were "
        f"reloaded on demand{'' if stalled is None else f'; compute stalled for {percent(stalled)} of the step'}."
    )
