"""Circumstances in which nothing of a forward can be offloaded, and what to do about them."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .engine.saved import unpack

__all__ = ["Obstacles"]

TAKEN = (
    "that already runs under saved-tensor hooks of somebody else, such as those of torch.utils.checkpoint around the "
    "whole model or torch.autograd.graph.save_on_cpu: theirs take the tensors. Put them around parts of the model."
)
OURS = (
    "that runs inside of the forward of another model, or of a layer, which actoffload offloads as well: what is "
    "outside takes the tensors. Offload one of the two only."
)
RECOMPUTED = (
    "that is computed a second time in backward, as with torch.utils.checkpoint around the whole model: there is "
    "nothing left to save. Put it around parts of the model."
)
TRANSFORMED = (
    "inside of torch.func.grad, jvp and their relatives, which do not go together with saved-tensor hooks. Use "
    "torch.func.functional_call with torch.autograd.grad or backward."
)


class Obstacles:
    """Looks for what is in the way of a forward, and tells of each kind once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def hinder(self) -> bool:
        """Return whether what this thread saves from now on would not come to hooks of ours."""
        if _transformed():
            self._tell(TRANSFORMED)
            return True
        hooks = _hooks()
        if hooks is not None:
            self._tell(OURS if hooks[1] is unpack else TAKEN)
            return True
        return False

    def recomputed(self) -> None:
        """Tell of a whole model that runs inside of a backward."""
        # The variant of checkpointing that has hooks was told of in the forward.
        if torch.is_grad_enabled() and _hooks() is None:
            self._tell(RECOMPUTED)

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            warnings.warn(f"Nothing is offloaded in a forward {why} This is said once.", UserWarning, stacklevel=7)


def _hooks() -> tuple[Any, Any] | None:
    """Return the saved-tensor hooks through which goes what this thread saves, if there are any."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def _transformed() -> bool:
    """Whether this thread is inside of a transform of functions under which autograd saves no plain tensors."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return True
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)
