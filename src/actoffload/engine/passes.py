"""One pass: one forward of the model and the backward that belongs to it.

A pass belongs to its graph.  Several may be in flight, in any order; a pass whose graph is thrown away simply
ends.  Nothing here counts iterations, and nothing has to be reset.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ..device.base import Backend
from ..observe.counters import Counters, Reason
from ..schedule.plan import Do, When
from ..schedule.timeline import Kind
from . import eligibility, notes
from .eligibility import stays
from .engine import Engine
from .geometry import View
from .layer import Layer, Phase
from .marks import Mark
from .reload import reload
from .resident import Resident
from .saved import Kept, Moved, keep
from .storage import Home, SavedStorage, Where
from .transfer import HOME

__all__ = ["Pass"]


class Pass:
    """State of one pass.

    Parameters
    ----------
    engine : Engine
        What it shares with other passes.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backend: Backend = engine.backend
        self.counters: Counters = engine.counters
        self.lock = engine.lock
        self.layers: list[Layer] = []
        self.aborted = False
        self.backward_begun = False
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._residents: dict[int, weakref.ref[Resident]] = {}
        self._homes: dict[torch.device, Home] = {}
        self._stay = engine.stay
        self._planned = bool(engine.plan.steps)
        self._task = -1
        self._captured = False  # the backward that runs is captured into a graph
        self._started: set[int] = set()
        self._ended: set[int] = set()
        with engine.lock:
            engine.began(self)

    # Forward

    @property
    def open(self) -> bool:
        """Whether the next layer that starts belongs to this pass."""
        if self.aborted or self.backward_begun or len(self.layers) >= self.engine.plan.model_layers:
            return False
        return not self.layers or self.layers[-1].goes_on

    def forward_start(self) -> Layer:
        """Begin the forward of the next layer."""
        layer = Layer(len(self.layers), self.backend.capturing())
        with self.lock:
            self.layers.append(layer)
            self.aborted = True  # unless all goes well
            self._event(When.FORWARD_START, layer.index)
            self.aborted = False
        return layer

    def forward_end(self, layer: Layer) -> None:
        """End the forward of a layer."""
        with self.lock:
            self._refused(layer.end())
            for reason, (count, nbytes) in layer.kept.items():
                self.counters.keep(reason, nbytes, count)
            layer.kept.clear()
            self._finish(Kind.FORWARD, layer.index)
            self._event(When.FORWARD_END, layer.index)

    def packer(self, layer: Layer) -> Callable[[torch.Tensor], Kept | Moved]:
        """Return the pack hook of a layer: it takes each tensor that autograd saves."""
        token, backend, owned, kept, index = layer.token, self.backend, layer.owned, layer.kept, layer.index
        assert token is not None
        # Behind the last layer that leaves, storages need not be followed, unless somebody records every step.
        stays_whole = index > self.engine.last_leaving and self.engine.recorder is None
        smallest = eligibility.MIN_ELEMENTS

        def pack(tensor: torch.Tensor) -> Kept | Moved:
            if type(tensor) is torch.Tensor and tensor.numel() < smallest:  # most of them; not worth a call
                reason: Reason | None = Reason.SMALL
            else:
                reason = stays(tensor, backend, owned)
            if reason is not None:
                count = kept.get(reason)
                if count is None:
                    count = kept[reason] = [0, 0]
                count[0] += 1
                count[1] += tensor.nbytes if tensor.layout is torch.strided else 0
                return keep(tensor, token)
            if stays_whole and not self._is_followed(tensor):
                return keep(tensor, token, self._resident(layer, tensor))
            probe = tensor.detach()
            view = View.of(tensor)
            return Moved(self, index, self._save(layer, tensor, view, probe), view, probe, token)

        return pack

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a layer that leaves has saved the same storage, as it is now, and it is still on the device."""
        ref = self._storages.get(tensor.untyped_storage()._cdata)
        storage = None if ref is None else ref()
        if storage is None or storage.version != tensor._version:
            return False
        return storage.where is Where.DEVICE or storage.where is Where.LEAVING

    def _resident(self, layer: Layer, tensor: torch.Tensor) -> Resident:
        """Return what counts the storage of a tensor in a layer that stays."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        with self.lock:
            ref = self._residents.get(key)
            resident = None if ref is None else ref()
            if resident is None:
                resident = Resident(memory.nbytes(), self.counters)
                self._residents[key] = ref = weakref.ref(resident)
            if ref is not None:
                layer.residents.append(ref)
        return resident

    def _save(self, layer: Layer, tensor: torch.Tensor, view: View, probe: torch.Tensor) -> SavedStorage:
        """Return the storage of a saved tensor; it starts to leave at once if the plan says so."""
        memory = tensor.untyped_storage()
        key, version = memory._cdata, tensor._version
        device = self.backend.place(tensor)
        with self.lock:
            home = self._homes.get(device) or self._home(device, tensor.device)
            stream = self.backend.current_stream(device)
            if stream not in home.streams:
                home.streams.append(stream)
            ref = self._storages.get(key)
            storage = None if ref is None else ref()
            if ref is None or storage is None or not self._usable(storage, version, layer, view):
                storage = SavedStorage(version, memory, home, stream)
                self._storages[key] = ref = weakref.ref(storage)
            if layer.index not in storage.layers:
                layer.storages.append(ref)
                storage.layers[layer.index] = storage.where is Where.HOST
                if storage.where is Where.LEAVING and self._planned and layer.index in self._stay:
                    self.counters.keep(Reason.SHARED, storage.nbytes)
            storage.add(view, probe)
            if self.backend.checks:
                self.backend.saved(tensor, stream)
            note = notes.take_final(key, version) if notes.finals else None
            if note is not None:
                storage.ready = Mark(note.event, HOME, 0, note.captured)
                if note.whole:
                    storage.add_whole()
            elif not layer.eager and not (self._planned and layer.index in self._stay):
                storage.ready = home.transfers.mark(stream, HOME, layer.captured)
            if layer.eager and not storage.refused:
                if not storage.leave(layer.index, layer.captured, ended=False):
                    self._refused([storage])
                storage.ready = None
            if self.engine.recorder is not None:
                self.engine.recorder.level()
        return storage

    @staticmethod
    def _usable(storage: SavedStorage, version: int, layer: Layer, view: View) -> bool:
        if storage.version != version or storage.where is Where.BACK:
            return False
        # Gone from the device by the plan while somebody else still holds it: its host copy serves an
        # offloaded layer, but a layer that stays needs no copy at all.
        return storage.where is not Where.HOST or (layer.eager and storage.holds(view))

    def _refused(self, storages: list[SavedStorage]) -> None:
        for storage in storages:
            self.counters.keep(Reason.HOST_FULL, storage.nbytes)
            self.engine.warn_once(storage.refused)

    def _home(self, device: torch.device, memory_device: torch.device) -> Home:
        home = self._homes[device] = Home(self.engine.transfers(device), self.counters, memory_device, [])
        return home

    # Backward

    def fetch(self, index: int, storage: SavedStorage, view: View, probe: torch.Tensor) -> torch.Tensor:
        """Return a tensor that a layer saved, on the device; the unpack hook."""
        task = torch._C._current_graph_task_id()
        if index not in self._started or self._task != task:
            self.backward_reached(index)
        # Who looks at a node's saved tensors outside of any backward may do so inside or outside of a capture.
        captured = self._captured if task != -1 else self.backend.capturing()
        with self.lock:
            if storage.where is Where.HOST:
                reload([storage], index, on_demand=True)
            tensor = storage.fetch(view, probe, index, captured)
            if self.engine.recorder is not None:
                self.engine.recorder.level()
            return tensor

    def backward_reached(self, index: int) -> None:
        """Backward has come to the start of a layer, or uses something that it saved."""
        task = torch._C._current_graph_task_id()
        if task == -1:  # somebody looks at a node's saved tensors outside of any backward
            return
        if task == self._task and index in self._started:
            return
        with self.lock:
            if task != self._task:
                if self._task != -1:
                    self._end_backward()  # of a backward that an exception ended
                self._task = task
                self._captured = self.backend.capturing()
                self.engine.running(task, self)
                # A gradient that is taken inside a layer does not end the forward.
                self.backward_begun = self.layers[-1].phase is not Phase.FORWARD
                torch.autograd.Variable._execution_engine.queue_callback(self._callback(task))
            if index in self._started:
                return
            self._end_behind(index)
            self._started.add(index)
            self._event(When.BACKWARD_START, index)

    def _callback(self, task: int) -> Callable[[], None]:
        def ended() -> None:
            with self.lock:
                if self._task == task:
                    self._end_backward()

        return ended

    def _end_backward(self) -> None:
        """End a backward: what it reloaded and a retained graph still holds stays on the host alone."""
        for k in sorted(self._started - self._ended, reverse=True):
            self._finish(Kind.BACKWARD, k)
        # A graph that is gone will not need its layers again, and what it let in is for the part that comes next.
        retained = any(self.layers[k].living() for k in self._started)
        for layer in self.layers:
            if retained or layer.index in self._started:
                layer.evict()
        self.engine.running(self._task, None)
        self._task = -1
        self._started.clear()
        self._ended.clear()

    def _end_behind(self, index: int) -> None:
        """End the backward of every layer behind one: in a sequential model that of the next.

        A backward may also come in parts, each a call of its own; then the layers behind have ended in an
        earlier one, and hold nothing any more.
        """
        for k in range(len(self.layers) - 1, index, -1):
            layer = self.layers[k]
            if k not in self._ended and (k in self._started or layer.spent):
                self._ended.add(k)
                layer.evict()
                self._finish(Kind.BACKWARD, k)
                self._event(When.BACKWARD_END, k)

    # Events

    def _event(self, when: When, index: int) -> None:
        for action in self.engine.plan.at(when, index):
            if action.layer < len(self.layers):
                self.do(action.do, action.layer)
        recorder = self.engine.recorder
        if recorder is not None:
            recorder.level()
            if when is When.FORWARD_START:
                recorder.begin(self, Kind.FORWARD, index)
            elif when is When.BACKWARD_START:
                recorder.begin(self, Kind.BACKWARD, index)

    def do(self, action: Do, index: int) -> None:
        """Carry out one action on a layer; what does not apply any more is passed over."""
        layer = self.layers[index]
        if action is Do.OFFLOAD and layer.phase is Phase.FORWARD:
            layer.eager = True
        elif action is Do.OFFLOAD and layer.phase is Phase.SAVED:
            self._refused(layer.offload())
        elif action is Do.RELEASE and layer.phase is Phase.OFFLOADING:
            layer.release()
        elif action is Do.RELOAD and layer.phase is Phase.RELEASED:
            layer.reload()

    def _finish(self, kind: Kind, index: int) -> None:
        if self.engine.recorder is not None:
            self.engine.recorder.finish(self, kind, index)
