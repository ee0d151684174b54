"""The storages that one pass has saved, found by their address: each is one object, however many tensors view it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ..observe.counters import Reason
from . import notes
from .engine import Engine
from .geometry import View
from .home import Home
from .layer import Layer
from .marks import Mark
from .outer import Within, serves, together
from .resident import Resident
from .roles import Roles
from .storage import SavedStorage, Where
from .transfer import HOME

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
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._residents: dict[int, weakref.ref[Resident]] = {}
        self._homes: dict[torch.device, Home] = {}

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether a layer that leaves has saved the same storage, as it is now, and it is still on the device."""
        ref = self._storages.get(tensor.untyped_storage()._cdata)
        storage = None if ref is None else ref()
        if storage is None or storage.version != tensor._version:
            return False
        return storage.where is Where.DEVICE or storage.where is Where.LEAVING

    def resident(self, layer: Layer, tensor: torch.Tensor) -> Resident:
        """Return what counts the storage of a tensor in a layer that stays."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        with self._lock:
            ref = self._residents.get(key)
            resident = None if ref is None else ref()
            if resident is None:
                resident = Resident(memory.nbytes(), self._counters)
                self._residents[key] = ref = weakref.ref(resident)
                if layer.donor is not None:
                    self._make_room(layer.donor, resident.nbytes)
            if ref is not None:
                layer.residents.append(ref)
        return resident

    def save(
        self,
        layer: Layer,
        tensor: torch.Tensor,
        view: View,
        probe: torch.Tensor,
        roles: Roles,
        within: Within = (),
    ) -> SavedStorage:
        """Return the storage of a saved tensor; it starts to leave at once if the plan says so.

        Parameters
        ----------
        layer : Layer
            Who saves it.
        tensor, view, probe : torch.Tensor, View and torch.Tensor
            What is saved, how it lies in its storage, and a detached alias.
        roles : Roles
            What the plan of the pass means for its layers.
        within : tuple of Seen
            The wrappers of which the tensor is a part.
        """
        memory = tensor.untyped_storage()
        key, version = memory._cdata, tensor._version
        device = self._backend.place(tensor)
        stays = roles.planned and layer.index in roles.stay
        with self._lock:
            home = self._homes.get(device) or self._home(device, tensor.device)
            stream = self._backend.current_stream(device)
            if stream not in home.streams:
                home.streams.append(stream)
            ref = self._storages.get(key)
            storage = None if ref is None else ref()
            if storage is not None and not within and storage.has_left_whole(layer.index, version):
                storage.add(view, probe)
                return storage
            if ref is None or storage is None or not _usable(storage, version, layer, view, within):
                storage = SavedStorage(version, memory, home, stream)
                self._storages[key] = ref = weakref.ref(storage)
                if layer.donor is not None:
                    self._make_room(layer.donor, storage.nbytes)
            if layer.index not in storage.layers:
                layer.storages.append(ref)
                storage.layers[layer.index] = storage.where is Where.HOST
                if roles.planned and len(storage.layers) > 1:
                    self._shared(storage, stays, roles)
            storage.add(view, probe)
            if within:
                storage.within = together(storage.within, within)
            if self._backend.checks:
                self._backend.saved(tensor, stream)
            note = notes.take_final(key, version) if notes.finals else None
            if note is not None:
                storage.ready = Mark(note.event, HOME, 0, note.captured)
                if note.whole:
                    storage.add_whole()
            elif not layer.eager and not stays:
                storage.ready = home.transfers.mark(stream, HOME, layer.captured)
            if layer.eager and not storage.refused:
                self.leave(layer, storage, ended=layer.token is None)
            if self._engine.recorder is not None:
                self._engine.recorder.level()
        return storage

    def _make_room(self, donor: Layer, nbytes: int) -> None:
        """Let an earlier layer give way to what was saved now."""
        if self._engine.recorder is not None:
            self._engine.recorder.level()
        donor.give_way(nbytes)

    def _shared(self, storage: SavedStorage, stays: bool, roles: Roles) -> None:
        """Count a storage that a layer which stays and one which leaves have both saved."""
        if stays:
            if storage.where is Where.LEAVING:
                self._counters.keep(Reason.SHARED, storage.nbytes)
        elif storage.where is Where.DEVICE and not storage.pinned and not roles.stay.isdisjoint(storage.layers):
            storage.pinned = True
            self._counters.keep(Reason.SHARED, storage.nbytes)

    def leave(self, layer: Layer, storage: SavedStorage, *, ended: bool) -> None:
        """Queue the copies of what a layer that leaves saved on a storage."""
        if not storage.leave(layer.index, layer.captured, ended=ended):
            self.refused([storage])
        elif layer.gives_way and storage.where is Where.LEAVING and storage.left is None:
            storage.left = storage.home.transfers.end_of_copies_out(layer.captured)
        storage.ready = None
        if ended and storage.where is Where.LEAVING:
            layer.copied_late(storage)

    def refused(self, storages: Iterable[SavedStorage]) -> None:
        """Count, and tell, that the host had no memory."""
        for storage in storages:
            self._counters.keep(Reason.HOST_FULL, storage.nbytes)
            self._engine.warn_once(storage.refused)

    def at(self, address: int) -> SavedStorage | None:
        """Return what was saved on the storage at an address, if it is still saved."""
        ref = self._storages.get(address)
        return None if ref is None else ref()

    def saved_again(self, storage: SavedStorage, address: int) -> bool:
        """Whether memory that a storage has given up was saved once more, by somebody who keeps it."""
        ref = self._residents.get(address)
        return self.at(address) is not storage or (ref is not None and ref() is not None)

    def _home(self, device: torch.device, memory_device: torch.device) -> Home:
        home = self._homes[device] = Home(self._engine.transfers(device), self._counters, memory_device, [])
        return home


def _usable(storage: SavedStorage, version: int, layer: Layer, view: View, within: Within) -> bool:
    if storage.version != version or storage.where is Where.BACK:
        return False
    if (within or storage.within) and not serves(storage.within, within):
        return False
    # Gone from the device by the plan while somebody else still holds it: its host copy serves an
    # offloaded layer, but a layer that stays needs no copy at all.
    return storage.where is not Where.HOST or (layer.eager and storage.holds(view))
