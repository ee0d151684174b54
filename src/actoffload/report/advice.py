"""Advise what to change, in sentences with the numbers of a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from .._text import fold_names, milliseconds, percent, size
from ..engine.host_pool import GRANULE
from ..engine.statistics import Reason
from .holders import Holder, merge_held
from .report import WEIGHTS, Report, add_amounts

TOLERANCE = 0.005  # of the step time, or of the offloaded bytes: what is reported at all
SLOW = 0.01  # of a pass: estimates are no better
LARGE = 0.1  # of the activations, or of those in the groups that are offloaded: what is worth a sentence
WORTH = 0.01  # of the activations: less is worth no sentence, however little the groups save
HALF = 0.5  # of what is saved outside of the groups

# Always kept, or as the program asks, or on another device, where they take no memory of this one.
IN_ORDER = WEIGHTS | {Reason.KEPT, Reason.DEVICE, Reason.SHARED}

DOING = {
    Reason.MARKED: "remove the calls of mark_not_offload to offload them",
    Reason.LEAF: "the program refers to them too, so a copy would free nothing; pass them without requires_grad if "
    "their gradients are not needed",
    Reason.SUBCLASS: "pass plain tensors to the model, as x.as_subclass(torch.Tensor), or define "
    "__tensor_flatten__ and __tensor_unflatten__, or prepare_for_saving, in their class",
}

# By the name of an output, in Hugging Face's models, how to return less.
RETURN_LESS = (
    (
        r"\b(past_key_values|cache)\b",  # the field's name before Transformers 5.24, and since
        "pass use_cache=False to the model, or set model.config.use_cache = False, for training",
    ),
    (r"hidden_states\b", "pass output_hidden_states=False to the model if the loss does not need them"),
    (r"attentions\b", "pass output_attentions=False to the model if the loss does not need them"),
    (r"", "return only what the loss needs from forward while training"),
)
KEEP_ARGUMENTS = "inputs are freed after the call if the caller drops them; use mark_not_offload to avoid their copies"

Advice = tuple[int, str]  # the bytes that a sentence is about, and the sentence


def advise(report: Report) -> tuple[str, ...]:
    """Return what to change, one sentence each, about the most bytes first."""
    if not any(group.calls for group in report.groups) or not report.activation_bytes:
        called = "groups are modules whose forward is called, and of which a parameter or an input requires a gradient"
        return (f"No group has run with a graph since the statistics began: {called}.",)
    found = [*_offloading(report), *_kept(report), *_outside(report), *_not_freed(report)]
    ordered = sorted(found, key=lambda advice: (-advice[0], advice[1]))
    return tuple(sentence for _, sentence in ordered) or ("Nothing to change.",)


def _offloading(report: Report) -> Iterator[Advice]:
    """Advise on the choice of groups, on late reloads, on stalls, and on a pass that is longer than without."""
    totals, stalled, slower = report.totals, report.stalled or 0.0, report.slower or 0.0
    if not totals.offloaded and not totals.recomputed and not (report.because and report.times):
        because = f"None of {len(report.groups)} groups is offloaded: the last of each kind is always kept"
        yield totals.bytes_saved, f"{because}; choose smaller groups with layers."
    if late := [group for group in report.groups if group.reloaded_on_demand]:
        count = totals.reloaded_on_demand
        whole = count + totals.reloaded_ahead
        reloads = f"{count} of {whole} reloads ({percent(count / whole)}) were on demand, when backward needed them"
        why = "the execution order changed since the pass before, or backward did not run in the reverse order"
        names = fold_names([group.name for group in late])
        yield sum(group.bytes_offloaded for group in late), f"{reloads}, for {names}: {why}."
    if slower > SLOW:
        longer = f"A pass takes {percent(slower)} longer than without offloading and recomputing"
        yield report.activation_bytes, f"{longer}: a larger memory_budget, if one is set, would cost less."
    if stalled > TOLERANCE:
        worst = max(report.groups, key=lambda group: group.stall_seconds or 0.0)
        longest = f"longest for copies of {worst.name} ({milliseconds(worst.stall_seconds or 0.0)})"
        do = "offload fewer groups" if report.seconds is None else "raise memory_budget, if it is set"
        yield totals.bytes_offloaded, f"Compute stalled for {percent(stalled)} of the step, {longest}: {do}."


# What is kept


def _kept(report: Report) -> Iterator[Advice]:
    """Advise on what the groups that are offloaded keep."""
    groups = [group for group in report.groups if group.offloaded]
    least = max(LARGE * sum(group.activation_bytes for group in groups), WORTH * report.activation_bytes)
    for reason, (count, nbytes) in add_amounts(group.kept for group in groups).items():
        if reason not in IN_ORDER and (nbytes >= least or reason is Reason.HOST_FULL):
            do = DOING.get(reason, "")
            if reason is Reason.SMALL and not report.context:
                mean = max(nbytes // max(count, 1), 1)
                # Smaller ones than half the mean have less than half the bytes.
                lower = 1 << max(mean.bit_length() - 2, 0)
                do = f"they have {size(mean)} on average; with min_bytes={lower} most of these bytes can be offloaded"
            elif reason is Reason.HOST_FULL:
                # More than the limit in any case, which did not allow these steps beside what is allocated.
                enough = max(report.host_bytes, report.host_bytes_high_water) + -(-nbytes // GRANULE) * GRANULE
                do = f"free host memory, or raise max_host_bytes, if it is set, to at least {enough} ({size(enough)})"
            if do:
                yield nbytes, f"{_amount(report, count, nbytes, reason)}: {do}."


def _amount(report: Report, count: int, nbytes: int, reason: Reason) -> str:
    what = f"{percent(nbytes / report.activation_bytes)} of the activations ({size(nbytes)} in {count} tensors)"
    return f'{what} were kept for the reason "{reason.value}"'


def _outside(report: Report) -> Iterator[Advice]:
    """Advise on what no group saves: which modules save most of it."""
    count, nbytes = (report.outside or {}).get(Reason.OUTSIDE, (0, 0))
    if nbytes < LARGE * report.activation_bytes:
        return
    do = f"record a step with {report.record} to find the modules that save them"
    if sum((modules := report.outside_modules).values()) >= HALF * nbytes:
        largest = sorted(modules, key=lambda name: (-modules[name], name))[:3]
        most_of_it = ", ".join(f"`{name}` ({size(modules[name])})" for name in largest)
        do = f"{most_of_it} save the most; choose these modules, or ones around them, with layers"
    elif report.step_passes:
        do = "they are saved in no call of a module, but by the code of the model itself"
    yield nbytes, f"{_amount(report, count, nbytes, Reason.OUTSIDE)}: {do}."


# What is not freed


def _not_freed(report: Report) -> Iterator[Advice]:
    offloaded = Counter[str]()
    for group in report.groups:
        offloaded[group.name] += group.bytes_offloaded
    # Inputs are the caller's affair, unless they are large.
    for is_input, least in ((True, LARGE * report.activation_bytes), (False, TOLERANCE * offloaded.total())):
        for names, nbytes, holders in merge_held([held for held in report.held if held.is_input is is_input]):
            if nbytes > least:
                whole = sum(offloaded[name] for name in names)
                groups = fold_names(names) if len(names) == 1 else f"{len(names)} groups ({fold_names(names)})"
                share = f"{percent(nbytes / whole)} of the bytes of {groups} ({size(nbytes)} of {size(whole)})"
                because = _because(report, holders, len(names))
                yield nbytes, f"{share} were offloaded but not freed, because of {because}."


def _because(report: Report, holders: Sequence[Holder] | None, groups: int) -> str:
    if holders is None:
        return f"something that refers to them; record a step with {report.record} to find it"
    if not holders:
        return "something that Python does not see: autograd of another graph, a library, or C++"
    words = " and ".join(map(str, holders))
    if not {holder.kind for holder in holders} <= {"input", "output"}:
        return words + (", and the same in the other groups" if groups > 1 else "")
    outputs = [holder.path for holder in holders if holder.kind == "output"]
    less = (advice for name, advice in RETURN_LESS if outputs and re.search(name, outputs[0]))
    return f"{words}: {next(less, KEEP_ARGUMENTS)}"
