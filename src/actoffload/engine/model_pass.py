"""A pass of a model whose groups are called in an order that is not known before, with code between them.

`[Note: between the groups]`  What is saved while no group runs is kept on the device, and so is what a module named in
`keep` saves.  Its storages are followed all the same: copying them for a group would free nothing.  Inputs of a group
are an exception.  Checkpointing saves them just before the module runs (without reentrant autograd) or just after
(with it), and they are all that a checkpointed group saves.  So what was saved between two groups, and is an input of
the group that starts, is offloaded with that group.  What is saved after groups that built no graph, and was an input
of one of them, is offloaded with the last of them: a checkpointed region may hold several groups, and backward comes
to the last one first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Generic

import torch
from torch.nn import Module

from .._torch.autograd import stands_for_another
from .._torch.compiling import opaque
from .._torch.modules import current_module
from .._torch.tensors import address
from ..schedule.execution_order import ExecutionOrder, Key
from ..schedule.plan import OUTSIDE, Roles
from .engine import Engine
from .layer import Layer, Phase
from .module_tensors import ModuleTensors
from .ownership import Limit, stays
from .pack import Pack, Saved, keep, pack_parts
from .passes import Pass
from .reload import Residency
from .statistics import Reason
from .storage import Moved, SavedStorage
from .subclasses import is_compound, plain_parts
from .tensor_marks import StorageRef
from .versions import Seen

__all__ = ["ModelPass"]


class ModelPass(Pass, Generic[Key]):
    """State of one pass through a model; `roles_of` returns what the plan for a sequence of groups means."""

    def __init__(
        self,
        engine: Engine,
        order: ExecutionOrder[Key],
        roles_of: Callable[[tuple[Key, ...]], Roles],
        owned: ModuleTensors,
        *,
        partly: bool = False,
    ) -> None:
        self._roles_of = roles_of
        self._owned = owned
        self.order = order
        # What was saved between the groups, and by which module; filled while a recorder is installed.
        self.saved_outside: list[tuple[weakref.ref[SavedStorage], weakref.ref[Module] | None]] = []
        self._between = Layer(OUTSIDE, engine.backend.capturing())
        self._withheld = Layer(OUTSIDE, engine.backend.capturing())
        self.kept_outside: dict[Reason, list[int]] = {}  # count and bytes
        self.inputs: frozenset[int] = frozenset()  # addresses of the inputs of the model, which the caller may hold
        self._inputs: dict[int, StorageRef] = {}  # of the groups that built no graph, since the last that did
        self._region_saved = False  # what checkpointed them has saved them
        self.adopted = 0  # bytes saved between the groups that are offloaded with one of them
        self.partly = partly  # only what offloaded groups save is seen
        self.model: Hashable = None  # which of several models of the engine this is a pass of
        super().__init__(engine, roles_of(order.sequence))

    @property
    def open(self) -> bool:
        """Whether the next group that starts belongs to this pass, if only groups run."""
        if self.aborted or self.backward_begun or self.order.complete:
            return False
        return not self.layers or self.layers[-1].continues

    def take_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note what the model is called with."""
        self.inputs = frozenset(address(memory) for tensor in inputs for memory in _storages(tensor))

    def group_start(self, key: Key, inputs: Iterable[torch.Tensor], owned: ModuleTensors) -> Layer:
        """Begin the forward of a group, whose module is called with `inputs` and owns `owned`."""
        if not self.order.start(key):
            roles = self._roles_of(self.order.sequence)
            if roles is not self.roles:
                self.settled = False
                self.follow(roles)
        layer = self.forward_start()
        layer.owned = owned
        layer.layouts = self.engine.layouts.setdefault((self.model, key), {})
        if self.engine.recorder is not None:
            inputs = list(inputs)
            self.record_inputs(layer, inputs)
        graph = torch.is_grad_enabled()
        if graph or self._region_saved:
            self._inputs = {}
            self._region_saved = False
        if self._between.storages or self._between.residents or not graph:
            storages = [memory for tensor in inputs for memory in _storages(tensor)]
            self._adopt(layer, {address(memory) for memory in storages})
            if not graph:
                self._inputs |= {address(memory): StorageRef(memory) for memory in storages}
        return layer

    def _adopt(self, layer: Layer, addresses: set[int]) -> None:
        """Count inputs of a group that were saved before as saved by it; see [Note: between the groups]."""
        with self.lock:
            stay = [ref() for ref in self._between.residents]
            for address in addresses:
                storage, resident = self.registry.at(address), self.registry.resident_at(address)
                if (
                    storage is not None
                    and storage in self._between.living()
                    and len(storage.layers) == 1  # [guard: input of a group that another group saved]
                ):
                    storage.layers = {layer.index: storage.residency is Residency.HOST}
                    self.adopted += storage.nbytes
                    layer.storages += [ref for ref in self._between.storages if ref() is storage]
                    if layer.eager:
                        self.registry.offload(layer, storage, ended=False)
                    if layer.releasing is not None:
                        self.registry.release_earlier(layer, storage.nbytes)
                elif layer.releasing is not None and resident is not None and resident in stay:
                    self.registry.release_earlier(layer, resident.nbytes)
            self._between.residents.clear()
            self._count_between()

    def _count_between(self) -> None:
        for storage in self._between.living():
            if OUTSIDE in storage.layers:
                self._note(Reason.OUTSIDE, storage.nbytes)
        self._between.storages.clear()

    def _note(self, reason: Reason, nbytes: int) -> None:
        count = self.kept_outside.setdefault(reason, [0, 0])
        count[0] += 1
        count[1] += nbytes
        self.counters.keep(reason, nbytes)

    def forward_done(self) -> None:
        """End the forward of the model: from here on the plan is that of what really ran."""
        with self.lock:
            self._count_between()
            self._inputs = {}
            if not self.order.complete and self.order.started:
                self.follow(self._roles_of(tuple(self.order.started)))
            # A plan may release in backward, which may be captured apart from this forward; see [Note: capture].
            offloading = [layer for layer in self.layers if layer.phase is Phase.OFFLOADING]
            if offloading and self.backend.capturing():  # [guard: copies of a captured forward]
                for layer in offloading:
                    layer.release()

    def packer_outside(self, *, withheld: bool = False) -> Pack:
        """Return the pack hook for what no group saves; `withheld`: what modules save whose tensors are kept."""
        return partial(self._pack_outside, withheld, self.engine.limit(), [])

    def _pack_outside(self, withheld: bool, limit: Limit, around: list[torch.Tensor], tensor: torch.Tensor) -> Saved:
        """Pack a tensor that no group saves, a part of the wrappers `around`, outermost first."""
        layer, because = (self._withheld, Reason.KEPT) if withheld else (self._between, Reason.OUTSIDE)
        registry, token = self.registry, layer.token
        assert token is not None
        if type(tensor) is torch.Tensor and tensor.numel() < limit.surely:
            reason: Reason | None = Reason.SMALL
        else:
            reason = stays(tensor, self.backend, self._owned, limit)
            if reason is Reason.SUBCLASS and is_compound(tensor):
                packed = pack_parts(tensor, around, partial(self._pack_outside, withheld, limit, around), token)
                if packed is not None:
                    return packed
        if reason is not None:
            self._note(reason, tensor.nbytes if tensor.layout is torch.strided else 0)
            return keep(tensor, token)
        late = None if withheld else self._late(tensor)
        behind = len(self.layers) > self.roles.last_leaving and self.settled and not self.engine.follows_all
        if late is None and behind:
            known = registry.resident_at(address(tensor.untyped_storage()))
            resident = registry.resident(layer, tensor)
            if resident is not None:
                if known is None:
                    self._note(because, resident.nbytes)
                return keep(tensor, token, (resident,))
        saver, before = layer if late is None else late, len(layer.storages)
        storage, view, probe = registry.save(saver, tensor, self.roles, tuple(map(Seen.of, around)))
        if len(layer.storages) > before:
            if withheld:
                self._note(because, storage.nbytes)
            elif late is None and self.engine.follows_all:
                self.saved_outside.append((layer.storages[-1], current_module()))
        mine = token if late is None else late.revive()
        return Moved(self, saver.index, storage, view, probe, mine)

    def _late(self, tensor: torch.Tensor) -> Layer | None:
        """Return the group that has just ended, if a tensor was an input of it, or of others without a graph before."""
        ref = self._inputs.get(address(tensor.untyped_storage()))
        if ref is None or ref.expired:
            return None
        self._region_saved = True  # [guard: region that has saved its inputs]
        self.adopted += tensor.nbytes
        return self.layers[-1]


opaque(ModelPass._pack_outside)


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return where the data of an input is; nothing of one that only stands for others, as in `torch.vmap`."""
    if stands_for_another(tensor):
        return []
    return [
        part.untyped_storage()
        for part in plain_parts(tensor)
        if type(part) is torch.Tensor and part.layout is torch.strided and not part.is_nested
    ]
