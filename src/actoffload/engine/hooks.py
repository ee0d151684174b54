"""The saved-tensor hooks: what autograd holds in place of a saved tensor.

`[Note: in-place edits]`  With hooks installed autograd does not compare version counters, so the objects here do.  Each
holds a detached alias of its tensor, which shares the version counter but not the graph; the tensor itself would close
a cycle through its own node.  When the storage is released, the data of the alias is replaced by an empty tensor; the
counter stays shared.  A reloaded tensor has a counter of its own.  That is compared each time too, so a backward
function cannot change what it unpacked unseen by another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch.nn import Parameter

from .._torch.modules import NOT_COMPILED, in_compiled_backward, opaque
from .._torch.subclasses import (
    Compound,
    Wrappers,
    as_part,
    changed,
    is_compound,
    ragged_parts,
    serves,
    take_apart,
    version_in,
)
from .._torch.tensors import address, base_of, next_node, saved_as_input, storage_behind, storage_expired, version_of
from .._warnings import explain
from ..device.base import StreamPosition
from ..schedule.plan import OUTSIDE, Plan
from .eligibility import finals, mark_kept, stays, take_final, tied
from .engine import Engine
from .layer import Kept, Layer, keep, queue_copies
from .layout import View
from .statistics import Reason
from .storage import Residency, SavedStorage
from .transfer import COMPUTE, PassDevice

# Packing

STRIDED = torch.strided
SHARERS = 2
"""Number of layers that may save a storage which is offloaded."""


class PassState(Protocol):
    """What the hooks use of a pass."""

    engine: Engine
    registry: StorageRegistry
    plan: Plan

    def layer_of(self, layer: Layer, tensor: torch.Tensor) -> Layer:
        """Return the layer that saves a tensor while `layer` is the current one."""

    def fetch(self, index: int, storage: SavedStorage, view: View, probe: torch.Tensor) -> torch.Tensor:
        """Return a tensor that a layer saved, on the device."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedView:
    """A saved tensor on a storage that may be offloaded."""

    owner: PassState  # the packer of a model drops its own reference
    index: int
    storage: SavedStorage
    view: View
    probe: torch.Tensor
    token: object
    version: int = field(init=False)

    def __post_init__(self) -> None:
        # [keep: host copy]
        # [keep: resident tensor]
        # [keep: pass of a tensor]
        self.version = version_of(self.probe)

    def unpack(self) -> torch.Tensor:
        """Return the tensor, for autograd; reload it if that has not happened yet."""
        if version_of(self.probe) != self.version:  # [guard: in-place edit of an offloaded tensor]
            raise changed(self.probe, self.view.size, self.version)
        return self.owner.fetch(self.index, self.storage, self.view, self.probe)


Saved: TypeAlias = Kept | SavedView | Compound  # what autograd holds in place of a tensor
Pack: TypeAlias = Callable[[torch.Tensor], Saved]


class Packer:
    """Packs what a forward saves for the layer that runs; its method `pack` is the hook.

    A whole-model pass has one for all layers, so the hook that autograd calls is the one that does the work.
    """

    def __init__(self) -> None:
        self._aside: Pack | None = _ended

    def take_for(self, owner: PassState, layer: Layer) -> None:
        """Pack for a layer of a pass from here on."""
        assert layer.token is not None
        engine, limit = owner.engine, owner.engine.limit()
        self._owner, self._layer = owner, layer
        self._around: list[torch.Tensor] = []  # the wrappers whose parts are packed now, outermost first
        self._engine, self._registry, self._plan, self._limit = engine, owner.registry, owner.plan, limit
        self._token, self._owned, self._small = layer.token, layer.owned, layer.small
        self._smallest = limit.surely
        self._aside = None

    def split(self) -> Packer:
        """Return another packer for the same layer."""
        other = Packer()
        other.__dict__.update(self.__dict__)
        return other

    def take_aside(self, pack: Pack) -> None:
        """Call another function for what is saved from here on."""
        self._aside = pack
        self.__dict__.pop("_token", None)  # a layer that has ended lives as long as its graph

    def end(self) -> None:
        """Drop the references to the pass; its forward has ended."""
        self.__dict__ = {"_aside": _ended}

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Return what autograd holds in place of a tensor."""
        if self._aside is not None:
            return self._aside(tensor)
        # Most of them are small or parameters, and not worth a call.
        kind = type(tensor)
        if kind is Parameter:
            reason: Reason | None = Reason.PARAMETER
        elif kind is not torch.Tensor:
            reason = tied(tensor) or Reason.SUBCLASS
            if reason is Reason.SUBCLASS and is_compound(tensor):
                packed = self._pack_parts(tensor)
                if packed is not None:
                    return packed
        elif tensor.numel() < self._smallest:
            small = self._small
            small[0] += 1
            if tensor.layout is STRIDED:
                small[1] += tensor.nbytes
            return (tensor if tensor.is_leaf else tensor.detach()), version_of(tensor), self._token
        elif type(base_of(tensor)) is Parameter:  # a transposed weight
            reason = Reason.PARAMETER
        elif self._registry.is_shared(tensor, self._layer.index) and not self._around:
            return keep(tensor, self._token)
        else:
            reason = stays(tensor, self._engine.backend, self._owned, self._limit)
        if reason is not None:
            return self.keep(tensor, reason)
        layer, wrappers = self._layer, tuple(map(version_in, self._around)) if self._around else ()
        token = self._token
        if layer.index == OUTSIDE:
            layer = self._owner.layer_of(layer, tensor)
            token = layer.revive()
        storage, view, probe = self._registry.save(layer, tensor, self._plan, wrappers)
        return SavedView(self._owner, layer.index, storage, view, probe, token)

    def keep(self, tensor: torch.Tensor, reason: Reason) -> Kept:
        """Return what autograd holds in place of a tensor that stays on the device."""
        self._layer.note(reason, tensor.nbytes if tensor.layout is STRIDED else 0)
        return keep(tensor, self._token)

    def _pack_parts(self, tensor: torch.Tensor) -> Kept | Compound | None:
        """Take a compound tensor apart and pack each part; return None if it cannot be taken apart."""
        taken = take_apart(tensor)
        if taken is None:
            return None
        for part in ragged_parts(tensor):
            mark_kept(part)
        parts, build = taken
        self._around.append(tensor)
        try:
            saved = {name: self.pack(as_part(part)) for name, part in parts.items()}
        finally:
            self._around.pop()
        if all(isinstance(part, tuple) for part in saved.values()) and saved_as_input(tensor):
            return tensor, version_of(tensor), self._token  # building it anew takes longer
        return Compound(version_in(tensor), tensor.size(), saved, build)


opaque(Packer.pack)


def _ended(tensor: torch.Tensor) -> Saved:
    raise AssertionError("A tensor is saved through the hooks of a forward that has ended.")


# The storages of a pass


class StorageRegistry:
    """The storages that the layers of a pass saved, by weak references; the lock of the engine guards it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._backend = engine.backend
        self._counters = engine.counters
        self._lock = engine.lock
        self.storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._devices: dict[torch.device, PassDevice] = {}

    def is_shared(self, tensor: torch.Tensor, index: int) -> bool:
        """Return whether a tensor that a layer saves is kept, because `SHARERS` layers before have saved its storage.

        Backward needs it from the last of these layers to the first, so its copy would free nothing: these are the
        angles of rotary embeddings, and what an encoder returns.
        """
        ref = self.storages.get(address(tensor.untyped_storage())) if tensor.layout is STRIDED else None
        storage = None if ref is None else ref()
        if storage is None or len(storage.layers) < SHARERS or index in storage.layers or index == OUTSIDE:
            return False
        if OUTSIDE not in storage.layers:
            with self._lock:
                storage.layers[OUTSIDE] = False  # no layer releases it
                if not (storage.shared or storage.pinned):
                    storage.shared = True
                    self._counters.keep(Reason.SHARED, storage.nbytes)
        return True

    def save(
        self, layer: Layer, tensor: torch.Tensor, plan: Plan, wrappers: Wrappers = ()
    ) -> tuple[SavedStorage, View, torch.Tensor]:
        """Return the storage of a tensor that a layer saves, how the tensor lies in it, and a detached alias of it.

        The copy starts at once if the plan says so.  The tensor is a part of `wrappers`.
        """
        memory, probe, view = tensor.untyped_storage(), tensor.detach(), View.of(tensor)
        key, version, index = address(memory), version_of(tensor), layer.index
        backend = self._backend
        device = backend.place(tensor)
        stays = index in plan.stay
        # [guard: tensor that its operator writes after it was saved -> True] such as the noise of `rrelu`
        is_written = tensor.requires_grad or not view.dtype.is_floating_point or layer.token is None
        with self._lock:
            if layer.waiting_bytes:  # [guard: copies of what is written by now] not of this tensor
                self._queue_waiting(layer)
            pass_device = self._devices.get(device)
            if pass_device is None:
                pass_device = PassDevice(self._engine.transfers(device), self._counters, [])
                self._devices[device] = pass_device
            stream = backend.current_stream(device)
            if stream not in pass_device.streams:
                pass_device.streams.append(stream)
            ref = self.storages.get(key)
            storage = None if ref is None else ref()
            if ref is None or storage is None or not _usable(storage, tensor, layer, view, wrappers):
                storage = SavedStorage(pass_device, stream, memory.nbytes(), version=version, memory=memory)
                self.storages[key] = ref = storage.resources
            if index not in storage.layers:
                layer.storages.append(ref)
                storage.layers[index] = storage.residency is Residency.HOST
                if len(storage.layers) > 1:
                    self._count_shared(storage, stays, plan)
            storage.add(tensor, view, probe)
            if wrappers:
                storage.wrappers = (*storage.wrappers, *(seen for seen in wrappers if seen not in storage.wrappers))
            if backend.checks:
                backend.saved(tensor, stream)
            note = take_final(key, version) if finals else None
            if note is not None:
                storage.ready = StreamPosition(note.event, COMPUTE, 0, note.captured)
                if note.whole:
                    whole = View(torch.uint8, torch.Size((storage.nbytes,)), (1,), 0, False, False)
                    storage.new = (*storage.new, whole)
            elif not layer.eager and not stays and is_written:
                storage.ready = pass_device.transfers.position(stream, COMPUTE, layer.captured)
            if layer.eager and layer.token is None:
                self.offload(layer, storage, ended=True)
            elif layer.eager:
                layer.waiting_bytes += tensor.nbytes
                if not is_written and note is None:
                    layer.unwritten_by = next_node()
                self._queue_waiting(layer)
            if self._engine.recorder is not None:
                self._engine.recorder.level(outside=index == OUTSIDE)
        return storage, view, probe

    def _queue_waiting(self, layer: Layer) -> None:
        """Queue the copies that wait, if they are enough and no operator may still write what they copy."""
        if layer.waiting_bytes < self._backend.batch or layer.unwritten_by == next_node():
            return
        layer.waiting_bytes, layer.unwritten_by = 0, -1
        self.refused(queue_copies(layer.living(), layer.index, layer.captured, ended=False))

    def _count_shared(self, storage: SavedStorage, stays: bool, plan: Plan) -> None:
        """Count a storage that a kept layer and an offloaded one have both saved."""
        if stays:
            if storage.residency is Residency.OFFLOADING and not storage.shared:
                storage.shared = True
                self._counters.keep(Reason.SHARED, storage.nbytes)
        elif storage.residency is Residency.DEVICE and not storage.pinned and not plan.stay.isdisjoint(storage.layers):
            storage.pinned = True  # [guard: copy of what a kept layer holds]
            self._counters.keep(Reason.SHARED, storage.nbytes)

    def offload(self, layer: Layer, storage: SavedStorage, *, ended: bool) -> None:
        """Queue the copies of what an offloaded layer has saved on a storage."""
        self.refused(queue_copies([storage], layer.index, layer.captured, ended=ended))
        if ended and storage.residency is Residency.OFFLOADING:
            layer.note_late_copy(storage)

    def refused(self, storages: Iterable[SavedStorage]) -> None:
        """Count storages for which there was no host memory, and warn once."""
        for storage in storages:
            self._counters.keep(Reason.HOST_FULL, storage.nbytes)
            self._engine.warn_once(storage.refused)

    def at(self, address: int) -> SavedStorage | None:
        """Return what was saved on the storage at an address, if it is still saved."""
        ref = self.storages.get(address)
        return None if ref is None else ref()

    def held_elsewhere(self, storage: SavedStorage) -> torch.UntypedStorage | None:
        """Return the memory, not to be kept, of a released storage that exists, and not because it was saved again."""
        if storage.residency is not Residency.HOST or storage_expired(storage.resources.weak):
            return None
        found = storage_behind(storage.resources.weak)
        if found is None or self.at(address(found)) is not storage:
            return None
        return found


def _usable(storage: SavedStorage, tensor: torch.Tensor, layer: Layer, view: View, wrappers: Wrappers) -> bool:
    if not storage.has_values_of(tensor):
        return False
    if storage.residency is Residency.RELOADED:  # [guard: reloaded storage that is saved again]
        return False
    if (wrappers or storage.wrappers) and not serves(storage.wrappers, wrappers):
        return False
    if storage.residency is not Residency.HOST:
        return True
    # Released by the plan while the program still holds it: its host copy serves an offloaded layer, but a layer
    # that stays needs no copy at all.
    # [guard: view that the host copy lacks]
    return layer.eager and storage.holds(view)


# Unpacking


def unpack(saved: Saved) -> torch.Tensor:
    """Turn what autograd holds into the tensor; the unpack hook."""
    if in_compiled_backward():
        raise RuntimeError(NOT_COMPILED)
    if not isinstance(saved, tuple):
        try:
            return saved.unpack()
        except torch.OutOfMemoryError as error:
            explain(error)
            raise
    alias, version, _ = saved
    if version_of(alias) != version:  # [guard: in-place edit of a kept tensor]
        raise changed(alias, alias.size(), version)
    return alias


opaque(unpack, NOT_COMPILED)
