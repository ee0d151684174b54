"""What the groups of the latest pass saved and moved: taken when its forward has ended, read when somebody asks."""

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
    """Memory that was copied and given up, and exists all the same.

    Parameters
    ----------
    place : int
        Whose it was: a position in the sequence of groups.
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
        """Whose it was, and its size."""
        return self.place, self.nbytes


@dataclass(frozen=True)
class GroupStatistics:
    """One group in one pass.

    Parameters
    ----------
    key : GroupKey
        Which one.
    layer : Layer
        Its state, which backward goes on to change.
    leaves : bool
        Whether the plan lets it leave.
    storages, bytes_saved : int
        Storages that it was the first to save, and that could leave.
    bytes_offloaded : int
        Bytes of them that were copied.
    bytes_expected : int
        Bytes of them that only groups which leave have saved, so that all of them should be gone.
    bytes_gone : int
        Bytes of them that were given up when the forward had ended.
    bytes_in_vain : int
        Bytes of them that were copied but stay, as a group that stays has saved them as well.
    kept : dict of Reason to (int, int)
        Count and bytes of what stayed.
    """

    key: GroupKey
    layer: Layer
    leaves: bool
    storages: int
    bytes_saved: int
    bytes_offloaded: int
    bytes_expected: int
    bytes_gone: int
    bytes_in_vain: int
    kept: dict[Reason, tuple[int, int]]


@dataclass(frozen=True)
class PassStatistics:
    """All groups of one pass, in the order in which they ran.

    Parameters
    ----------
    groups : tuple of GroupStatistics
        The groups.
    outside : dict of Reason to (int, int)
        Count and bytes of what stayed outside of the groups.
    held : tuple of Held
        What somebody else holds.
    savers : tuple of (int, weakref of torch.nn.Module)
        Of what stayed outside, the bytes of each storage and the module that saved it, if somebody recorded.
    plan : Plan
        What the pass followed in the end.
    sequence : tuple of GroupKey
        The groups as they ran.
    as_before : bool
        Whether they ran in the order of the pass before.
    """

    groups: tuple[GroupStatistics, ...]
    outside: dict[Reason, tuple[int, int]]
    held: tuple[Held, ...]
    savers: tuple[tuple[int, weakref.ref[Module]], ...]
    plan: Plan
    sequence: tuple[GroupKey, ...]
    as_before: bool

    @staticmethod
    def of(done: ModelPass[GroupKey], sequence: Sequence[GroupKey], last: Sequence[GroupKey] | None) -> PassStatistics:
        """Look at a pass whose forward has just ended; `last` is the sequence of the one before."""
        stay, held, groups = done.roles.stay, list[Held](), []
        residents: set[Resident] = set()  # each counts in the first group that saved it
        with done.lock:
            for key, layer in zip(sequence, done.layers, strict=True):
                leaves = layer.index not in stay
                count = saved = copied = expected = gone = in_vain = 0
                kept = {reason: (number, nbytes) for reason, (number, nbytes) in layer.kept.items()}
                for storage in layer.living():
                    if min(storage.layers) != layer.index:  # [guard: storage that several groups saved]
                        continue
                    count += 1
                    saved += storage.nbytes
                    copied += storage.bytes_copied
                    gone += storage.nbytes if storage.residency is Residency.HOST else 0
                    shared = not stay.isdisjoint(storage.layers)  # [guard: storage shared with a kept group -> False]
                    expected += 0 if shared else storage.nbytes
                    in_vain += storage.bytes_copied if shared else 0
                    if leaves and (shared or storage.refused):  # [guard: reason of what an offloaded group keeps]
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
                groups.append(GroupStatistics(key, layer, leaves, count, saved, copied, expected, gone, in_vain, kept))
            outside = ((ref(), module) for ref, module in done.savers)
            savers = tuple((of.nbytes, module) for of, module in outside if of and module and OUTSIDE in of.layers)
        as_before = last is None or tuple(last) == tuple(sequence)
        return PassStatistics(
            tuple(groups), done.kept_outside(), tuple(held), savers, done.roles.plan, tuple(sequence), as_before
        )
