"""One layer in one pass: what it saved, and where its activations are; and the storages of all layers of a pass."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from .._torch.modules import NOT_COMPILED, opaque
from .._torch.subclasses import Wrappers, serves
from .._torch.tensors import address, next_node, storage_behind, storage_expired, version_of
from .._warnings import explain
from ..device.base import Stream, StreamPosition
from ..schedule.plan import OUTSIDE, Plan
from .eligibility import ModuleTensors, finals, take_final
from .engine import Engine
from .layout import View
from .statistics import Counters, Reason
from .storage import Residency, SavedStorage
from .transfer import CopyOut, PassDevice, Transfers


class Phase(enum.Enum):
    """How far a layer has come, in words that complete "layer 3 …"."""

    FORWARD = "is still in its forward"
    SAVED = "has its activations on the device"
    OFFLOADING = "is already being offloaded"
    RELEASED = "is on the host"
    RELOADING = "is already being reloaded"


@dataclass(slots=True, eq=False, weakref_slot=True)
class LivenessToken:
    """Alive as long as the graph of a layer is: held by all that autograd holds for it."""


@dataclass(slots=True, eq=False)
class _GraphEnd:
    """The hook at the end of a layer's graph, which keeps the token alive."""

    reached: Callable[[int], None]
    index: int
    token: LivenessToken

    def __call__(self, gradients: Any) -> None:
        try:
            self.reached(self.index)
        except torch.OutOfMemoryError as error:
            explain(error)
            raise


opaque(_GraphEnd.__call__, NOT_COMPILED)


class Layer:
    """State of one layer in one pass.  It knows nothing of its pass, so that no cycle keeps either alive."""

    def __init__(self, index: int, captured: bool) -> None:
        self.index = index  # in the pass, from 0
        self.captured = captured  # its forward is captured into a graph
        self.phase = Phase.FORWARD
        self.eager = False  # copy each tensor when it is saved
        self.synchronized = False
        self.on_demand = 0  # reloads that the plan did not start in time
        self.ahead = 0
        self.retained = False  # what is reloaded stays on the device when a backward of it has ended
        self.bytes_reloaded = 0
        self._grad_mode = torch.is_grad_enabled()
        self._graphless = self._returned = False
        self.owned = ModuleTensors()
        # What decides which outputs of operators are saved where it is recomputed in backward; None if it is not.
        self.recomputed: Hashable = None
        self.remade_bytes = 0  # of the values that are computed again in backward
        self.small = [0, 0]
        self.kept: dict[Reason, list[int]] = {Reason.SMALL: self.small}  # count and bytes
        self._copied_out: dict[Transfers, StreamPosition] = {}
        self.storages: list[weakref.ref[SavedStorage]] = []
        self.waiting_bytes = 0  # of tensors whose copies are queued together, see `Backend.batch`
        # One of them may still be written by its operator: the number of the autograd node behind that; or -1.
        self.unwritten_by = -1
        self.token: LivenessToken | None = LivenessToken()
        self._alive = weakref.ref(self.token)
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    def watch(self, outputs: Iterable[torch.Tensor], reached: Callable[[int], None]) -> None:
        """Tie this layer to its outputs: `reached` is called with its index when backward comes to one of them."""
        self.synchronized = True
        outputs = list(outputs)
        returned = bool(outputs)
        # A parameter has no graph, and a weak reference to it would forbid `torch.utils.swap_tensors`.
        outputs = [output for output in outputs if not isinstance(output, Parameter)]
        if self._alive() is None:
            self._graphless = not any(output.requires_grad for output in outputs)
            self._returned = returned
        hook = _GraphEnd(reached, self.index, self.revive())  # also if nothing was saved: the outputs may have a graph
        self._outputs = [weakref.ref(output) for output in outputs]
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(hook)

    @property
    def continues(self) -> bool:
        """Whether a layer that starts now can follow this one in the same forward."""
        # A layer that saved nothing and whose outputs need no gradient has no graph.
        alive = self._alive() is not None or any(ref() is not None for ref in self._outputs)
        return alive or (self._graphless and self._grad_mode == torch.is_grad_enabled())

    @property
    def no_graph(self) -> bool:
        """Whether it ran without building a graph, and was not aborted."""
        return not self._grad_mode or (self._graphless and self._returned)

    def revive(self) -> LivenessToken:
        """Return the token, or a new one if nothing holds it any more."""
        token = self._alive()
        if token is None:
            token = LivenessToken()
            self._alive = weakref.ref(token)
        return token

    def end(self) -> list[SavedStorage]:
        """End the forward; return the storages to offload for which there was no host memory."""
        self.token = None  # from here on the graph alone keeps this layer alive
        if self.phase is Phase.FORWARD:
            self.phase = Phase.SAVED
        return self.offload() if self.eager else []

    def note(self, reason: Reason, nbytes: int) -> None:
        """Count a tensor that stays on the device."""
        count = self.kept.setdefault(reason, [0, 0])
        count[0] += 1
        count[1] += nbytes

    def count_kept(self, counters: Counters) -> None:
        """Add what was kept in its forward, which has ended, to the sums of the engine."""
        self.kept.pop(Reason.SMALL, None)
        if self.small[0]:
            self.kept[Reason.SMALL] = self.small  # behind the others
        for reason, (count, nbytes) in self.kept.items():
            counters.keep(reason, nbytes, count)

    def offload(self) -> list[SavedStorage]:
        """Queue the copies of all that is saved; return the storages for which there was no host memory."""
        self.phase = Phase.OFFLOADING
        living, ends = self.living(), dict[Transfers, StreamPosition]()
        refused = queue_copies(living, self.index, self.captured, ended=True)
        for storage in living:
            if storage.residency is Residency.OFFLOADING and storage.copied_out is None:
                transfers = storage.pass_device.transfers
                # [guard: end of the copies of a layer]
                storage.copied_out = ends[transfers] = ends.get(transfers) or transfers.position(transfers.out)
        self._copied_out |= ends
        return refused

    def release(self) -> None:
        """Release the device memory that is not released yet, once the copies have ended."""
        self.phase = Phase.RELEASED
        living = self.living()
        waited: list[tuple[Transfers, Stream]] = []
        for storage in living:
            device = storage.pass_device
            position = self._copied_out.get(device.transfers)
            # [guard: wait for each device and stream]
            if position is not None and (device.transfers, storage.stream) not in waited:
                waited.append((device.transfers, storage.stream))
                # [wait: release for the copies out]
                device.transfers.join(storage.stream, device.streams, position, self.index)
            storage.release(self.index, position)
        self._copied_out.clear()

    def reload(self) -> None:
        """Queue the reloads, last saved first, as backward needs them."""
        self.phase = Phase.RELOADING
        reload(self.living()[::-1], self)

    def evict(self) -> None:
        """Drop the device memory of what a retained graph still holds; the host copies remain."""
        if self.retained:
            return
        for storage in self.living():
            if storage.residency is Residency.RELOADED and min(storage.layers) == self.index:
                storage.evict()
        if self.phase is Phase.RELOADING:
            self.phase = Phase.RELEASED

    @property
    def freed(self) -> bool:
        """Whether autograd holds no storage of this layer any more: its backward has run, or its graph is gone."""
        return not self.living()

    def living(self) -> list[SavedStorage]:
        """Return the storages that autograd still holds, in order of saving."""
        return [storage for ref in self.storages if (storage := ref()) is not None]


# Copies


def queue_copies(storages: Iterable[SavedStorage], layer: int, captured: bool, *, ended: bool) -> list[SavedStorage]:
    """Queue what is saved and not copied, in batches; return the storages for which the host has no memory."""
    without: list[SavedStorage] = []
    batch: list[tuple[SavedStorage, CopyOut]] = []
    nbytes = 0
    for storage in storages:
        if not storage.new or storage.refused or storage.pinned:
            continue
        copy = storage.prepare_copy(captured, ended=ended)
        if copy is not None:
            if batch and batch[0][0].pass_device is not storage.pass_device:
                _queue_batch(batch, layer, captured)
                batch, nbytes = [], 0
            batch.append((storage, copy))
            nbytes += storage.nbytes
            if nbytes >= storage.pass_device.transfers.backend.batch:
                _queue_batch(batch, layer, captured)
                batch, nbytes = [], 0
        else:
            without.append(storage)
    if batch:
        _queue_batch(batch, layer, captured)
    return [storage for storage in without if storage.refused]


def _queue_batch(batch: Sequence[tuple[SavedStorage, CopyOut]], layer: int, captured: bool) -> None:
    transfers = batch[0][0].pass_device.transfers
    try:
        transfers.to_host([copy for _, copy in batch], layer, captured)
    except BaseException:
        for storage, _ in batch:
            storage.copy_failed()
        raise
    for storage, copy in batch:
        storage.copy_queued(copy)


def reload(storages: Sequence[SavedStorage], layer: Layer, *, on_demand: bool = False) -> None:
    """Reload the storages that are on the host, in the given order; all memory is allocated before the first copy."""
    waiting = [storage for storage in storages if storage.residency is Residency.HOST]
    while waiting:
        device, stream = waiting[0].pass_device, waiting[0].stream
        group = [s for s in waiting if s.pass_device is device and s.stream == stream]
        # Nearly always all are of one device and stream.
        waiting = [] if len(group) == len(waiting) else [s for s in waiting if s not in group]
        _reload_group(device.transfers, stream, group, layer, on_demand)


def _reload_group(
    transfers: Transfers, stream: Stream, group: list[SavedStorage], layer: Layer, on_demand: bool
) -> None:
    backend = transfers.backend
    done, nbytes = 0, 0
    batch: list[SavedStorage] = []
    try:
        # [guard: stream of the allocation -> True]
        current = backend.current_stream(transfers.device) == stream
        with nullcontext() if current else backend.on(stream):
            for storage in group:
                storage.allocate()
        captured = backend.capturing()
        # [wait: copies in for their memory]
        transfers.begin_reload(stream)
        for storage in group:
            batch.append(storage)
            nbytes += storage.nbytes
            if nbytes >= backend.batch or storage is group[-1]:
                pairs = [pair for each in batch for pair in each.pairs_to_reload()]
                copied_in = transfers.to_device(pairs, layer.index, captured)
                for each in batch:
                    each.reload_queued(copied_in)
                    done += 1
                batch, nbytes = [], 0
    finally:
        counters, nbytes = group[0].pass_device.counters, sum(storage.bytes_copied for storage in group[:done])
        counters.bytes_reloaded += nbytes
        layer.bytes_reloaded += nbytes
        if on_demand:
            counters.reloaded_on_demand += done
            layer.on_demand += done
        else:
            counters.reloaded_ahead += done
            layer.ahead += done
        for storage in group[done:]:  # this memory has no content
            storage.evict()


# The storages of a pass

SHARERS = 2
"""Number of layers that may save a storage which is offloaded."""


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
        """Return whether a tensor is kept because `SHARERS` layers before have saved its storage.

        Backward needs it in all of these layers, so its copy would free nothing: the angles of rotary embeddings, say.
        """
        ref = self.storages.get(address(tensor.untyped_storage())) if tensor.layout is torch.strided else None
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
        """Return the storage of a tensor, its layout and an alias; the copy starts if the plan says so."""
        memory, probe, view = tensor.untyped_storage(), tensor.detach(), View.of(tensor)
        key, version, index = address(memory), version_of(tensor), layer.index
        backend = self._backend
        stays = index in plan.stay
        # [guard: tensor that its operator writes after it was saved -> True] such as the noise of `rrelu`
        is_written = tensor.requires_grad or not view.dtype.is_floating_point or layer.token is None
        with self._lock:
            if layer.waiting_bytes:  # [guard: copies of what is written by now] not of this tensor
                self._queue_waiting(layer)
            device = backend.place(tensor)
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
            note = take_final(key, version) if finals else None
            if note is not None:
                storage.ready = note.ready
                if note.whole:
                    whole = View(torch.uint8, torch.Size((storage.nbytes,)), (1,), 0, False, False)
                    storage.new = (*storage.new, whole)
            elif not layer.eager and not stays and is_written:
                storage.ready = pass_device.transfers.position(stream, layer.captured)
            if layer.phase is Phase.OFFLOADING:  # it has ended
                self.refused(layer.offload())
            elif layer.eager and layer.token is not None:
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
