"""The storages that one pass has saved, found by their address: each is one object, however many tensors view it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .._torch import address, base_of, storage_behind, storage_expired, version_of
from ..device.base import StreamPosition
from ..engine.residency import Residency
from ..schedule.plan import Roles
from . import tensor_marks
from .engine import Engine
from .layer import Layer
from .layout import View
from .pack import Moved
from .residency import Resident
from .statistics import Reason
from .storage import SavedStorage
from .transfer import HOME, Home
from .versions import Wrappers, serves, together

__all__ = ["Ledger"]


class Ledger:
    """What a pass knows of the storages that its layers saved.  It keeps none of them alive.

    Parameters
    ----------
    engine : Engine
        Whose lock guards it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._backend = engine.backend
        self._counters = engine.counters
        self._lock = engine.lock
        self.storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._residents: dict[int, weakref.ref[Resident]] = {}
        self._homes: dict[torch.device, Home] = {}

    def resident_at(self, address: int) -> Resident | None:
        """Return what counts the storage at an address, if it was saved where it stays, and still is."""
        ref = self._residents.get(address)
        return None if ref is None else ref()

    def resident(self, layer: Layer, tensor: torch.Tensor) -> Resident | None:
        """Return what counts the storage of a tensor in a layer that stays; None if one that leaves has it as well."""
        memory = tensor.untyped_storage()
        key = address(memory)
        known = self.storages.get(key)
        if known is not None and _on_device(known(), version_of(tensor)):
            return None
        with self._lock:
            ref = self._residents.get(key)
            resident = None if ref is None else ref()
            if resident is None:
                resident = Resident(memory.nbytes(), self._counters)
                self._residents[key] = ref = weakref.ref(resident)
                if layer.donor is not None:
                    self.make_room(layer, resident.nbytes)
            if ref is not None:
                layer.residents.append(ref)
        return resident

    def again(self, known: weakref.ref[SavedStorage], tensor: torch.Tensor, index: int) -> Moved | None:
        """Return what autograd holds for a tensor already, if it is the one that a layer saved first on a storage.

        That is, the storage is being copied as a whole, the tensor lies on it in the same way, and it has the same
        version counter.

        Parameters
        ----------
        known : weakref.ref of SavedStorage
            What was saved at the address of the tensor's storage.
        tensor : torch.Tensor
            A strided tensor that is saved, and no part of another.
        index : int
            Which layer saves it.
        """
        storage = known()
        if storage is None or storage.first is None:
            return None
        if tensor_marks.kept and address(tensor.untyped_storage()) in tensor_marks.kept:
            return None
        with self._lock:
            first, base = storage.first(), base_of(tensor)
            if (
                first is None
                or first.index != index
                or first.version != version_of(tensor)  # [guard: tensor edited since it was saved]
                # Views share the counter of their base.
                or storage.root() is not (tensor if base is None else base)  # [guard: other version counter]
                or storage.where is not Residency.OFFLOADING
                or storage.within
                or View.of(tensor) != first.view  # [guard: other layout]
            ):
                return None
            home, backend = storage.home, self._backend
            stream = backend.current_stream(home.transfers.device)
            if stream not in home.streams:
                home.streams.append(stream)
            if backend.checks:
                backend.saved(tensor, stream)
            return first

    def save(
        self, layer: Layer, tensor: torch.Tensor, roles: Roles, within: Wrappers = ()
    ) -> tuple[SavedStorage, View, torch.Tensor]:
        """Return the storage of a saved tensor; it starts to leave at once if the plan says so.

        Parameters
        ----------
        layer : Layer
            Who saves it.
        tensor : torch.Tensor
            What is saved.
        roles : Roles
            What the plan of the pass means for its layers.
        within : tuple of Seen
            The wrappers of which the tensor is a part.

        Returns
        -------
        storage, view, probe : SavedStorage, View and torch.Tensor
            The storage, how the tensor lies in it, and a detached alias of the tensor.
        """
        memory, probe, view = tensor.untyped_storage(), tensor.detach(), View.of(tensor)
        key, version, index = address(memory), version_of(tensor), layer.index
        backend = self._backend
        device = backend.place(tensor)
        stays = roles.planned and index in roles.stay
        with self._lock:
            home = self._homes.get(device) or self._home(device, tensor.device)
            stream = backend.current_stream(device)
            if stream not in home.streams:
                home.streams.append(stream)
            ref = self.storages.get(key)
            storage = None if ref is None else ref()
            if ref is None or storage is None or not _usable(storage, version, layer, view, within):
                storage = SavedStorage(version, memory, home, stream)
                self.storages[key] = ref = weakref.ref(storage)
                if layer.donor is not None:
                    self.make_room(layer, storage.nbytes)
            if index not in storage.layers:
                layer.storages.append(ref)
                storage.layers[index] = storage.where is Residency.HOST
                if roles.planned and len(storage.layers) > 1:
                    self._shared(storage, stays, roles)
            storage.add(tensor, view, probe)
            if within:
                storage.within = together(storage.within, within)
            if backend.checks:
                backend.saved(tensor, stream)
            note = tensor_marks.take_final(key, version) if tensor_marks.finals else None
            if note is not None:
                storage.ready = StreamPosition(note.event, HOME, 0, note.captured)
                if note.whole:
                    storage.add_whole()
            elif not layer.eager and not stays:
                storage.ready = home.transfers.mark(stream, HOME, layer.captured)
            if layer.eager and not storage.refused:
                self.leave(layer, storage, ended=layer.token is None)
            if self._engine.recorder is not None:
                self._engine.recorder.level()
        return storage, view, probe

    def make_room(self, layer: Layer, nbytes: int) -> None:
        """Let an earlier layer give way to what this one has saved now."""
        if self._engine.recorder is not None:
            self._engine.recorder.level()
        assert layer.donor is not None
        layer.donor.release_incrementally(nbytes, layer.captured)

    def _shared(self, storage: SavedStorage, stays: bool, roles: Roles) -> None:
        """Count a storage that a layer which stays and one which leaves have both saved."""
        if stays:
            if storage.where is Residency.OFFLOADING and not storage.shared:
                storage.shared = True
                self._counters.keep(Reason.SHARED, storage.nbytes)
        elif storage.where is Residency.DEVICE and not storage.pinned and not roles.stay.isdisjoint(storage.layers):
            storage.pinned = True
            self._counters.keep(Reason.SHARED, storage.nbytes)

    def leave(self, layer: Layer, storage: SavedStorage, *, ended: bool) -> None:
        """Queue the copies of what a layer that leaves saved on a storage."""
        if not storage.leave(layer.index, layer.captured, ended=ended):
            self.refused([storage])
        elif layer.releases_incrementally and storage.where is Residency.OFFLOADING and storage.left is None:
            # [guard: end of a copy released incrementally]
            storage.left = storage.home.transfers.end_of_copies_out(layer.captured)
        storage.ready = None
        if ended and storage.where is Residency.OFFLOADING:
            layer.copied_late(storage)

    def refused(self, storages: Iterable[SavedStorage]) -> None:
        """Count, and tell, that the host had no memory."""
        for storage in storages:
            self._counters.keep(Reason.HOST_FULL, storage.nbytes)
            self._engine.warn_once(storage.refused)

    def at(self, address: int) -> SavedStorage | None:
        """Return what was saved on the storage at an address, if it is still saved."""
        ref = self.storages.get(address)
        return None if ref is None else ref()

    def held_by_others(self, storage: SavedStorage) -> torch.UntypedStorage | None:
        """Return memory that a storage has given up, if it exists all the same, and not because it was saved again.

        The caller must let go of it.
        """
        if storage.where is not Residency.HOST or storage_expired(storage.weak):
            return None
        found = storage_behind(storage.weak)
        if found is None or self.at(address(found)) is not storage or self.resident_at(address(found)) is not None:
            return None
        return found

    def _home(self, device: torch.device, memory_device: torch.device) -> Home:
        home = self._homes[device] = Home(self._engine.transfers(device), self._counters, memory_device, [])
        return home


def _on_device(storage: SavedStorage | None, version: int) -> bool:
    """Whether a storage, as it is now, is still on the device."""
    if storage is None or storage.version != version:
        return False
    return storage.where is Residency.DEVICE or storage.where is Residency.OFFLOADING


def _usable(storage: SavedStorage, version: int, layer: Layer, view: View, within: Wrappers) -> bool:
    if storage.version != version:  # [guard: copy of an older version]
        return False
    if storage.where is Residency.RELOADED:  # [guard: reloaded storage that is saved again]
        return False
    if (within or storage.within) and not serves(storage.within, within):
        return False
    if storage.where is not Residency.HOST:
        return True
    # Released by the plan while the program still holds it: its host copy serves an offloaded layer, but a layer
    # that stays needs no copy at all.
    # [guard: view that the host copy lacks]
    return layer.eager and storage.holds(view)
