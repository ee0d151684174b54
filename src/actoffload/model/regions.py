"""Which calls of groups are recomputed in backward, and what of them is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import is_compiled
from ..engine.pack import Saved
from ..engine.unpack import unpack
from ..recompute import Reads, Region, never
from .conduct import DROPPED, Conduct, FollowedModule

__all__ = ["Regions"]


def _unpack_unless_edited(saved: Saved) -> torch.Tensor | None:
    """Return a tensor that was packed, or None if it was written to since."""
    try:
        return unpack(saved)
    except RuntimeError:
        return None


class Regions:
    """What is known of the groups among the followed modules of a model."""

    def __init__(self, modules: Sequence[FollowedModule]) -> None:
        self._modules = modules
        self._alone: dict[int, bool] = {}  # by group
        self._reads: dict[int, Reads] = {}

    def region(self, of: FollowedModule, conduct: Conduct, pack: Callable[[torch.Tensor], Any] | None) -> Region | None:
        """Return what saves in a call of a group, with `pack` or on the device; None if it is not recomputed."""
        policy = conduct.recompute.get(of.group)
        if policy is None or not self._is_alone(of):
            return None
        if policy is not never and any(map(is_compiled, of.module.modules())):
            policy = never  # compiled code is one operator
        reads = self._reads.setdefault(of.group, Reads())
        timed = conduct.operators.of(of.group, reads) if conduct.operators is not None else None
        if pack is None:
            return Region(policy, reads=reads, timed=timed)
        return Region(policy, pack, _unpack_unless_edited, reads, timed)

    def _is_alone(self, of: FollowedModule) -> bool:
        """Return whether no other module inside of a group is followed: what it saves has a place of its own."""
        if of.group not in self._alone:
            others = [each.name for each in self._modules[1:] if each.role is not DROPPED]
            self._alone[of.group] = not any(name.startswith(f"{of.name}.") for name in others)
        return self._alone[of.group]
