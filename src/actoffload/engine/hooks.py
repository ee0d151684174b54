"""The saved-tensor hooks: what autograd holds in place of a saved tensor.

`[Note: in-place edits]`  With hooks installed autograd does not compare version counters, so the objects here do.  Each
holds a detached alias of its tensor, which shares the version counter but not the graph; the tensor itself would close
a cycle through its own node.  When the storage is released, the data of the alias is replaced by an empty tensor; the
counter stays shared.  A reloaded tensor has a counter of its own.  That is compared each time too, so a backward
function cannot change what it unpacked unseen by another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.nn import Parameter

from .._torch.modules import NOT_COMPILED, in_compiled_backward, opaque
from .._torch.subclasses import Compound, as_part, changed, is_compound, ragged_parts, take_apart, version_in
from .._torch.tensors import base_of, saved_as_input, version_of
from .._warnings import explain
from ..schedule.plan import OUTSIDE
from .eligibility import mark_kept, stays, tied
from .layer import Layer, LivenessToken
from .layout import View
from .passes import Pass
from .statistics import Reason
from .storage import SavedStorage

# Packing

STRIDED = torch.strided

# A saved tensor that is kept on the device: an alias, its version, and the token of its layer.
# A plain tuple, because most saved tensors of a model are parameters or small, and this is all that they cost.
Kept: TypeAlias = tuple[torch.Tensor, int, LivenessToken]


def keep(tensor: torch.Tensor, token: LivenessToken) -> Kept:
    """Hold a tensor that is kept on the device."""
    # A leaf has no node, so it can be held itself; backward then gets the parameter, not an alias.
    # Detaching a subclass runs its own code, often in Python, which takes many times as long as the rest.
    itself = tensor.is_leaf or (type(tensor) is not torch.Tensor and saved_as_input(tensor))
    alias = tensor if itself else tensor.detach()  # [keep: kept tensor]
    return alias, version_of(tensor), token


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedView:
    """A saved tensor on a storage that may be offloaded."""

    owner: Pass  # the packer of a model drops its own reference
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
    """Packs what a forward saves for the layer that runs; its method `pack` is the hook that autograd calls."""

    def __init__(self) -> None:
        self._aside: Pack | None = _ended

    def take_for(self, owner: Pass, layer: Layer) -> None:
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
