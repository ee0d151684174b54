"""Which module saves a tensor: the innermost one whose call is on the stack.  Asked only while a step is recorded."""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch.nn import Module

__all__ = ["module_at_work"]


def module_at_work() -> weakref.ref[Module] | None:
    """Return the innermost module whose forward runs in this thread, if any.

    Examples
    --------
    >>> from actoffload.observe.savers import module_at_work
    >>> seen = []
    >>> layer = torch.nn.Linear(2, 2)
    >>> hook = layer.register_forward_hook(lambda *_: seen.append(module_at_work()))
    >>> y = torch.nn.Sequential(layer)(torch.ones(1, 2))
    >>> seen[0]() is layer
    True
    """
    frame: FrameType | None = sys._getframe()
    call = Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is call:
            module: Module = frame.f_locals["self"]
            return weakref.ref(module)
        frame = frame.f_back
    return None
