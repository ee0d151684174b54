"""Every private PyTorch API that we touch."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.nn import Module

__all__ = ["current_module", "opaque"]

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F, reason: str = "") -> F:
    """Let a function, and all that it calls, run as plain Python, also where compiled code calls it.

    Parameters
    ----------
    function : callable
        A Python function or lambda; closures of the same code are all meant.
    reason : str
        What Dynamo tells somebody who asked for one graph without breaks.

    Notes
    -----
    Does what `torch.compiler.disable` does, without a wrapper around each call.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


def current_module() -> weakref.ref[Module] | None:
    """Return the innermost module whose forward runs in this thread, if any.

    Examples
    --------
    >>> from actoffload._torch import current_module
    >>> seen = []
    >>> layer = torch.nn.Linear(2, 2)
    >>> hook = layer.register_forward_hook(lambda *_: seen.append(current_module()))
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
