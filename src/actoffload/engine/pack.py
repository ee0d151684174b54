"""What autograd holds in place of a saved tensor.

`[Note: in-place edits]`  With hooks installed autograd does not compare version counters any more, so the objects
here do.  Each holds a detached alias of its tensor: an alias shares the version counter, but not the graph (the
tensor itself would close a cycle through its own node).  When the memory leaves the device the alias is hollowed
out, its data replaced by an empty tensor; the counter stays shared.  What comes back shares one counter too, which is
compared each time, so that a backward function which changes what it unpacked cannot change it for others unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import Parameter

from .._torch import address, base_of, opaque, version_of
from .layer import Layer
from .layout import View
from .ownership import stays
from .statistics import Reason
from .storage import SavedStorage
from .subclasses import Compound, is_compound
from .versions import Wrappers, changed

if TYPE_CHECKING:
    from .layer import LivenessToken
    from .passes import Pass
    from .residency import Resident
    from .subclasses import Compound

__all__ = ["Kept", "Moved", "Pack", "Packer", "keep", "unpack"]

Kept: TypeAlias = tuple[torch.Tensor, int, "LivenessToken", "Resident | None"]
"""A saved tensor that stays on the device: an alias, its version, the token of its layer, and what counts it.

A plain tuple, because most saved tensors of a model are parameters or small, and this is all that they cost.
"""


def keep(tensor: torch.Tensor, token: LivenessToken, resident: Resident | None = None) -> Kept:
    """Hold a tensor that stays."""
    # A leaf has no node, so it can be held itself; what comes back is then the parameter, not an alias.
    alias = tensor if tensor.is_leaf else tensor.detach()  # [keep: kept tensor]
    return alias, version_of(tensor), token, resident


class Moved:
    """A saved tensor whose storage may leave the device."""

    __slots__ = ("__weakref__", "index", "owner", "probe", "storage", "token", "version", "view")

    def __init__(
        self, owner: Pass, index: int, storage: SavedStorage, view: View, probe: torch.Tensor, token: LivenessToken
    ) -> None:
        self.owner = owner  # [keep: pass of the graph]
        self.index = index
        self.storage = storage  # [keep: host copy]
        self.view = view
        self.probe = probe  # [keep: resident tensor]
        self.version = version_of(probe)
        self.token = token

    def unpack(self) -> torch.Tensor:
        """Return the tensor, for autograd; reload it if that has not happened yet."""
        if version_of(self.probe) != self.version:  # [guard: in-place edit of an offloaded tensor]
            raise changed(self.probe, self.view.size, self.version)
        return self.owner.fetch(self.index, self.storage, self.view, self.probe)


def unpack(saved: Kept | Moved | Compound) -> torch.Tensor:
    """Turn what autograd holds back into the tensor; the unpack hook."""
    if not isinstance(saved, tuple):
        return saved.unpack()
    alias, version, _, resident = saved
    if resident is not None and resident.used is not None:
        resident.used()
    if version_of(alias) != version:  # [guard: in-place edit of a kept tensor]
        raise changed(alias, alias.size(), version)
    return alias


opaque(unpack)


Pack: TypeAlias = Callable[[torch.Tensor], Kept | Moved | Compound]


class Packer:
    """What is done at this moment with what a forward saves; its method `pack` is the hook.

    A pass has one for many layers, so that the hook that autograd calls is the one that does the work.
    """

    __slots__ = (
        "_aside",
        "_backend",
        "_index",
        "_kept",
        "_layer",
        "_ledger",
        "_limit",
        "_owned",
        "_owner",
        "_roles",
        "_smallest",
        "_stays_whole",
        "_token",
        "_within",
    )

    def __init__(self) -> None:
        self._aside: Pack | None = _nobody

    def take_for(self, owner: Pass, layer: Layer, within: Wrappers = ()) -> None:
        """Take what a layer of a pass saves, or the parts of what it saves `within` wrappers, from here on."""
        assert layer.token is not None
        roles, limit = owner.roles, owner.engine.limit()
        self._owner, self._layer, self._within = owner, layer, within
        self._backend, self._ledger, self._roles, self._limit = owner.backend, owner.ledger, roles, limit
        self._token, self._index, self._kept, self._owned = layer.token, layer.index, layer.kept, layer.owned
        self._smallest = limit.surely
        # Behind the last layer that leaves, storages need not be followed, unless somebody records every step.
        self._stays_whole = layer.index > roles.last_leaving and owner.settled and owner.engine.recorder is None
        self._aside = None

    def take_aside(self, pack: Pack) -> None:
        """Take nothing for the layer any more; another function takes what is saved from here on."""
        self._aside = pack
        if hasattr(self, "_token"):  # not so after an interrupt between these lines
            del self._token  # a layer that has ended lives as long as its graph

    def end(self) -> None:
        """Let go of the pass; its forward has ended."""
        self.take_aside(_nobody)
        for name in ("_owner", "_layer", "_ledger"):
            if hasattr(self, name):
                delattr(self, name)

    def pack(self, tensor: torch.Tensor) -> Kept | Moved | Compound:
        """Return what autograd holds in place of a tensor."""
        if self._aside is not None:
            return self._aside(tensor)
        # Most of them are small or parameters, and not worth a call.
        kind = type(tensor)
        if kind is Parameter:
            reason: Reason | None = Reason.PARAMETER
        elif kind is not torch.Tensor:
            reason = stays(tensor, self._backend, self._owned, self._limit)
            if reason is Reason.SUBCLASS and is_compound(tensor):
                compound = Compound.pack(tensor, self._within, self._inside)
                if compound is not None:
                    return compound
        elif tensor.numel() < self._smallest:
            reason = Reason.SMALL
        elif type(base_of(tensor)) is Parameter:  # a transposed weight
            reason = Reason.PARAMETER
        else:
            # What leaves already and is saved once more, under another name, is known by its address.
            if tensor.layout is torch.strided and not self._stays_whole:
                known = self._ledger.storages.get(address(tensor.untyped_storage()))
                if known is not None and not self._within:
                    again = self._ledger.again(known, tensor, self._index)
                    if again is not None:
                        return again
            reason = stays(tensor, self._backend, self._owned, self._limit)
        if reason is None:
            if self._stays_whole:
                resident = self._ledger.resident(self._layer, tensor)
                if resident is not None:
                    return keep(tensor, self._token, resident)
            storage, view, probe = self._ledger.save(self._layer, tensor, self._roles, self._within)
            moved = Moved(self._owner, self._index, storage, view, probe, self._token)
            if storage.plain is view:
                storage.first = weakref.ref(moved)
            return moved
        count = self._kept.get(reason)
        if count is None:
            count = self._kept[reason] = [0, 0]
        count[0] += 1
        if tensor.layout is torch.strided:
            count[1] += tensor.nbytes
        return keep(tensor, self._token)

    def _inside(self, inner: Wrappers) -> Pack:
        """Return the pack hook for the parts of a tensor."""
        packer = Packer()
        packer.take_for(self._owner, self._layer, inner)
        return packer.pack


opaque(Packer.pack)


def _nobody(tensor: torch.Tensor) -> Kept | Moved | Compound:
    raise AssertionError("A tensor is saved through the hooks of a forward that has ended.")
