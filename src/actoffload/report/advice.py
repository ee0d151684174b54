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
HALF = 0.5  # of the activations: fewer in groups are worth a sentence

# Always kept, or as the program asks; on another device, where they take no memory of this one; and what a note says of
# wasted copies.
IN_ORDER = WEIGHTS | {Reason.KEPT, Reason.DEVICE, Reason.SHARED}

DOING = {
    Reason.MARKED: "remove the calls of mark_not_offload to offload them",
    Reason.LEAF: "the program refers to them too, so a copy would free nothing; pass them without requires_grad if "
    "their gradients are not needed",
    Reason.SUBCLASS: "pass plain tensors to the model, as x.as_subclass(torch.Tensor), or define "
    "__tensor_flatten__ and __tensor_unflatten__, or prepare_for_saving, in their class",
    Reason.FREED: "the program frees and fills it itself, as reversible blocks do; a copy would free nothing",
    Reason.LAYOUT: "only strided tensors can be offloaded; use a dense layout",
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
    if not any(group.calls for group in report.groups) or not report.computed_bytes:
        passes = "the forward pass" if report.passes == 1 else f"{report.passes} forward passes"
        run = f"No group has run with a graph in {passes} since the statistics began"
        called = "groups are modules whose forward is called"
        return (f"{run}: {called}, and of which a parameter or an input requires a gradient.",)
    found = [*_offloaded(report), *_kept(report), *_outside(report), *_not_freed(report)]
    found += [*_on_demand(report), *_slow(report)]
    ordered = sorted(found, key=lambda advice: (-advice[0], advice[1]))
    return tuple(sentence for _, sentence in ordered) or (_all_is_well(report),)


# What takes time


def _on_demand(report: Report) -> Iterator[Advice]:
    late = [group for group in report.groups if group.reloaded_on_demand]
    if not late:
        return
    count = report.totals.reloaded_on_demand
    whole = count + report.totals.reloaded_ahead
    why = "the execution order changed since the pass before, or backward did not run in the reverse order"
    if any(not group.calls for group in report.groups[report.groups.index(late[-1]) + 1 :]):
        why = "later groups, whose backward reloads them, did not run"
    reloads = f"{count} of {whole} reloads ({percent(count / whole)}) were on demand, when backward needed them"
    yield (
        sum(group.bytes_offloaded for group in late),
        f"{reloads}, for {fold_names([group.name for group in late])}: {why}.",
    )


def _slow(report: Report) -> Iterator[Advice]:
    """Advise on a pass that is longer than without offloading, and on stalls."""
    totals, share, slower = report.totals, report.stalled or 0.0, report.slower or 0.0
    if slower > SLOW:
        longer = f"A pass takes {percent(slower)} longer than without offloading and recomputing"
        do = "a larger memory_budget, if one is set, or more device memory would cost less; else nothing is to change"
        yield report.computed_bytes, f"{longer}: {do}."
    if share <= TOLERANCE:
        return
    worst = max(report.groups, key=lambda group: group.stall_seconds or 0.0)
    forward, backward = (milliseconds(s or 0.0) for s in (totals.forward_stall_seconds, totals.backward_stall_seconds))
    stalled = f"Compute stalled for {percent(share)} of the step ({forward} in forward, {backward} in backward)"
    longest = f"longest for copies of {worst.name} ({milliseconds(worst.stall_seconds or 0.0)})"
    do = "offload fewer groups" if report.seconds is None else "raise memory_budget, if it is set"
    yield totals.bytes_offloaded, f"{stalled}, {longest}: {do}."


# What is offloaded and kept


def _offloaded(report: Report) -> Iterator[Advice]:
    totals = report.totals
    if not totals.offloaded and not totals.recomputed:
        because = f"none of {len(report.groups)} groups is offloaded: the last of each kind is always kept"
        if report.because and report.times:
            because = report.because
        yield totals.bytes_saved, f"{because[0].upper()}{because[1:].rstrip('.')}."
    elif totals.offloaded and not totals.bytes_offloaded:
        could = size(sum(group.bytes_saved for group in report.offloaded_groups))
        everything = size(sum(group.activation_bytes for group in report.offloaded_groups))
        but = f"Nothing was offloaded, although the plan offloads {report.offloaded_share} groups"
        sentence = f"{but}: {could} of {everything} of activations in these groups can be offloaded."
        yield report.activation_bytes, sentence
    less = report.saved_at_peak
    if not totals.bytes_not_freed and less is not None and less < LARGE * totals.bytes_offloaded:
        but = f"{size(totals.bytes_offloaded)} were offloaded, but the peak is only {size(less)} lower"
        yield totals.bytes_offloaded, f"{but}: choose smaller groups with layers, or offload nothing."


def _kept(report: Report) -> Iterator[Advice]:
    """Advise on what the groups that are offloaded keep."""
    groups = report.offloaded_groups
    least = max(LARGE * sum(group.activation_bytes for group in groups), WORTH * report.computed_bytes)
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
    share = percent(nbytes / report.computed_bytes)
    what = f"{share} of the {report.counted} ({size(nbytes)} in {count} tensor{'s' * (count > 1)})"
    return f'{what} were kept for the reason "{reason.value}"'


def _outside(report: Report) -> Iterator[Advice]:
    """Advise on what no group saves: which modules save most of it."""
    (count, nbytes), everything = (report.outside or {}).get(Reason.OUTSIDE, (0, 0)), report.computed_bytes
    if nbytes < LARGE * everything:
        if report.coverage is not None and report.coverage < HALF:
            kept = {reason: size for reason, (_, size) in (report.outside or {}).items() if reason not in IN_ORDER}
            most = max(kept, key=kept.__getitem__, default=Reason.OUTSIDE)
            lie = f"Only {percent(report.coverage)} of the {report.counted} lie in groups"
            yield sum(kept.values()), f'{lie}; of the others, most were kept for the reason "{most.value}".'
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
    offloaded, unnamed = Counter[str](), Counter[str]()
    for group in report.groups:
        offloaded[group.name] += group.bytes_offloaded
        unnamed[group.name] += group.bytes_not_freed
    for held in report.held:
        unnamed[held.group] -= held.nbytes
    # Inputs are the caller's affair, unless they are large.
    for is_input, least in ((True, LARGE * report.activation_bytes), (False, TOLERANCE * offloaded.total())):
        found = [
            (names, nbytes, _because(holders, len(names)))
            for names, nbytes, holders in merge_held([held for held in report.held if held.is_input is is_input])
        ]
        if not is_input:
            rest = +unnamed  # those that are positive
            unknown = f"something that refers to them; record a step with {report.record} to find it"
            found.append((tuple(rest), rest.total(), unknown))
        for names, nbytes, because in found:
            if nbytes > least:
                whole = sum(offloaded[name] for name in names)
                groups = fold_names(names) if len(names) == 1 else f"{len(names)} groups ({fold_names(names)})"
                share = f"{percent(nbytes / whole)} of the bytes of {groups} ({size(nbytes)} of {size(whole)})"
                yield nbytes, f"{share} were offloaded but not freed, because of {because}."


def _because(holders: Sequence[Holder], groups: int) -> str:
    if not holders:
        return "something that Python does not see: autograd of another graph, a library, or C++"
    words = " and ".join(map(str, holders))
    if not {holder.kind for holder in holders} <= {"input", "output"}:
        return words + (", and the same in the other groups" if groups > 1 else "")
    outputs = [holder.paths[0] for holder in holders if holder.kind == "output"]
    less = (advice for name, advice in RETURN_LESS if outputs and re.search(name, outputs[0]))
    return f"{words}: {next(less, KEEP_ARGUMENTS)}"


# Nothing to change


def _all_is_well(report: Report) -> str:
    totals, everything, stalled = report.totals, report.computed_bytes, report.stalled
    left, again = totals.bytes_offloaded - totals.bytes_wasted, sum(group.recomputed for group in report.groups)
    facts = []
    if totals.offloaded:
        part = f"{size(left)} of {size(everything)} of {report.counted} ({percent(left / everything)})"
        facts.append(f"{part} were offloaded from {report.offloaded_share} groups")
    if again:
        facts.append(f"{again} group{'s are' if again > 1 else ' is'} recomputed")
    if stalled is not None:
        facts.append(f"compute stalled for {percent(stalled)} of the step")
    known = not report.times or report.slower is not None or stalled is not None
    return f"Nothing to change{'' if known else ' in memory'}: {'; '.join(facts)}."
