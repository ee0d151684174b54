"""Keeping functions of ours out of what torch.compile compiles, without importing its front end.

A compiled layer saves its tensors through our hooks, and Dynamo, which looks at every Python frame while compiled
code runs, would try to compile them.  A code object can carry the wish to be left alone, together with all that it
calls; this costs nothing when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["opaque"]

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
