"""Count what a pass did, keep the latest pass and the recorded step, and build their report, with advice."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.nn import Module

from .._text import fold, fold_names, milliseconds, percent, size
from .._torch.tensors import address
from ..engine.eligibility import StorageRef
from ..engine.engine import Engine
from ..engine.host_pool import GRANULE
from ..engine.layer import Layer, Phase
from ..engine.passes import ModelPass, Pass
from ..engine.statistics import Reason, Statistics, TimelineRecorder
from ..engine.storage import Residency
from ..schedule.plan import OUTSIDE
from ..schedule.timeline import Kind, Timeline
from .holders import HeldStorage, Holder, find_all_holders, merge_held
from .plots import COMPUTE, without_stalls
from .report import GroupReport, Report, add_amounts, sum_groups

# What a pass did


class PassStatistics(NamedTuple):
    """A pass whose forward was followed as a whole, and has ended."""

    report: Report  # what the forward did, with each call of a group by itself, and without holders of what is held
    layers: tuple[Layer, ...]  # the state of each call, which backward changes
    held: tuple[tuple[int, StorageRef], ...]  # address of each storage that is held; none other gets it meanwhile

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups; those of a group that was called several times are equal."""
        return tuple(row.name for row in self.report.groups)


def count_pass(done: Pass, labels: Sequence[tuple[str, str]]) -> PassStatistics:
    """Return the statistics of a locked pass whose forward has just ended; `labels` are names and kinds of groups."""
    stay, expected, freed = done.plan.stay, 0, 0
    if done.plan.manual:
        stay = frozenset({OUTSIDE, *(layer.index for layer in done.layers if layer.phase is Phase.SAVED)})
    groups, held, memories = list[GroupReport](), list[HeldStorage](), list[tuple[int, StorageRef]]()
    for layer, (name, kind) in zip(done.layers, labels, strict=True):
        offloaded, numbers = layer.index not in stay, Counter[str]()
        kept: list[Mapping[Reason, Sequence[int]]] = [layer.kept]
        for storage in layer.living():
            first = min(storage.layers)
            if first != layer.index:  # [guard: storage that several groups saved]
                if offloaded and first in stay:
                    kept.append({Reason.SHARED: (1, storage.nbytes)})
                continue
            shared = not stay.isdisjoint(storage.layers)  # [guard: storage shared with a kept group -> False]
            numbers.update(bytes_saved=storage.nbytes, bytes_offloaded=storage.bytes_copied)
            if offloaded:
                in_backward = not done.plan.freed_later.isdisjoint(storage.layers)
                expected += 0 if shared or in_backward else storage.nbytes
                freed += storage.nbytes if storage.residency is Residency.HOST else 0
            if offloaded and (shared or storage.refused):  # [guard: reason of what an offloaded group keeps]
                kept.append({Reason.SHARED if shared else Reason.HOST_FULL: (1, storage.nbytes)})
            memory = done.registry.held_elsewhere(storage)
            if memory is not None:
                memories.append((address(memory), StorageRef(memory)))
                is_input = isinstance(done, ModelPass) and address(memory) in done.inputs
                held.append(HeldStorage(name, storage.nbytes, (INPUT,) if is_input else None))
                numbers["bytes_not_freed"] += storage.nbytes
                freed -= storage.nbytes
        if layer.recomputed is not None:
            numbers["bytes_recomputed"] = layer.remade_bytes
        more: dict[str, Any] = {**numbers, "kept": add_amounts(kept), "recomputed": layer.recomputed is not None}
        groups.append(GroupReport(name, kind, calls_offloaded=int(offloaded), **more))
    report = Report(tuple(groups), held=tuple(held), expected_bytes=expected, dropped_bytes=freed)
    if isinstance(done, ModelPass):
        report = replace(report, outside=add_amounts([done.kept_outside]))
    return PassStatistics(report, tuple(done.layers), tuple(memories))


def on_device(layer: Layer) -> int:
    """Return the bytes of what a layer saved that are on the device."""
    return sum(storage.nbytes for storage in layer.living() if storage.residency is not Residency.HOST)


# The passes of a model or of a context


@dataclass(eq=False)
class PassLog:
    """The pass to report and the recorded step; `label` returns the name and the kind of a group."""

    label: Callable[[int], tuple[str, str]]
    full: PassStatistics | None = None  # the latest pass that saved at least half as much as the largest
    recording: Recording | None = None  # the latest that has ended
    _open: Recording | None = None
    _passes: list[weakref.ref[Pass]] = field(default_factory=list)  # in flight, in the order of their forwards
    _largest: int = 0  # bytes of such a pass, saved and recomputed

    @property
    def records(self) -> bool:
        """Whether a step is being recorded."""
        return self._open is not None

    def bytes_of(self, order: Sequence[int]) -> tuple[int, ...]:
        """Return how many bytes that can be offloaded each group saved in the latest full pass; 0 if not known."""
        saved = {} if self.full is None else {row.name: row.bytes_saved for row in self.full.report.groups}
        return tuple(saved.get(self.label(key)[0], 0) for key in order)

    def forward_done(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Take the statistics of a pass of a model whose forward has ended, if it was followed as a whole."""
        self._passes = [*(ref for ref in self._passes if ref() is not None), weakref.ref(done)]
        if not done.partly:
            self._take(done, sequence)

    def forward_begins(self, current: Pass) -> None:
        """Take the statistics of a pass of a context when its backward begins, which ends its forward."""
        current.forward_ended = lambda done: self._take(done, range(len(done.layers)))

    def reset(self) -> None:
        """Compare the passes from here on with each other, and not with earlier ones."""
        self._largest = 0

    @contextmanager
    def record(self, engine: Engine, modules: Callable[[], Mapping[Module, str]] = dict) -> Iterator[Recording]:
        """Record a ``with`` block; the recording before stays if no pass ends in it."""
        recording = self._open = Recording(TimelineRecorder(engine.backend, engine.counters), modules)
        engine.record(recording.recorder)
        try:
            yield recording
            recording.recorder.level()
        finally:
            engine.record(None)
            self._open = None
            if recording.passes:
                self.recording = recording

    def waiting(self, done: Pass) -> int:
        """Return how many passes before one have a graph to which backward has not come."""
        passes = [each for ref in self._passes if (each := ref()) is not None]
        earlier = passes[: passes.index(done)] if done in passes else []
        return sum(not each.backward_begun and not all(layer.freed for layer in each.layers) for each in earlier)

    def _take(self, done: Pass, sequence: Sequence[int]) -> None:
        with done.lock:
            latest = count_pass(done, [self.label(key) for key in sequence])
        nbytes = sum(row.bytes_saved + row.bytes_recomputed for row in latest.report.groups)
        self._largest = max(nbytes, self._largest)
        if 2 * nbytes >= self._largest:
            self.full = latest
        if self._open is not None:
            self._open.note(latest)


@dataclass(eq=False)
class Recording:
    """A step that is, or was, recorded."""

    recorder: TimelineRecorder
    modules: Callable[[], Mapping[Module, str]]  # of a model, with their names
    passes: int = 0
    names: tuple[str, ...] = ()  # of the groups as they run
    held: tuple[HeldStorage, ...] = ()  # with what else references them

    def note(self, latest: PassStatistics) -> None:
        """Note the names of a pass, and what else references its memory, as long as that can be found."""
        self.passes += 1
        self.names, self.held = latest.names, latest.report.held
        if self.held:  # in few steps: the search takes a tenth of a second or more
            addresses = [address for address, _ in latest.held]
            with self.recorder.apart():
                found = find_all_holders(addresses, self.modules())
            self.held = tuple(
                replace(each, holders=found[address]) for each, address in zip(self.held, addresses, strict=True)
            )


class Offloading:
    """What handles and contexts have in common: the statistics of an engine, and the passes to report."""

    _engine: Engine
    _logs: Sequence[PassLog]

    def statistics(self) -> Statistics:
        """Return counts and bytes since offloading began or `reset_statistics` was called."""
        return self._engine.statistics()

    def reset_statistics(self) -> None:
        """Reset all counts and sums to zero, and the peaks to what is held now."""
        self._engine.reset_statistics()
        for log in self._logs:
            log.reset()

    def trim(self) -> int:
        """Free pinned host memory that no saved tensor uses now, as after a huge batch; return the bytes freed."""
        return self._engine.fit()


# The report


def build(
    latest: PassStatistics,
    statistics: Statistics,
    recording: Recording | None,
    absent: Sequence[GroupReport] = (),
    **more: Any,
) -> Report:
    """Return the report of a pass, with advice, and with the times and holders of a recorded step of the same groups.

    Groups with the same name are calls of one group, and added up.  Groups in `absent` did not run; `more` are further
    fields of `Report`.
    """
    seconds: Sequence[dict[str, float]] = [{}] * len(latest.layers)
    if recording is not None and recording.names == latest.names:
        step = recording.recorder.timeline()
        seconds = seconds_by_layer(step, len(latest.layers))
        # The end of the recording notes the resident bytes last.
        ends = step.end, *(at for at, _ in step.resident[-1:]), 0.0
        more |= {"step_seconds": max(ends), "step_passes": recording.passes}
        more["times"] = more.get("times", True) and step.source != "reference device"
    if recording is not None and recording.held == latest.report.held:
        more["held"] = recording.held
    rows = []
    for layer, row, times in zip(latest.layers, latest.report.groups, seconds, strict=False):
        known: dict[str, Any] = {"reloaded_ahead": layer.ahead, "reloaded_on_demand": layer.on_demand, **times}
        rows.append(replace(row, bytes_reloaded=layer.bytes_reloaded, **known))
    groups = [sum_groups(calls, calls[0].name) for calls in fold(rows, lambda row: row.name)]
    report = replace(latest.report, groups=(*groups, *absent), **counted(statistics), **more)
    return replace(report, advice=advise(report))


def counted(statistics: Statistics) -> dict[str, Any]:
    """Return the fields of a report that have the same names in statistics."""
    names = "passes", "peak_resident_bytes", "host_bytes", "host_bytes_high_water"
    return {name: getattr(statistics, name) for name in names}


def seconds_by_layer(timeline: Timeline, layers: int) -> list[dict[str, float]]:
    """Return the compute time of each layer without stalls, and the stalls for its copies, as fields of its group."""
    names = {Kind.FORWARD: "forward_seconds", Kind.BACKWARD: "backward_seconds", Kind.STALL: "stall_seconds"}
    spans = [span for span in without_stalls(timeline) if span.kind in COMPUTE]
    sums = [dict.fromkeys(names.values(), 0.0) for _ in range(max([layers, *(span.layer + 1 for span in spans)]))]
    for span in spans:
        sums[span.layer][names[span.kind]] += span.seconds
    return sums


# Advice

TOLERANCE = 0.005  # of the step time, or of the offloaded bytes: what is reported at all
SLOW = 0.01  # of a pass: estimates are no better
LARGE = 0.1  # of the activations, or of those in the groups that are offloaded: what is worth a sentence
INPUT = Holder("input", "", "the model")
WORTH = 0.01  # of the activations: less is worth no sentence, however little the groups save

# What to do about tensors that are kept, by reason; nothing about the other reasons.
DOING = {
    Reason.MARKED: "remove the calls of mark_not_offload to offload them",
    Reason.LEAF: "the program refers to them too, so a copy would free nothing; pass them without requires_grad if "
    "their gradients are not needed",
    Reason.SUBCLASS: "pass plain tensors to the model, as x.as_subclass(torch.Tensor), or define "
    "__tensor_flatten__ and __tensor_unflatten__, or prepare_for_saving, in their class",
    Reason.SMALL: "they have {mean} on average; with offload(model, min_bytes={half}) most of these bytes can be "
    "offloaded",
    Reason.HOST_FULL: "free host memory, or raise max_host_bytes, if it is set, to at least {enough} ({enough_size})",
    Reason.OUTSIDE: "choose the modules that save them, or ones around them, with layers",
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
    found = [*_offloading(report), *_kept(report), *_not_freed(report)]
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


def _kept(report: Report) -> Iterator[Advice]:
    """Advise on what the groups that are offloaded keep, and on what no group saves."""
    groups, whole = [group for group in report.groups if group.offloaded], report.activation_bytes
    least = max(LARGE * sum(group.activation_bytes for group in groups), WORTH * whole)
    kept, outside = add_amounts(group.kept for group in groups), (report.outside or {}).get(Reason.OUTSIDE, (0, 0))
    if outside[1] >= LARGE * whole:
        kept[Reason.OUTSIDE] = outside
    for reason, (count, nbytes) in kept.items():
        if reason in DOING and (nbytes >= least or reason in (Reason.HOST_FULL, Reason.OUTSIDE)):
            mean = max(nbytes // max(count, 1), 2)
            # More than the limit in any case, which did not allow these steps beside what is allocated.
            enough = max(report.host_bytes, report.host_bytes_high_water) + -(-nbytes // GRANULE) * GRANULE
            do = DOING[reason].format(mean=size(mean), half=mean // 2, enough=enough, enough_size=size(enough))
            share = f"{percent(nbytes / whole)} of the activations ({size(nbytes)} in {count} tensors)"
            yield nbytes, f'{share} were kept for the reason "{reason.value}": {do}.'


def _not_freed(report: Report) -> Iterator[Advice]:
    offloaded = Counter[str]()
    for group in report.groups:
        offloaded[group.name] += group.bytes_offloaded
    for names, nbytes, holders in merge_held(report.held):
        # Inputs are the caller's affair, unless they are large.
        if nbytes > (LARGE * report.activation_bytes if holders == (INPUT,) else TOLERANCE * offloaded.total()):
            whole = sum(offloaded[name] for name in names)
            groups = fold_names(names) if len(names) == 1 else f"{len(names)} groups ({fold_names(names)})"
            share = f"{percent(nbytes / whole)} of the bytes of {groups} ({size(nbytes)} of {size(whole)})"
            yield nbytes, f"{share} were offloaded but not freed, because of {_because(holders, len(names))}."


def _because(holders: Sequence[Holder] | None, groups: int) -> str:
    if holders is None:
        call = "handle.recording() or context.record_timeline()"
        return f"something that refers to them; record a step in {call} to find it"
    if not holders:
        return "something that Python does not see: autograd of another graph, a library, or C++"
    words = " and ".join(map(str, holders))
    if not {holder.kind for holder in holders} <= {"input", "output"}:
        return words + (", and the same in the other groups" if groups > 1 else "")
    outputs = [holder.path for holder in holders if holder.kind == "output"]
    less = (advice for name, advice in RETURN_LESS if outputs and re.search(name, outputs[0]))
    return f"{words}: {next(less, KEEP_ARGUMENTS)}"
