"""One layer in one pass: what it saved, and how far its activations have moved."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..device.base import Stream
from ..observe.counters import Reason
from .marks import Mark
from .owned import Owned
from .reload import reload
from .resident import Resident
from .storage import SavedStorage, Where
from .transfer import Transfers

__all__ = ["Layer", "Phase", "Token"]


class Phase(enum.Enum):
    """How far a layer has come, in words that complete "layer 3 …"."""

    FORWARD = "is still in its forward"
    SAVED = "has its activations on the device"
    OFFLOADING = "is already being offloaded"
    RELEASED = "is on the host"
    RELOADING = "is already being reloaded"


class Token:
    """Alive as long as the graph of a layer is: held by all that autograd holds for it."""

    __slots__ = ("__weakref__",)


class Layer:
    """State of one layer in one pass.  It knows nothing of its pass, so that no cycle keeps either alive.

    Parameters
    ----------
    index : int
        Position in the pass, from 0.
    captured : bool
        Its forward is captured into a graph.
    """

    def __init__(self, index: int, captured: bool) -> None:
        self.index = index
        self.captured = captured
        self.phase = Phase.FORWARD
        self.eager = False  # copy each tensor when it is saved
        self.synchronized = False
        self._grad_mode = torch.is_grad_enabled()
        self._graphless = False
        self.owned = Owned()
        self.kept: dict[Reason, list[int]] = {}  # count and bytes, until the layer ends
        self._left: dict[Transfers, Mark] = {}
        self.storages: list[weakref.ref[SavedStorage]] = []
        self.residents: list[weakref.ref[Resident]] = []
        self.token: Token | None = Token()
        self._alive = weakref.ref(self.token)
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    def watch(self, outputs: Iterable[torch.Tensor], reached: Callable[[int], None]) -> None:
        """Tie this layer to its outputs: `reached` is called with its index when backward comes to one of them."""
        self.synchronized = True
        index = self.index
        outputs = list(outputs)
        token = self._alive()
        if token is None:
            self._graphless = not any(output.requires_grad for output in outputs)
            token = Token()  # nothing was saved, but the outputs may have a graph all the same
            self._alive = weakref.ref(token)

        def hook(gradients: Any, token: Token = token) -> None:
            reached(index)

        self._outputs = [weakref.ref(output) for output in outputs]
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(hook)

    @property
    def alive(self) -> bool:
        """Whether the graph of this layer, or an output of it, still exists."""
        return self._alive() is not None or any(ref() is not None for ref in self._outputs)

    @property
    def goes_on(self) -> bool:
        """Whether a layer that starts now can follow this one in the same forward.

        A layer that saved nothing and whose outputs need no gradient has no graph to tell by; what runs in the
        same grad mode simply follows it.
        """
        return self.alive or (self._graphless and self._grad_mode == torch.is_grad_enabled())

    def end(self) -> list[SavedStorage]:
        """End the forward; return the storages that should leave but found no host memory."""
        self.token = None  # from here on the graph alone keeps this layer alive
        if self.phase is Phase.FORWARD:
            self.phase = Phase.SAVED
        return self.offload() if self.eager else []

    def offload(self) -> list[SavedStorage]:
        """Queue the copies of all that is saved; return the storages that found no host memory."""
        self.phase = Phase.OFFLOADING
        living = self.living()
        refused = [s for s in living if s.incomplete and not s.leave(self.index, self.captured, ended=True)]
        for storage in living:
            if storage.where is Where.LEAVING:
                storage.left = self._left_mark(storage.home.transfers)
        return refused

    def _left_mark(self, transfers: Transfers) -> Mark:
        """Return a mark after all copies of this layer, one for each device."""
        mark = self._left.get(transfers)
        if mark is None:
            mark = self._left[transfers] = transfers.end_of_copies_out()
        return mark

    def release(self) -> None:
        """Give up the device memory, once the copies have ended."""
        self.phase = Phase.RELEASED
        living = self.living()
        waited: list[tuple[Transfers, Stream]] = []
        for storage in living:
            home = storage.home
            mark = self._left.get(home.transfers)
            if mark is not None and (home.transfers, storage.stream) not in waited:
                waited.append((home.transfers, storage.stream))
                # [wait: release for the copies out]
                home.transfers.join(storage.stream, home.streams, mark, self.index)
            storage.release(self.index)
        self._left.clear()

    def reload(self) -> None:
        """Queue the copies back, last saved first, as backward needs them."""
        self.phase = Phase.RELOADING
        reload(self.living()[::-1], self.index)

    def evict(self) -> None:
        """Backward has passed: what a retained graph still holds waits on the host for the next one."""
        for storage in self.living():
            if storage.where is Where.BACK and min(storage.layers) == self.index:
                storage.evict()
        if self.phase is Phase.RELOADING:
            self.phase = Phase.RELEASED

    @property
    def spent(self) -> bool:
        """Whether autograd holds no storage of this layer any more: its backward has run, or its graph is gone."""
        return not self.living() and all(ref() is None for ref in self.residents)

    def living(self) -> list[SavedStorage]:
        """Return the storages that autograd still holds, in order of saving."""
        found = (ref() for ref in self.storages)
        return [storage for storage in found if storage is not None]
