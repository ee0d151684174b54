"""Count what a pass did, and build its report with the recorded step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.nn import Module

from .._torch.tensors import address
from ..engine.eligibility import StorageRef
from ..engine.layer import Layer, Phase
from ..engine.passes import Pass
from ..engine.statistics import Reason, Statistics
from ..engine.storage import Residency, Resident
from ..schedule.execution_order import OUTSIDE, GroupKey
from .advice import advise
from .holders import HeldStorage, Holder
from .plots import StepTimeline
from .report import Amounts, GroupReport, Report, sum_groups

__all__ = ["Held", "PassHistory", "PassStatistics", "build", "on_device"]

# What a pass did


class Held(NamedTuple):
    """Memory that was offloaded but not freed, because something else references it."""

    place: int  # position of its group in the sequence of groups
    nbytes: int
    storage: StorageRef  # keeps the address from being given to another storage
    address: int
    is_input: bool  # an input of the model, which the caller may hold


@dataclass(frozen=True)
class PassStatistics:
    """A pass whose forward has ended: all groups, in the order in which they ran, and what was saved between them."""

    groups: tuple[tuple[Layer, GroupReport], ...]  # its state, which backward changes, and what its forward saved
    expected_bytes: int  # that only offloaded groups saved, and that the plan frees in the forward
    freed_bytes: int  # of offloaded groups, in the forward
    held: tuple[Held, ...]
    later_bytes: int = 0  # that the plan frees in backward
    waiting: int = 0  # earlier passes whose backward is still to come
    # Of models only
    sequence: tuple[GroupKey, ...] = ()
    outside: Amounts | None = None  # kept outside of the groups
    saved_outside: tuple[tuple[int, weakref.ref[Module]], ...] = ()  # bytes and module, a storage; only while recording
    partly: bool = False  # groups that are kept were not followed: their bytes are those of the plan
    because: str = ""  # this pass did what it did, where that is not what the plan says

    @staticmethod
    def of(done: Pass, inputs: Collection[int] = ()) -> PassStatistics:
        """Return the statistics of a pass whose forward has just ended; `inputs` are addresses of the model's inputs.

        The caller has the lock of the pass.
        """
        stay, expected, freed, later = done.roles.stay, 0, 0, 0
        if not done.roles.planned:  # the program calls for each transfer
            stay = frozenset({OUTSIDE, *(layer.index for layer in done.layers if layer.phase is Phase.SAVED)})
        groups, held = list[tuple[Layer, GroupReport]](), list[Held]()
        residents: set[Resident] = set()  # each counts in the first group that saved it
        for layer in done.layers:
            offloaded, storages, nbytes, copied, wasted = layer.index not in stay, 0, 0, 0, 0
            kept = {reason: (count, size) for reason, (count, size) in layer.kept.items()}
            for storage in layer.living():
                if min(storage.layers) != layer.index:  # [guard: storage that several groups saved]
                    continue
                shared = not stay.isdisjoint(storage.layers)  # [guard: storage shared with a kept group -> False]
                storages += 1
                nbytes += storage.nbytes
                copied += storage.bytes_copied
                wasted += storage.bytes_copied if shared else 0
                if offloaded:
                    in_backward = not done.roles.freed_later.isdisjoint(storage.layers)
                    expected += 0 if shared or in_backward else storage.nbytes
                    later += storage.nbytes if in_backward and not shared else 0
                    freed += storage.nbytes if storage.residency is Residency.HOST else 0
                if offloaded and (shared or storage.refused):  # [guard: reason of what an offloaded group keeps]
                    reason = Reason.SHARED if shared else Reason.HOST_FULL
                    before = kept.get(reason, (0, 0))
                    kept[reason] = before[0] + 1, before[1] + storage.nbytes
                memory = done.registry.held_elsewhere(storage)
                if memory is not None:
                    at = address(memory)
                    held.append(Held(layer.index, storage.nbytes, StorageRef(memory), at, at in inputs))
            for resident in filter(None, (ref() for ref in layer.residents)):
                if resident not in residents:  # [guard: kept storage that several groups saved -> True]
                    residents.add(resident)
                    storages += 1
                    nbytes += resident.nbytes
                    expected += resident.nbytes if offloaded else 0
            row = GroupReport(
                "",
                offloaded=offloaded,
                recomputed=layer.recomputed is not None,
                storages=storages,
                bytes_saved=nbytes,
                bytes_offloaded=copied,
                bytes_wasted=wasted,
                kept=kept,
            )
            groups.append((layer, row))
        return PassStatistics(tuple(groups), expected, freed, tuple(held), later)


class PassHistory:
    """The passes in flight, referenced weakly in the order of their forwards; and what the largest pass saved."""

    def __init__(self) -> None:
        self._passes: list[weakref.ref[Pass]] = []
        self._largest: dict[Hashable, int] = {}  # bytes saved, by what was followed and how many groups were replayed

    def reset(self) -> None:
        """Forget what earlier passes saved."""
        self._largest = {}

    def is_full(self, statistics: PassStatistics) -> bool:
        """Return whether a pass saved at least half as much as the largest one, and note what it saved."""
        kind = statistics.partly, sum(row.recomputed for _, row in statistics.groups)
        saved = sum(row.bytes_saved for _, row in statistics.groups)
        largest = self._largest[kind] = max(saved, self._largest.get(kind, 0))
        return 2 * saved >= largest

    def add(self, done: Pass) -> None:
        """Add a pass."""
        self._passes = [*(ref for ref in self._passes if ref() is not None), weakref.ref(done)]

    def waiting(self, done: Pass) -> int:
        """Return how many passes before one have a graph to which backward has not come."""
        passes = [each for ref in self._passes if (each := ref()) is not None]
        earlier = passes[: passes.index(done)] if done in passes else []
        return sum(not each.backward_begun and not all(layer.freed for layer in each.layers) for each in earlier)


def on_device(layer: Layer) -> int:
    """Return the bytes of what a layer saved that are on the device."""
    storages = (storage for storage in layer.living() if storage.residency is not Residency.HOST)
    residents = {resident for ref in layer.residents if (resident := ref()) is not None}
    return sum(storage.nbytes for storage in storages) + sum(resident.nbytes for resident in residents)


# The report

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
    absent: Sequence[GroupReport] = (),
    **more: Any,
) -> Report:
    """Return the report of a pass, with advice.

    Parameters
    ----------
    names, kinds : sequence of str
        Of the groups of the pass; groups with the same name are calls of one group, and added up.
    latest, statistics : PassStatistics, Statistics
        The pass, and what the engine has counted.
    recorded : StepTimeline or None
        The recorded step of the same groups.
    holders : mapping of int to tuple of Holder, or None
        What else references memory, by address; None unless it was searched.
    absent : sequence of GroupReport
        Groups that did not run.
    **more
        Further fields of `Report`.
    """
    seconds: Sequence[dict[str, Any]] = [{} for _ in names] if recorded is None else recorded.by_layer()
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
    if recorded is not None:  # the end of the recording notes the resident bytes last
        more["step_seconds"] = max(recorded.timeline.end, *(at for at, _ in recorded.timeline.resident[-1:]), 0.0)
        more["times"] = more.get("times", True) and recorded.timeline.source != "reference device"
    report = Report(
        groups=(*groups, *absent),
        passes=statistics.passes,
        host_bytes=statistics.host_bytes,
        host_bytes_high_water=statistics.host_bytes_high_water,
        held=_held(latest, names, holders),
        expected_bytes=latest.expected_bytes,
        dropped_bytes=latest.freed_bytes - not_freed.total(),
        later_bytes=latest.later_bytes,
        waiting_passes=latest.waiting,
        outside=latest.outside,
        **{"peak_resident_bytes": statistics.peak_resident_bytes, **more},
    )
    return replace(report, advice=advise(report))


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
