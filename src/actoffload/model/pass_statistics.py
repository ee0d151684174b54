"""What the groups of a pass saved and offloaded, taken when its forward ends."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import Module

from .._torch import address
from ..engine.layer import Layer
from ..engine.model_pass import ModelPass
from ..engine.reload import Residency
from ..engine.statistics import Reason
from ..engine.storage import Resident
from ..engine.tensor_marks import StorageRef
from ..schedule.execution_order import GroupKey
from ..schedule.plan import OUTSIDE, Plan

__all__ = ["GroupStatistics", "Held", "PassStatistics"]


@dataclass(frozen=True)
class Held:
    """Memory that was offloaded but not freed, because something else references it.

    Parameters
    ----------
    place : int
        Position of its group in the sequence of groups.
    nbytes : int
        Size in bytes.
    storage : StorageRef
        The storage, if it still exists.
    address : int
        Its address.
    """

    place: int
    nbytes: int
    storage: StorageRef
    address: int

    @property
    def amount(self) -> tuple[int, int]:
        """Position of its group, and its size."""
        return self.place, self.nbytes


@dataclass(frozen=True)
class GroupStatistics:
    """One group in one pass.

    Parameters
    ----------
    key : GroupKey
        The group.
    layer : Layer
        Its state, which backward changes.
    offloaded : bool
        Whether the plan offloads it.
    storages, bytes_saved : int
        Number and bytes of the storages that it saved first and that can be offloaded.
    bytes_offloaded : int
        Bytes of them that were copied.
    bytes_expected : int
        Bytes of them that only offloaded groups have saved, so that all of them should be freed.
    bytes_freed : int
        Bytes of them that were freed by the end of the forward.
    bytes_wasted : int
        Bytes of them that were copied but kept, because a resident group has saved them too.
    kept : dict of Reason to (int, int)
        Count and bytes of what was kept, by reason.
    """

    key: GroupKey
    layer: Layer
    offloaded: bool
    storages: int
    bytes_saved: int
    bytes_offloaded: int
    bytes_expected: int
    bytes_freed: int
    bytes_wasted: int
    kept: dict[Reason, tuple[int, int]]


@dataclass(frozen=True)
class PassStatistics:
    """All groups of one pass, in the order in which they ran.

    Parameters
    ----------
    groups : tuple of GroupStatistics
        The groups.
    outside : dict of Reason to (int, int)
        Count and bytes of what was kept outside of the groups, by reason.
    held : tuple of Held
        Offloaded memory that was not freed.
    saved_outside : tuple of (int, weakref of torch.nn.Module)
        Bytes of each storage kept outside of the groups, and the module that saved it; only while recording.
    plan : Plan
        The plan at the end of the forward.
    sequence : tuple of GroupKey
        The groups as they ran.
    as_before : bool
        Whether they ran in the order of the pass before.
    """

    groups: tuple[GroupStatistics, ...]
    outside: dict[Reason, tuple[int, int]]
    held: tuple[Held, ...]
    saved_outside: tuple[tuple[int, weakref.ref[Module]], ...]
    plan: Plan
    sequence: tuple[GroupKey, ...]
    as_before: bool

    @staticmethod
    def of(done: ModelPass[GroupKey], sequence: Sequence[GroupKey], last: Sequence[GroupKey] | None) -> PassStatistics:
        """Return the statistics of a pass whose forward has just ended; `last` is the sequence of the previous pass."""
        stay, held, groups = done.roles.stay, list[Held](), []
        residents: set[Resident] = set()  # each counts in the first group that saved it
        with done.lock:
            for key, layer in zip(sequence, done.layers, strict=True):
                offloaded = layer.index not in stay
                count = saved = copied = expected = freed = wasted = 0
                kept = {reason: (number, nbytes) for reason, (number, nbytes) in layer.kept.items()}
                for storage in layer.living():
                    if min(storage.layers) != layer.index:  # [guard: storage that several groups saved]
                        continue
                    count += 1
                    saved += storage.nbytes
                    copied += storage.bytes_copied
                    freed += storage.nbytes if storage.residency is Residency.HOST else 0
                    shared = not stay.isdisjoint(storage.layers)  # [guard: storage shared with a kept group -> False]
                    expected += 0 if shared else storage.nbytes
                    wasted += storage.bytes_copied if shared else 0
                    if offloaded and (shared or storage.refused):  # [guard: reason of what an offloaded group keeps]
                        reason = Reason.SHARED if shared else Reason.HOST_FULL
                        before = kept.get(reason, (0, 0))
                        kept[reason] = before[0] + 1, before[1] + storage.nbytes
                    memory = done.registry.held_elsewhere(storage)
                    if memory is not None:
                        held.append(Held(layer.index, storage.nbytes, StorageRef(memory), address(memory)))
                for ref in layer.residents:
                    resident = ref()
                    # [guard: kept storage that several groups saved]
                    if resident is not None and resident not in residents:
                        residents.add(resident)
                        count += 1
                        saved += resident.nbytes
                        expected += resident.nbytes
                groups.append(
                    GroupStatistics(key, layer, offloaded, count, saved, copied, expected, freed, wasted, kept)
                )
            outside = ((ref(), module) for ref, module in done.saved_outside)
            saved_outside = tuple(
                (of.nbytes, module) for of, module in outside if of and module and OUTSIDE in of.layers
            )
        as_before = last is None or tuple(last) == tuple(sequence)
        return PassStatistics(
            tuple(groups), done.kept_outside(), tuple(held), saved_outside, done.roles.plan, tuple(sequence), as_before
        )
