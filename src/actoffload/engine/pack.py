"""What autograd holds in place of a saved tensor.

`[Note: in-place edits]`  With hooks installed autograd does not compare version counters, so the objects here do.  Each
holds a detached alias of its tensor, which shares the version counter but not the graph; the tensor itself would close
a cycle through its own node.  When the storage is released, the data of the alias is replaced by an empty tensor; the
counter stays shared.  A reloaded tensor has a counter of its own.  That is compared each time too, so a backward
function cannot change what it unpacked unseen by another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch.nn import Parameter

from .._torch.autograd import CASTS, saved_as_input
from .._torch.compiling import opaque
from .._torch.tensors import base_of, version_of
from ..schedule.plan import Roles
from .engine import Engine
from .layer import Layer, LivenessToken
from .ownership import stays
from .registry import StorageRegistry
from .statistics import Reason
from .storage import Moved, Owner, Resident, SavedStorage
from .subclasses import Compound, as_part, is_compound, take_apart
from .versions import Seen

STRIDED = torch.strided

__all__ = ["Kept", "Pack", "Packer", "Saved", "keep", "pack_parts"]

# A saved tensor that is kept on the device: an alias, its version, the token of its layer, and what counts it.
# A plain tuple, because most saved tensors of a model are parameters or small, and this is all that they cost.
Kept: TypeAlias = tuple[torch.Tensor, int, LivenessToken, tuple[Resident, ...]]


def keep(tensor: torch.Tensor, token: LivenessToken, residents: tuple[Resident, ...] = ()) -> Kept:
    """Hold a tensor that is kept on the device."""
    # A leaf has no node, so it can be held itself; backward then gets the parameter, not an alias.
    # Detaching a subclass runs its own code, often in Python, which takes many times as long as the rest.
    itself = tensor.is_leaf or (type(tensor) is not torch.Tensor and saved_as_input(tensor))
    alias = tensor if itself else tensor.detach()  # [keep: kept tensor]
    return alias, version_of(tensor), token, residents


Saved: TypeAlias = Kept | SavedStorage | Moved | Compound  # what autograd holds in place of a tensor
Pack: TypeAlias = Callable[[torch.Tensor], Saved]


def pack_parts(
    tensor: torch.Tensor, around: list[torch.Tensor], pack: Pack, token: LivenessToken
) -> Kept | Compound | None:
    """Take a compound tensor apart and pack each part, during which it is the last in `around`.

    Return None if it cannot be taken apart.
    """
    taken = take_apart(tensor)
    if taken is None:
        return None
    parts, build = taken
    around.append(tensor)
    try:
        saved = {name: pack(as_part(part)) for name, part in parts.items()}
    finally:
        around.pop()
    kept = [part for part in saved.values() if isinstance(part, tuple)]
    if len(kept) == len(saved) and saved_as_input(tensor):  # building it anew takes longer
        return tensor, version_of(tensor), token, tuple(resident for part in kept for resident in part[3])
    return Compound(Seen.of(tensor), tensor.size(), saved, build)


class PassState(Owner, Protocol):
    """What a `Packer` uses of a pass."""

    engine: Engine
    registry: StorageRegistry
    roles: Roles
    settled: bool


class Packer:
    """Packs what a forward saves for the layer that runs; its method `pack` is the hook.

    A whole-model pass has one for all layers, so the hook that autograd calls is the one that does the work.
    """

    def __init__(self) -> None:
        self._aside: Pack | None = _ended

    def take_for(self, owner: PassState, layer: Layer) -> None:
        """Pack for a layer of a pass from here on."""
        assert layer.token is not None
        engine, roles, index = owner.engine, owner.roles, layer.index
        limit = engine.limit()
        self._owner, self._layer, self._index = owner, layer, index
        self._around: list[torch.Tensor] = []  # the wrappers whose parts are packed now, outermost first
        self._engine, self._registry, self._roles, self._limit = engine, owner.registry, roles, limit
        self._token, self._kept, self._owned = layer.token, layer.kept, layer.owned
        self._small = layer.small
        self._smallest = limit.surely
        # After the last offloaded layer storages need not be followed, unless every step is recorded.
        self._stays_whole = index > roles.last_leaving and owner.settled and not engine.follows_all
        # By plan, each tensor is copied when it is saved: what an earlier pass saved is expected again.
        self._as_saved = layer.eager and roles.planned and index not in roles.stay
        self._aside = None

    def take_aside(self, pack: Pack) -> None:
        """Call another function for what is saved from here on."""
        self._aside = pack
        if hasattr(self, "_token"):  # not so after an interrupt between these lines
            del self._token  # a layer that has ended lives as long as its graph

    def end(self) -> None:
        """Drop the references to the pass; its forward has ended."""
        self.take_aside(_ended)
        for name in ("_owner", "_layer", "_registry"):
            if hasattr(self, name):
                delattr(self, name)

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Return what autograd holds in place of a tensor."""
        if self._aside is not None:
            return self._aside(tensor)
        # Most of them are small or parameters, and not worth a call.
        kind = type(tensor)
        if kind is Parameter:
            reason: Reason | None = Reason.PARAMETER
        elif kind is not torch.Tensor:
            reason = stays(tensor, self._engine.backend, self._owned, self._limit)
            if reason is Reason.SUBCLASS and is_compound(tensor):
                packed = pack_parts(tensor, self._around, self.pack, self._token)
                if packed is not None:
                    return packed
        elif tensor.numel() < self._smallest:
            small = self._small
            small[0] += 1
            if tensor.layout is STRIDED:
                small[1] += tensor.nbytes
            return (tensor if tensor.is_leaf else tensor.detach()), version_of(tensor), self._token, ()
        elif type(base_of(tensor)) is Parameter:  # a transposed weight
            reason = Reason.PARAMETER
        elif self._stays_whole or self._around:
            reason = stays(tensor, self._engine.backend, self._owned, self._limit)
        else:
            place = self._layer.next_place()
            known = self._layer.layouts.get(place) if self._as_saved and not self._engine.follows_all else None
            saved = self._registry.save_as_before(self._layer, tensor, known, self._owner, self._as_saved)
            if saved is not None:
                return saved
            reason = stays(tensor, self._engine.backend, self._owned, self._limit)
            if reason is None:
                return self._save(tensor, place)
        if reason is None:
            if self._stays_whole:
                resident = self._registry.resident(self._layer, tensor)
                if resident is not None:
                    return keep(tensor, self._token, (resident,))
            return self._save(tensor, None)
        count = self._kept.get(reason)
        if count is None:
            count = self._kept[reason] = [0, 0]
        count[0] += 1
        if tensor.layout is STRIDED:
            count[1] += tensor.nbytes
        return keep(tensor, self._token)

    def _save(self, tensor: torch.Tensor, place: int | None) -> Saved:
        wrappers = tuple(map(Seen.of, self._around))
        storage, view, probe = self._registry.save(self._layer, tensor, self._roles, wrappers)
        if storage.plain is not view or wrappers:
            return Moved(self._owner, self._index, storage, view, probe, self._token)
        if place is not None and self._as_saved and not view.dtype.is_complex:
            base, layout = base_of(tensor), storage.layout
            node = tensor.grad_fn if base is None else base.grad_fn
            if tensor.requires_grad and node is not None:
                layout.node, layout.is_cast = type(node), type(node).__name__ in CASTS
                self._layer.layouts[place] = layout
        return storage.hold(self._owner, self._index, self._token)


opaque(Packer.pack)


def _ended(tensor: torch.Tensor) -> Saved:
    raise AssertionError("A tensor is saved through the hooks of a forward that has ended.")
