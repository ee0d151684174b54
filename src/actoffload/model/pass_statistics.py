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
    """All groups of one pass, in the order in which they ran.

    Parameters
    ----------
    groups : tuple of (Layer, GroupReport)
        The state of each group, which backward changes, and what its forward saved.
    expected_bytes, freed_bytes : int
        Bytes that only offloaded groups saved, and bytes of offloaded groups that were freed in the forward.
    outside : dict of Reason to (int, int)
        Count and bytes of what was kept outside of the groups, by reason.
    held : tuple of Held
        Offloaded memory that was not freed.
    saved_outside : tuple of (int, weakref of torch.nn.Module)
        Bytes of each storage kept outside of the groups, and the module that saved it; only while recording.
    sequence : tuple of GroupKey
        The groups as they ran.
    as_before : bool
        Whether they ran in the order of the pass before.
    """

    groups: tuple[tuple[Layer, GroupReport], ...]
    expected_bytes: int
    freed_bytes: int
    outside: dict[Reason, tuple[int, int]]
    held: tuple[Held, ...]
    saved_outside: tuple[tuple[int, weakref.ref[Module]], ...]
    sequence: tuple[GroupKey, ...]
    as_before: bool

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
            refs = ((ref(), module) for ref, module in done.saved_outside)
            saved = tuple((of.nbytes, module) for of, module in refs if of and module and OUTSIDE in of.layers)
        as_before = last is None or tuple(last) == tuple(sequence)
        outside = {reason: (count, nbytes) for reason, (count, nbytes) in done.kept_outside.items()}
        return PassStatistics(tuple(groups), expected, freed, outside, tuple(held), saved, tuple(sequence), as_before)
