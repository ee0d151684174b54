"""What the groups of a pass saved and offloaded, counted when its forward ends."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.nn import Module

from .._torch import address
from ..engine.layer import Layer
from ..engine.model_pass import ModelPass
from ..engine.reload import Residency
from ..engine.statistics import Reason
from ..engine.storage import Resident
from ..engine.tensor_marks import StorageRef
from ..report.groups import GroupReport
from ..schedule.execution_order import GroupKey
from ..schedule.plan import OUTSIDE

__all__ = ["Held", "PassStatistics"]


class Held(NamedTuple):
    """Memory that was offloaded but not freed, because something else references it."""

    place: int  # position of its group in the sequence of groups
    nbytes: int
    storage: StorageRef  # keeps the address from being given to another storage
    address: int


@dataclass(frozen=True)
class PassStatistics:
    """All groups of one pass, in the order in which they ran."""

    groups: tuple[tuple[Layer, GroupReport], ...]  # its state, which backward changes, and what its forward saved
    expected_bytes: int  # that only offloaded groups saved
    freed_bytes: int  # of offloaded groups, in the forward
    outside: dict[Reason, tuple[int, int]]  # count and bytes of what was kept outside of the groups
    held: tuple[Held, ...]
    saved_outside: tuple[tuple[int, weakref.ref[Module]], ...]  # bytes and module, a storage; only while recording
    sequence: tuple[GroupKey, ...]
    as_before: bool  # whether the groups ran in the order of the pass before

    @staticmethod
    def of(done: ModelPass[GroupKey], sequence: Sequence[GroupKey], last: Sequence[GroupKey] | None) -> PassStatistics:
        """Return the statistics of a pass whose forward has just ended; `last` is the sequence of the previous pass."""
        stay, expected, freed = done.roles.stay, 0, 0
        groups, held = list[tuple[Layer, GroupReport]](), list[Held]()
        residents: set[Resident] = set()  # each counts in the first group that saved it
        with done.lock:
            for layer in done.layers:
                offloaded, sums = layer.index not in stay, Counter[str]()
                kept = {reason: (number, nbytes) for reason, (number, nbytes) in layer.kept.items()}
                for storage in layer.living():
                    if min(storage.layers) != layer.index:  # [guard: storage that several groups saved]
                        continue
                    shared = not stay.isdisjoint(storage.layers)  # [guard: storage shared with a kept group -> False]
                    sums.update(storages=1, bytes_saved=storage.nbytes, bytes_offloaded=storage.bytes_copied)
                    sums.update(bytes_wasted=storage.bytes_copied if shared else 0)
                    if offloaded:
                        expected += 0 if shared else storage.nbytes
                        freed += storage.nbytes if storage.residency is Residency.HOST else 0
                    if offloaded and (shared or storage.refused):  # [guard: reason of what an offloaded group keeps]
                        reason = Reason.SHARED if shared else Reason.HOST_FULL
                        before = kept.get(reason, (0, 0))
                        kept[reason] = before[0] + 1, before[1] + storage.nbytes
                    memory = done.registry.held_elsewhere(storage)
                    if memory is not None:
                        held.append(Held(layer.index, storage.nbytes, StorageRef(memory), address(memory)))
                for resident in filter(None, (ref() for ref in layer.residents)):
                    if resident not in residents:  # [guard: kept storage that several groups saved -> True]
                        residents.add(resident)
                        sums.update(storages=1, bytes_saved=resident.nbytes)
                        expected += resident.nbytes if offloaded else 0
                groups.append((layer, GroupReport("", "", offloaded=offloaded, kept=kept, **sums)))
            outside = ((ref(), module) for ref, module in done.saved_outside)
            saved = tuple((of.nbytes, module) for of, module in outside if of and module and OUTSIDE in of.layers)
        as_before = last is None or tuple(last) == tuple(sequence)
        return PassStatistics(
            tuple(groups), expected, freed, done.kept_outside(), tuple(held), saved, tuple(sequence), as_before
        )
