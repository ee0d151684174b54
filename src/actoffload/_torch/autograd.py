"""Autograd: the backward that runs, nodes, saved-tensor hooks and transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from . import find, need
from .tensors import base_of

NO_BACKWARD = -1

backward_id: Callable[[], int] = need("_C._current_graph_task_id", lambda: NO_BACKWARD)
"""Return a number for the backward that runs in the calling thread, `NO_BACKWARD` outside of any."""

keeps_graph: Callable[[], bool] = find("_C._autograd._get_current_graph_task_keep_graph", lambda: True)
"""Return whether the backward that runs in the calling thread retains its graph."""

after_backward: Callable[[Callable[[], None]], None] = need(
    "autograd.Variable._execution_engine.queue_callback", lambda callback: None
)
"""Call a function when the backward that runs in the calling thread has ended."""

next_node: Callable[[], int] = find("_C._autograd._get_sequence_nr", lambda: 0)
"""Return the number of the node that the calling thread makes next."""

CASTS = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})
"""Names of the autograd nodes that cast or transpose: a weight behind one is a weight still."""

_shows_saved = find("_C._functions.ExpBackward0._raw_saved_result") is not None


@cache
def _saves_nothing(node: type) -> bool:
    """Return whether autograd nodes of a class certainly save no tensor.

    The class of an operation of PyTorch has an attribute for each tensor that it saves.  Its name ends in a number,
    unlike those of functions of programs and of C++ extensions.
    """
    if not _shows_saved or not node.__name__[-1:].isdigit():  # [guard: nodes that do not show what they save -> False]
        return False
    return not any(name.startswith("_raw_saved_") for name in dir(node))  # [guard: nodes that save something -> True]


def saved_as_input(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is saved now is certainly no output of the node that saves it.

    Holding it makes no cycle then; autograd itself holds inputs too, and detaches outputs.  Its own node saves nothing,
    so another one saves it.  After an in-place edit of a view the node of the view may save nothing; the node of the
    edit, which may save the view, is that of its base.
    """
    node = tensor.grad_fn
    if node is None or not _saves_nothing(type(node)):
        return False
    base = base_of(tensor)
    # [guard: view edited in place -> True]
    return base is None or type(base.grad_fn).__name__ != "CopySlices"


_top_hooks: Callable[[bool], tuple[Any, Any] | None] = need(
    "_C._autograd._top_saved_tensors_default_hooks", lambda ignore_tracing: None
)
_transforms = find("_C._functorch.get_interpreter_stack", lambda: None)
_vmap = find("_C._functorch.TransformType.Vmap")

saved_tensor_hooks_disabled: Callable[[], str | None] = find(
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message", lambda: None
)
"""Return why saved-tensor hooks are forbidden in the calling thread, or None."""

stands_for_another: Callable[[torch.Tensor], bool] = find(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False
)
"""Return whether a tensor is a wrapper of `torch.func`, which has no memory of its own."""


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the pack and unpack hook that are installed in the calling thread, or None."""
    return _top_hooks(True)


def in_transform(*, vmap: bool = False) -> bool:
    """Return whether the calling thread is inside of a `torch.func` transform; `torch.vmap` counts where asked for."""
    return any(vmap or level.key() != _vmap for level in _transforms() or ())


class SavedTensorHooks:
    """Saved-tensor hooks of the calling thread, whose removal may be repeated after an interrupt."""

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._hooks = saved_tensors_hooks(pack, unpack)
        self._installed = False

    def install(self) -> None:
        """Install the hooks."""
        self._hooks.__enter__()
        self._installed = True

    def remove(self) -> None:
        """Remove the hooks, and those above them whose own removal an interrupt prevented."""
        if self._installed:
            while not self._on_top() and saved_tensor_hooks() is not None:
                self._hooks.__exit__()  # removes whatever is on top
            self._installed = False
        if self._on_top():  # also if an interrupt came between the two lines of `install`
            self._hooks.__exit__()

    def suspend(self) -> bool:
        """Remove the hooks if they are on top; return whether they are removed now.  They can be installed again."""
        if self._on_top():
            self._hooks.__exit__()
            self._installed = False
        return not self._installed

    def _on_top(self) -> bool:
        top = saved_tensor_hooks()
        return top is not None and top[0] is self._hooks.pack_hook
