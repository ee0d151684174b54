"""The unpack hook."""

from __future__ import annotations

import torch

from .._torch.compiling import NOT_COMPILED, in_compiled_backward, opaque
from .._torch.tensors import version_of
from .pack import Saved
from .versions import changed

__all__ = ["unpack"]


def unpack(saved: Saved) -> torch.Tensor:
    """Turn what autograd holds into the tensor; the unpack hook."""
    if in_compiled_backward():
        raise RuntimeError(NOT_COMPILED)
    if not isinstance(saved, tuple):
        return saved.unpack()
    alias, version = saved[:2]
    if version_of(alias) != version:  # [guard: in-place edit of a kept tensor]
        raise changed(alias, alias.size(), version)
    return alias


opaque(unpack, NOT_COMPILED)
