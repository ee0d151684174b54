"""Taking the memory out of an alias, and leaving it the version counter."""

from __future__ import annotations

import torch

__all__ = ["hollow"]

_hollow: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def hollow(probe: torch.Tensor) -> None:
    """Take the memory out of a detached tensor; it still shares the version counter of the original."""
    key = (probe.dtype, probe.device)
    empty = _hollow.get(key)
    if empty is None:
        empty = _hollow[key] = torch.empty(0, dtype=probe.dtype, device=probe.device)
    probe.data = empty
