"""Every private PyTorch API that the package uses, each behind a feature check.

Where PyTorch lacks a name, its substitute is used.  A name without one is listed in `MISSING`; then nothing is
offloaded, and `offload` and `get_cpu_offload_context` say so.  Strings that identify autograd nodes, classes of
wrappers and functions of PyTorch are here too.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

MISSING: list[str] = []
"""Private names without a substitute that this PyTorch lacks; empty in every release that is tested."""

F = TypeVar("F", bound=Callable[..., Any])


def unsupported() -> str | None:
    """Return a sentence that says why nothing can be offloaded with this PyTorch, or None."""
    if not MISSING:
        return None
    return (
        f"Nothing is offloaded: PyTorch {torch.__version__} lacks {', '.join(MISSING)}, which actoffload needs. "
        "Training runs as without actoffload; use a release of PyTorch that actoffload supports."
    )


def _find(path: str, default: Any = None) -> Any:
    """Return what a dotted path below `torch` names, or a default."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return default


def _need(path: str, stub: Callable[..., Any]) -> Any:
    """Return what a dotted path below `torch` names; where it is missing, note that and return a stub."""
    found = _find(path)
    if found is None:
        MISSING.append(f"torch.{path}")
    return stub if found is None else found


def _getter(path: str, stub: Callable[[Any], Any]) -> Any:
    """Return a function that reads an attribute of a class; where that is missing, note that and return a stub."""
    return stub if _need(path, stub) is stub else attrgetter(path.rpartition(".")[2])


# Tensors and storages

address: Callable[[torch.UntypedStorage], int] = _getter("UntypedStorage._cdata", id)
"""Return the address of a storage, which no other storage has while this one, or a weak reference to it, exists."""

version_of: Callable[[torch.Tensor], int] = _getter("Tensor._version", lambda tensor: 0)
"""Return the version counter of a tensor: the number of in-place edits of it and of its views."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = _getter("Tensor._base", lambda tensor: None)

# A weak reference to a storage keeps its address and not its memory.  It has to be freed once.
storage_weakref: Callable[[torch.UntypedStorage], Any] = _need("UntypedStorage._weak_ref", lambda storage: 0)
storage_expired: Callable[[Any], bool] = _need("UntypedStorage._expired", lambda ref: True)
free_storage_weakref: Callable[[Any], None] = _need("UntypedStorage._free_weak_ref", lambda ref: None)
_storage_behind = _find("UntypedStorage._new_with_weak_ptr", lambda ref: None)
storage_behind: Callable[[Any], torch.UntypedStorage | None] = _storage_behind  # None if the memory is freed

storage_at: Callable[[int, torch.device, int], torch.UntypedStorage] | None = _find(
    "_C._construct_storage_from_data_pointer"
)
"""Return a storage at an address of a device, which belongs to something else; None where PyTorch cannot."""

negative_view: Callable[[torch.Tensor], torch.Tensor] = _find("_neg_view", torch.neg)
"""Return a tensor with the opposite sign, as a view where PyTorch can."""

grouped_mm: Callable[..., torch.Tensor] | None = _find("nn.functional.grouped_mm", _find("_grouped_mm"))
"""Multiply groups of rows by one matrix each; None where PyTorch cannot."""

tensor_base: Any = _find("_C.TensorBase", torch.Tensor)
"""The class whose descriptors read a tensor without running the code of its subclass."""

no_torch_function: Any = _find("_C.DisableTorchFunctionSubclass", nullcontext)
"""Context that skips the ``__torch_function__`` of tensor subclasses."""

no_torch_dispatch: Any = _find("_C._DisableTorchDispatch", nullcontext)
"""Context that skips the ``__torch_dispatch__`` of tensor subclasses."""


def storage_address(obj: Any) -> int:
    """Return the address of a storage or of the storage of a tensor; 0 if there is none."""
    try:
        return address(obj if type(obj) is torch.UntypedStorage else tensor_base.untyped_storage(obj))
    except Exception:  # sparse, nested, wrapped: each has an error of its own
        return 0


def gradient_of(tensor: Any) -> Any:
    """Return the gradient of a leaf; None if it has none."""
    try:
        leaf = tensor_base.requires_grad.__get__(tensor) and tensor_base.is_leaf.__get__(tensor)
        return tensor_base.grad.__get__(tensor) if leaf else None
    except Exception:  # half-built subclasses
        return None


DispatchMode: Any = _find("utils._python_dispatch.TorchDispatchMode")
"""Base class of contexts that see every operation; None where PyTorch has none."""

current_dispatch_mode: Callable[[], Any] = _find("utils._python_dispatch._get_current_dispatch_mode", lambda: None)

tree_leaves: Callable[[Any], list[Any]] = _find("utils._pytree.tree_leaves", lambda tree: [tree])
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _find("utils._pytree.tree_flatten", lambda tree: ([tree], None))
tree_unflatten: Callable[[Any, Any], Any] = _find("utils._pytree.tree_unflatten", lambda leaves, tree: leaves[0])


# Autograd

NO_BACKWARD = -1

backward_id: Callable[[], int] = _need("_C._current_graph_task_id", lambda: NO_BACKWARD)
"""Return a number for the backward that runs in the calling thread, `NO_BACKWARD` outside of any."""

keeps_graph: Callable[[], bool] = _find("_C._autograd._get_current_graph_task_keep_graph", lambda: True)
"""Return whether the backward that runs in the calling thread retains its graph."""

after_backward: Callable[[Callable[[], None]], None] = _need(
    "autograd.Variable._execution_engine.queue_callback", lambda callback: None
)
"""Call a function when the backward that runs in the calling thread has ended."""

CASTS = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})
"""Names of the autograd nodes that cast or transpose: a weight behind one is a weight still."""

_saves_as = "_raw_saved_"
_shows_saved = _find(f"_C._functions.ExpBackward0.{_saves_as}result") is not None


@cache
def _saves_nothing(node: type) -> bool:
    """Return whether autograd nodes of a class certainly save no tensor.

    The class of an operation of PyTorch has an attribute for each tensor that it saves.  Its name ends in a number,
    unlike those of functions of programs and of C++ extensions.
    """
    if not _shows_saved or not node.__name__[-1:].isdigit():  # [guard: nodes that do not show what they save -> False]
        return False
    return not any(name.startswith(_saves_as) for name in dir(node))  # [guard: nodes that save something -> True]


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


_top_hooks: Callable[[bool], tuple[Any, Any] | None] = _need(
    "_C._autograd._top_saved_tensors_default_hooks", lambda ignore_tracing: None
)
_transforms = _find("_C._functorch.get_interpreter_stack", lambda: None)
_vmap = _find("_C._functorch.TransformType.Vmap")

saved_tensor_hooks_disabled: Callable[[], str | None] = _find(
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message", lambda: None
)
"""Return why saved-tensor hooks are forbidden in the calling thread, or None."""

stands_for_another: Callable[[torch.Tensor], bool] = _find(
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


# Modules


def registered(module: Module) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Return the parameters, buffers and children of a module by name; the module's own tables where there are such."""
    tables = vars(module)
    if isinstance(tables.get("_modules"), dict):
        return tables["_parameters"], tables["_buffers"], tables["_modules"]
    # TorchScript keeps them in tables of its own, or in none.
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    return parameters, buffers, dict(module.named_children())


WRAPPED_AS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes under which ``torch.compile``, activation checkpointing and the older FSDP hold the wrapped module."""

PARAMETRIZATIONS = "parametrizations"
"""The child in which `torch.nn.utils.parametrize` registers what computes the parameters of a module."""


def is_compiled(module: Module) -> bool:
    """Return whether a module was compiled: by ``module.compile()``, or `torch.compile` of it or of its forward."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or "_orig_mod" in registered(module)[2]
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


SHARDED = ("FSDPModule", "ReplicateModule")
"""Classes that ``fully_shard`` and ``replicate`` mix into the class of a module."""

DATA_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Classes of wrappers that have the process group of a model as ``process_group``."""

_active = "nn.parallel.DistributedDataParallel._get_active_ddp_module"
active_data_parallel: Callable[[], Any] = _find(_active, lambda: None)
"""Return the `DistributedDataParallel` whose forward runs, or None."""

default_store: Callable[[], Any] | None = _find("distributed.distributed_c10d._get_default_store")
"""Return the key-value store of the default process group; None where PyTorch has none."""

RESHARD = "reshard"
"""A method of modules whose parameters are replaced while they run."""

CALLS = {method.__code__ for name in ("_call_impl", "_wrapped_call_impl") if (method := getattr(Module, name, None))}
"""Code of the methods in which `torch.nn.Module` calls ``forward``."""

CALL_VARIABLES = {"args": "input", "kwargs": "input", "result": "output"}
"""Local variables of `CALLS` for what a module is called with and what it returns."""

_call = getattr(getattr(Module, "_call_impl", None), "__code__", None)


def current_module() -> weakref.ref[Module] | None:
    """Return the innermost module whose forward runs in this thread, if any."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _call is not None:
        if frame.f_code is _call:
            return weakref.ref(frame.f_locals["self"])
        frame = frame.f_back
    return None


# torch.compile

_frames: Any = _find("_C._dynamo.eval_frame")
_SKIP: Any = _find("_C._dynamo.eval_frame._FrameAction.SKIP")
_DEFAULT: Any = _find("_C._dynamo.eval_frame._FrameAction.DEFAULT")
_Strategy: Any = _find("_C._dynamo.eval_frame._FrameExecStrategy")
_set_strategy: Any = getattr(_frames, "set_code_exec_strategy", None)
_MARKS_CODE = None not in (_SKIP, _DEFAULT, _Strategy, _set_strategy)


def inlined(function: F, callees: Any = _SKIP) -> F:
    """Let Dynamo inline a function into compiled code, and run it and all that it calls as plain Python elsewhere.

    The function asks `torch.compiler.is_dynamo_compiling` where it is.
    """
    if _MARKS_CODE:
        _set_strategy(function.__code__, _Strategy(_SKIP, callees))
    return function


def opaque(function: F, reason: str = "", *, compile_callees: bool = False) -> F:
    """Let a function run as plain Python where compiled code calls it, and all that it calls unless `compile_callees`.

    Does what `torch.compiler.disable` does, for all closures of the same code and without a wrapper around each call.
    `reason` is the error for a program that asked for a single graph.
    """
    inlined(function, _DEFAULT if compile_callees else _SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
"""The module that runs compiled backwards; a program that uses it has imported it, which takes a second."""


def in_compiled_backward() -> bool:
    """Return whether compiled autograd runs a backward, in any thread."""
    return getattr(sys.modules.get(COMPILED_AUTOGRAD), "in_compiled_autograd_region", False)


def compiled_backward() -> list[Any] | None:
    """Return the arguments of all unpack hooks of the compiled backward that runs in this thread; None without one."""
    frame: FrameType | None = sys._getframe() if in_compiled_backward() else None
    while frame is not None:
        if frame.f_code.co_name == "runtime_wrapper" and frame.f_globals["__name__"] == COMPILED_AUTOGRAD:
            return frame.f_locals.get("packed_inputs")
        frame = frame.f_back
    return None


# Devices

current_stream: Callable[[int], Any] = _find("_C._accelerator_getStream", torch.accelerator.current_stream)
"""Return the current stream of the accelerator with an index; without the checks of the public function."""

is_capturing: Callable[[], bool] = lambda: False  # noqa: E731
"""Return whether the current CUDA stream is captured into a graph.  Asks the driver; does not synchronize."""
if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    is_capturing = _find("_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

has_nvtx: bool = _find("_C._nvtx") is not None
"""Whether PyTorch was built with NVTX; the functions of `torch.cuda.nvtx` raise without it."""


def versions_shared() -> AbstractContextManager[object]:
    """Let aliases made in this block share the version counter of their tensor, also inside `__torch_dispatch__`."""
    guard = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)
    return nullcontext() if guard is None else guard(torch._C.DispatchKey.ADInplaceOrView, False)


def load_dynamo() -> None:
    """Import what `torch.utils.checkpoint` imports in its first call.

    That import keeps the frames of its callers, and their tensors, until the garbage collector runs (torch 2.13).
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
