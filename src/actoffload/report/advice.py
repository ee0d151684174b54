"""Advise what to change, in sentences with the numbers of a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .._folding import fold_names
from ..engine.host_pool import GRANULE
from ..engine.statistics import Reason
from ..schedule.timeline import milliseconds, percent, size
from .groups import WEIGHTS, GroupReport, Holder, add_amounts, merge_held
from .report import Advice, Report

__all__ = ["advise"]

TOLERANCE = 0.005  # of the step time, or of the offloaded bytes: what is reported at all
LARGE = 0.1  # of the activations, or of those in the groups that are offloaded: what is worth a sentence
WORTH = 0.01  # of the activations: less is worth no sentence, however little the groups save
HALF = 0.5  # of the activations: fewer in groups are worth a sentence

# Always kept; on another device, where they take no memory of this one; and what a note says of wasted copies.
IN_ORDER = WEIGHTS | {Reason.DEVICE, Reason.SHARED}

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
CACHE = "pass use_cache=False to the model, or set model.config.use_cache = False, for training"
RETURN_LESS = (
    (r"\b(past_key_values|cache)\b", CACHE),  # the field's name before Transformers 5.24, and since
    (r"hidden_states\b", "pass output_hidden_states=False to the model if the loss does not need them"),
    (r"attentions\b", "pass output_attentions=False to the model if the loss does not need them"),
    (r"", "return only what the loss needs from forward while training"),
)
KEEP_ARGUMENTS = "inputs are freed after the call if the caller drops them; use mark_not_offload to avoid their copies"


def advise(report: Report) -> tuple[Advice, ...]:
    """Return what to change, one sentence each, about the most bytes first."""
    if not any(group.calls for group in report.groups):
        passes = "the forward pass" if report.passes == 1 else f"{report.passes} forward passes"
        run = f"No group has run in {passes} with a graph since the statistics began"
        called = "groups are modules whose forward is called"
        return (Advice(f"{run}: {called}, and of which a parameter or an input requires a gradient."),)
    found = [*_offloaded(report), *_kept(report), *_outside(report), *_not_freed(report)]
    found += [*_on_demand(report), *_stalled(report)]
    return tuple(sorted(found, key=lambda advice: (-advice.nbytes, advice))) or (_all(report),)


def _takes(report: Report, argument: str) -> bool:
    """Return whether what made the report takes an argument; all do if that is not known."""
    return report.arguments is None or argument in report.arguments


def _given(report: Report, argument: str) -> bool:
    """Return whether an argument may have been given: what is not known may."""
    return report.arguments is None or report.arguments.get(argument) not in (None, (), [])


def _literal(value: Any) -> str:
    """Return an argument as it is written in a program."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return "..." if value is ... else value.__name__ if isinstance(value, type) else repr(value).replace("'", '"')


# What takes time


def _on_demand(report: Report) -> Iterator[Advice]:
    late = [group for group in report.groups if group.reloaded_on_demand]
    if not late:
        return
    totals, names = report.totals, list(dict.fromkeys(group.name for group in late))
    count, whole = totals.reloaded_on_demand, totals.reloaded_on_demand + totals.reloaded_ahead
    why = "the execution order changed since the pass before, or backward did not run in the reverse order"
    if any(not group.calls for group in report.groups[report.groups.index(late[-1]) + 1 :]):
        why = "later groups, whose backward reloads them, did not run"
    reloads = f"{count} of {whole} reloads ({percent(count / whole)}) were on demand, when backward needed them"
    nbytes = sum(group.bytes_offloaded for group in late)
    yield Advice(f"{reloads}, for {fold_names(names)}: {why}.", nbytes)


def _stall_share(report: Report) -> float | None:
    """Return the share of the recorded step for which compute stalled; None if that is not known."""
    waited = report.totals.stall_seconds
    return None if not report.times or not report.step_seconds or waited is None else waited / report.step_seconds


def _stalled(report: Report) -> Iterator[Advice]:
    share = _stall_share(report) or 0.0
    if share <= TOLERANCE:
        return
    totals, change = report.totals, dict[str, Any]()
    worst = max(report.groups, key=lambda group: group.stall_seconds or 0.0)
    forward, backward = (milliseconds(s or 0.0) for s in (totals.forward_stall_seconds, totals.backward_stall_seconds))
    stalled = f"Compute stalled for {percent(share)} of the step ({forward} in forward, {backward} in backward)"
    longest = f"longest for copies of {worst.name} ({milliseconds(worst.stall_seconds or 0.0)})"
    do = report.next_choice.rstrip(".") or "offload fewer groups"
    if not report.next_choice and _takes(report, "num_layers"):
        offloaded = Counter(group.kind for group in report.offloaded_groups)
        number = max(offloaded.values(), default=1) - 1
        do, change = f"{do}: pass num_layers={number}", {"num_layers": number}
    yield Advice(f"{stalled}, {longest}: {do}.", totals.bytes_offloaded, **change)


# What is offloaded


def _offloaded(report: Report) -> Iterator[Advice]:
    totals = report.totals
    if not report.offloaded_groups:
        because = f"none of {len(report.groups)} groups is offloaded: the last of each kind is always kept"
        if report.because and report.times:
            because = report.because
        yield Advice(f"{because[0].upper()}{because[1:].rstrip('.')}.", totals.bytes_saved)
    elif not totals.bytes_offloaded:
        could = size(sum(group.bytes_saved for group in report.offloaded_groups))
        everything = size(sum(group.activation_bytes for group in report.offloaded_groups))
        but = f"Nothing was offloaded, although the plan offloads {report.offloaded_share} groups"
        sentence = f"{but}: {could} of {everything} of activations in these groups can be offloaded."
        yield Advice(sentence, report.activation_bytes)


# What is kept


def _kept(report: Report) -> Iterator[Advice]:
    """Advise on what the groups that are offloaded keep, and on what `keep` names, wherever it lies."""
    groups = report.offloaded_groups
    everything = sum(group.activation_bytes for group in groups)
    inside = add_amounts(group.kept for group in groups)
    kept = {reason: (amount, everything) for reason, amount in inside.items() if reason not in IN_ORDER}
    if groups and Reason.KEPT in report.kept:
        kept[Reason.KEPT] = report.kept[Reason.KEPT], report.computed_bytes
    for reason, ((count, nbytes), whole) in kept.items():
        if nbytes >= max(LARGE * whole, WORTH * report.computed_bytes) or reason is Reason.HOST_FULL:
            do, change = _to_do(report, reason, count, nbytes)
            if do:
                yield Advice(f"{_amount(report, count, nbytes, reason)}: {do}.", nbytes, **change)


def _amount(report: Report, count: int, nbytes: int, reason: Reason) -> str:
    share = percent(nbytes / report.computed_bytes)
    what = f"{share} of the {report.counted} ({size(nbytes)} in {count} tensor{'s' * (count > 1)})"
    return f'{what} were kept for the reason "{reason.value}"'


def _to_do(report: Report, reason: Reason, count: int, nbytes: int) -> tuple[str, dict[str, Any]]:
    """Return what to do, and the arguments that do it; an empty text if nothing can be done."""
    if reason is Reason.SMALL and _takes(report, "min_bytes"):
        mean = max(nbytes // max(count, 1), 1)
        lower = 1 << max(mean.bit_length() - 2, 0)  # smaller ones than half the mean have less than half the bytes
        do = f"they have {size(mean)} on average; with min_bytes={lower} most of these bytes can be offloaded"
        return do, {"min_bytes": lower}
    if reason is Reason.HOST_FULL:
        if not _given(report, "max_host_bytes"):
            return "the host has no more page-locked memory; offload fewer groups, or free host memory", {}
        # More than the limit in any case, which did not allow these steps beside what is allocated.
        enough = max(report.host_bytes, report.host_bytes_high_water) + -(-nbytes // GRANULE) * GRANULE
        do = f"raise max_host_bytes to at least {enough} ({size(enough)})"
        if report.arguments is None:
            do += "; if no limit is set, the host has no more pinned memory"
        return do, {"max_host_bytes": enough}
    if reason is Reason.KEPT:
        return _to_keep_less(report)
    return DOING.get(reason, ""), {}


def _to_keep_less(report: Report) -> tuple[str, dict[str, Any]]:
    def lie_in(groups: Iterable[GroupReport]) -> list[bool]:
        names = tuple(f"{group.name.partition(' (part')[0]}." for group in groups)
        return [name.startswith(names) for name in report.kept_modules]

    arguments = report.arguments or {}
    if not _given(report, "keep"):
        return "", {}  # they are kept in any case
    if any(lie_in(report.offloaded_groups)) or not report.kept_modules:
        return "pass keep=[] to offload them", {"keep": []}
    if all(lie_in(report.groups)):
        return "", {}  # these groups are kept
    given = arguments.get("layers")
    layers = [*((...,) if given is None else given), *arguments.get("keep", ())]
    return f"pass keep=[] and layers={_literal(layers)} to offload them", {"keep": [], "layers": layers}


def _outside(report: Report) -> Iterator[Advice]:
    """Advise on what no group saves: which modules save most of it."""
    (count, nbytes), everything = (report.outside or {}).get(Reason.OUTSIDE, (0, 0)), report.computed_bytes
    if not everything or nbytes < LARGE * everything:
        if report.coverage is not None and report.coverage < HALF:
            kept = {reason: size for reason, (_, size) in (report.outside or {}).items() if reason not in IN_ORDER}
            most = max(kept, key=kept.__getitem__, default=Reason.OUTSIDE)
            lie = f"Only {percent(report.coverage)} of the {report.counted} lie in groups"
            others = f'of the others, most were kept for the reason "{most.value}"'
            yield Advice(f"{lie}; {others}.", sum(kept.values()))
        return
    do = f"record a step with {report.record} to find the modules that save them"
    if sum((modules := report.outside_modules).values()) >= HALF * nbytes:
        largest = sorted(modules, key=lambda name: (-modules[name], name))[:3]
        most_of_it = ", ".join(f"`{name}` ({size(modules[name])})" for name in largest)
        do = f"{most_of_it} save the most; choose these modules, or ones around them, with layers"
    elif report.step_passes:
        do = "they are saved in no call of a module, but by the code of the model itself"
    yield Advice(f"{_amount(report, count, nbytes, Reason.OUTSIDE)}: {do}.", nbytes)


# What is not freed


def _not_freed(report: Report) -> Iterator[Advice]:
    offloaded, unnamed = Counter[str](), Counter[str]()
    for group in report.groups:
        offloaded[group.name] += group.bytes_offloaded
        unnamed[group.name] += group.bytes_not_freed
    for held in report.held:
        unnamed[held.group] -= held.nbytes
    inputs = [held for held in report.held if held.is_input]
    others = [held for held in report.held if not held.is_input]
    found = [
        (names, nbytes, _because(report, holders, len(names)), least)
        for some, least in ((inputs, LARGE * report.activation_bytes), (others, TOLERANCE * offloaded.total()))
        for names, nbytes, holders in merge_held(some)
    ]
    rest = +unnamed  # those that are positive
    unknown = f"something that refers to them; record a step with {report.record} to find it"
    for names, nbytes, because, least in [*found, (tuple(rest), rest.total(), unknown, TOLERANCE * offloaded.total())]:
        if nbytes > least:
            whole = sum(offloaded[name] for name in names)
            groups = fold_names(names) if len(names) == 1 else f"{len(names)} groups ({fold_names(names)})"
            share = (
                f"{percent(nbytes / whole)} of the bytes of {groups} ({size(nbytes)} of {size(whole)})" if whole else ""
            )
            yield Advice(f"{share or size(nbytes)} were offloaded but not freed, because of {because}.", nbytes)


def _because(report: Report, holders: Sequence[Holder], groups: int) -> str:
    if not holders:
        return "something that Python does not see: autograd of another graph, or C++"
    words = " and ".join(map(str, holders))
    if not {holder.kind for holder in holders} <= {"input", "output"}:
        return words + (", and the same in the other groups" if groups > 1 else "")
    outputs = [holder.paths[0] for holder in holders if holder.kind == "output"]
    choices = RETURN_LESS if report.caches else RETURN_LESS[1:]
    less = (advice for name, advice in choices if outputs and re.search(name, outputs[0]))
    return f"{words}: {next(less, KEEP_ARGUMENTS)}"


# Nothing to change


def _all(report: Report) -> Advice:
    totals, everything, stalled = report.totals, report.computed_bytes, _stall_share(report)
    left, again = totals.bytes_offloaded - totals.bytes_wasted, sum(group.recomputed for group in report.groups)
    facts = (
        f"{size(left)} of {size(everything)} of {report.counted} ({percent(left / everything if everything else 0)}) "
        f"were offloaded from {report.offloaded_share} groups"
    )
    facts += f"; {again} group{'s are' if again > 1 else ' is'} recomputed" if again else ""
    facts += "" if stalled is None else f"; compute stalled for {percent(stalled)} of the step"
    return Advice(f"Nothing to change: {facts}.")
