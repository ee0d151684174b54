"""What autograd holds in place of a saved tensor.

`[Note: in-place edits]`  With hooks installed autograd does not compare version counters any more, so the objects
here do.  Each holds a detached alias of its tensor: an alias shares the version counter, but not the graph (the
tensor itself would close a cycle through its own node).  When the memory leaves the device the alias is hollowed
out, its data replaced by an empty tensor; the counter stays shared.  What comes back shares one counter too, which is
compared each time, so that a backward function which changes what it unpacked cannot change it for others unseen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from .dynamo import opaque
from .geometry import View
from .inplace import changed
from .storage import SavedStorage

if TYPE_CHECKING:
    from .compound import Compound
    from .layer import Token
    from .passes import Pass
    from .resident import Resident

__all__ = ["Kept", "Moved", "keep", "unpack"]


Kept: TypeAlias = tuple[torch.Tensor, int, "Token", "Resident | None"]
"""A saved tensor that stays on the device: an alias, its version, the token of its layer, and what counts it.

A plain tuple, because most saved tensors of a model are parameters or small, and this is all that they cost.
"""


def keep(tensor: torch.Tensor, token: Token, resident: Resident | None = None) -> Kept:
    """Hold a tensor that stays."""
    # A leaf has no node, so it can be held itself; what comes back is then the parameter, not an alias.
    alias = tensor if tensor.is_leaf else tensor.detach()  # [keep: kept tensor]
    return alias, tensor._version, token, resident


class Moved:
    """A saved tensor whose storage may leave the device."""

    __slots__ = ("__weakref__", "index", "owner", "probe", "storage", "token", "version", "view")

    def __init__(
        self, owner: Pass, index: int, storage: SavedStorage, view: View, probe: torch.Tensor, token: Token
    ) -> None:
        self.owner = owner  # [keep: pass of the graph]
        self.index = index
        self.storage = storage  # [keep: host copy]
        self.view = view
        self.probe = probe  # [keep: resident tensor]
        self.version = probe._version
        self.token = token

    def unpack(self) -> torch.Tensor:
        """Return the tensor, for autograd; reload it if that has not happened yet."""
        if self.probe._version != self.version:
            raise changed(self.probe, self.view.size, self.version)
        return self.owner.fetch(self.index, self.storage, self.view, self.probe)


def unpack(saved: Kept | Moved | Compound) -> torch.Tensor:
    """Turn what autograd holds back into the tensor; the unpack hook."""
    if not isinstance(saved, tuple):
        return saved.unpack()
    alias, version, _, resident = saved
    if resident is not None and resident.used is not None:
        resident.used()
    if alias._version != version:
        raise changed(alias, alias.size(), version)
    return alias


opaque(unpack)
