"""Tensors, their storages and versions, streams of devices, and trees of tensors; autograd and its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from . import find, getter, need

address: Callable[[torch.UntypedStorage], int] = getter("UntypedStorage._cdata", id)
"""Return the address of a storage, which no other storage has while this one, or a weak reference to it, exists."""

version_of: Callable[[torch.Tensor], int] = getter("Tensor._version", lambda tensor: 0)
"""Return the version counter of a tensor: the number of in-place edits of it and of its views."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = getter("Tensor._base", lambda tensor: None)

# A weak reference to a storage keeps its address and not its memory.  It has to be freed once.
storage_weakref: Callable[[torch.UntypedStorage], Any] = need("UntypedStorage._weak_ref", lambda storage: 0)
storage_expired: Callable[[Any], bool] = need("UntypedStorage._expired", lambda ref: True)
free_storage_weakref: Callable[[Any], None] = need("UntypedStorage._free_weak_ref", lambda ref: None)
_storage_behind = find("UntypedStorage._new_with_weak_ptr", lambda ref: None)
storage_behind: Callable[[Any], torch.UntypedStorage | None] = _storage_behind  # None if the memory is freed

sleep_on_device: Callable[[int], None] = find("cuda._sleep", lambda cycles: None)
"""Keep the current stream of an NVIDIA or AMD GPU busy for some cycles of its clock; elsewhere nothing."""

negative_view: Callable[[torch.Tensor], torch.Tensor] = find("_neg_view", torch.neg)
"""Return a tensor with the opposite sign, as a view where PyTorch can."""

empty_host_cache: Callable[[], None] = find("accelerator.empty_host_cache", find("_C._host_emptyCache", lambda: None))
"""Return pinned memory that PyTorch caches to the system; public in some releases after 2.11."""

tensor_base: Any = find("_C.TensorBase", torch.Tensor)
"""The class whose descriptors read a tensor without running the code of its subclass."""

no_torch_function: Any = find("_C.DisableTorchFunctionSubclass", nullcontext)
"""Context that skips the ``__torch_function__`` of tensor subclasses."""

no_torch_dispatch: Any = find("_C._DisableTorchDispatch", nullcontext)
"""Context that skips the ``__torch_dispatch__`` of tensor subclasses."""

below_autograd: Any = find("_C._AutoDispatchBelowAutograd", torch.no_grad)
"""Context in which operators run below autograd."""

no_autocast: Any = find("_C._DisableAutocast", nullcontext)
"""Context in which autocast is off, whatever the device."""


def leaves(tree: Any, kind: type = torch.Tensor) -> Iterator[Any]:
    """Yield the objects of a class in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(tree, kind):
        yield tree
        return
    parts: Any = ()
    if isinstance(tree, Mapping):
        parts = tree.values()
    elif isinstance(tree, (list, tuple)):
        parts = tree
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = (getattr(tree, each.name) for each in fields(tree))
    for part in parts:
        yield from leaves(part, kind)


def has_own_dispatch(kind: type) -> bool:
    """Return whether tensors of a class run code of their own for each operator, so that they may have no memory."""
    return getattr(kind, "__torch_dispatch__", None) is not getattr(torch.Tensor, "__torch_dispatch__", None)


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether the program has freed, by ``resize_``, the memory in which a strided tensor has its elements."""
    nbytes = tensor.untyped_storage().nbytes()
    if (nbytes >= tensor.nbytes and not tensor.storage_offset()) or not tensor.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return nbytes < (tensor.storage_offset() + last + 1) * tensor.itemsize


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def drop_data(probe: torch.Tensor) -> None:
    """Take the memory out of a detached tensor; it still shares the version counter of the original."""
    probe.data = _empty(probe.dtype, probe.device)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the version counter of another and no data, detached below the code of its subclass."""
    with no_torch_function(), no_torch_dispatch():
        alias = tensor.detach()
    if alias.layout is torch.strided:
        drop_data(alias)
    return alias


_set_versions: Callable[[Any, Any], None] | None = find("_C._autograd._unsafe_set_version_counter")


def same_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one version have one counter; False where PyTorch cannot tell."""
    if _set_versions is None:
        return False
    version = version_of(one)
    _set_versions((one,), (version + 1,))
    same = version_of(other) != version
    _set_versions((one,), (version,))
    return same


def storage_address(obj: Any) -> int:
    """Return the address of a storage or of the storage of a tensor; 0 if there is none."""
    try:
        return address(obj if type(obj) is torch.UntypedStorage else tensor_base.untyped_storage(obj))
    except Exception:  # sparse, nested, wrapped: each has an error of its own
        return 0


DispatchMode: Any = find("utils._python_dispatch.TorchDispatchMode")
"""Base class of contexts that see every operation; None where PyTorch has none."""

current_dispatch_mode: Callable[[], Any] = find("utils._python_dispatch._get_current_dispatch_mode", lambda: None)

tree_leaves: Callable[[Any], list[Any]] = find("utils._pytree.tree_leaves", lambda tree: [tree])
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = find("utils._pytree.tree_flatten", lambda tree: ([tree], None))
tree_unflatten: Callable[[Any, Any], Any] = find("utils._pytree.tree_unflatten", lambda leaves, tree: leaves[0])


current_stream: Callable[[int], Any] = find("_C._accelerator_getStream", torch.accelerator.current_stream)
"""Return the current stream of the accelerator with an index; without the checks of the public function."""

is_capturing: Callable[[], bool] = lambda: False  # noqa: E731
"""Return whether the current CUDA stream is captured into a graph.  Asks the driver; does not synchronize."""
if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    is_capturing = find("_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


# Autograd: the backward that runs, nodes, saved-tensor hooks and transforms

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
    """Return whether nodes of a class save no tensor: operators of PyTorch have an attribute for each."""
    if not _shows_saved or not node.__name__[-1:].isdigit():  # [guard: nodes that do not show what they save -> False]
        return False
    return not any(name.startswith("_raw_saved_") for name in dir(node))  # [guard: nodes that save something -> True]


def saved_as_input(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is certainly no output of the node that saves it, so that holding it is no cycle.

    Its own node saves nothing; after an in-place edit of a view, the node of the base may save the view.
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
