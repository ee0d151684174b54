"""Modules and the wrappers around them; `torch.compile`: what it leaves alone, what compiles calls, and backwards."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from torch.nn import Module

from . import find


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
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in registered(module)[2]:
        return True
    forward: Any = module.forward
    while forward is not None and not hasattr(forward, "_torchdynamo_orig_callable"):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def class_attribute(instance: Any, name: str) -> Any:
    """Return an attribute of a class as an instance has it that has none of this name in its ``__dict__``."""
    kind = type(instance)
    found = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
    return found.__get__(instance, kind) if hasattr(found, "__get__") else found


class Follower:
    """Methods in the ``__dict__`` of an object, around those that it has without them; refers to it weakly.

    The methods are bound to the follower, which is in the ``__dict__`` as `entry`.
    """

    entry = ""

    def __init__(self, followed: Any) -> None:
        self.ref = weakref.ref(followed)
        self.before: dict[str, Any] = {}  # what was in the ``__dict__`` in place of our methods
        self._names: tuple[str, ...] = ()

    @classmethod
    def find(cls, followed: Any) -> Self | None:
        """Return what follows an object, if anything does."""
        found: Self | None = vars(followed).get(cls.entry)
        return None if found is None or found.ref() is not followed else found

    def install(self, methods: Mapping[str, Any]) -> None:
        """Put methods and the follower itself into the ``__dict__``."""
        attributes = vars(self.ref())
        self.before = {name: attributes[name] for name in methods if name in attributes}
        self._names = (*methods, self.entry)  # ends with the entry, by which a repetition finds what is left
        attributes.update({self.entry: self, **methods})

    def strip(self, attributes: dict[str, Any]) -> None:
        """Take what is ours out of the ``__dict__`` of the object, or of a copy; may be repeated."""
        for name in self._names:
            value = attributes.get(name)
            if value is self or getattr(value, "__self__", None) is self:
                if name in self.before:
                    attributes[name] = self.before[name]  # [guard: forward from before]
                else:
                    del attributes[name]

    def original(self, name: str) -> Any:
        """Return the method that is there without us."""
        return self.before[name] if name in self.before else class_attribute(self.ref(), name)


DATA_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Classes of wrappers that have the process group of a model as ``process_group``."""

_active = "nn.parallel.DistributedDataParallel._get_active_ddp_module"
active_data_parallel: Callable[[], Any] = find(_active, lambda: None)
"""Return the `DistributedDataParallel` whose forward runs, or None."""

default_store: Callable[[], Any] | None = find("distributed.distributed_c10d._get_default_store")
"""Return the key-value store of the default process group; None where PyTorch has none."""

RESHARD = "reshard"
"""A method of modules whose parameters are replaced while they run."""

CALLS = {method.__code__ for name in ("_call_impl", "_wrapped_call_impl") if (method := getattr(Module, name, None))}
"""Code of the methods in which `torch.nn.Module` calls ``forward``."""

CALL_VARIABLES = {"args": "input", "kwargs": "input", "result": "output"}
"""Local variables of `CALLS` for what a module is called with and what it returns."""


# Compiled code

F = TypeVar("F", bound=Callable[..., Any])

_frames: Any = find("_C._dynamo.eval_frame")
_SKIP: Any = find("_C._dynamo.eval_frame._FrameAction.SKIP")
_DEFAULT: Any = find("_C._dynamo.eval_frame._FrameAction.DEFAULT")
_Strategy: Any = find("_C._dynamo.eval_frame._FrameExecStrategy")
_set_strategy: Any = getattr(_frames, "set_code_exec_strategy", None)
_MARKS_CODE = None not in (_SKIP, _DEFAULT, _Strategy, _set_strategy)


def _nothing() -> None:
    return None


def opaque(function: F, reason: str = "", *, compile_callees: bool = False) -> F:
    """Let a function run as plain Python where compiled code calls it, and all that it calls unless `compile_callees`.

    Does what `torch.compiler.disable` does, for all closures of the same code and without a wrapper around each call.
    `reason` is the error for a program that asked for a single graph.
    """
    if _MARKS_CODE:
        _set_strategy(function.__code__, _Strategy(_SKIP, _DEFAULT if compile_callees else _SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


_tracing_state: Callable[[], Any] = find("_C._get_tracing_state", _nothing)


def tracing() -> bool:
    """Return whether calls are recorded as a graph: `torch.jit.trace`, `make_fx`, `symbolic_trace`, `torch.export`."""
    if _tracing_state() is not None:
        return True
    symbolic = sys.modules.get("torch.fx._symbolic_trace")
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if getattr(symbolic, "is_fx_symbolic_tracing", bool)():
        return True
    return getattr(proxies, "get_proxy_mode", _nothing)() is not None


_get_compiler: Any = find("_C._dynamo.eval_frame.get_eval_frame_callback")
_set_compiler: Any = find("_C._dynamo.eval_frame.set_eval_frame")

compiler: Callable[[], Any] = _nothing if None in (_get_compiler, _set_compiler) else _get_compiler
"""Returns what compiles the calls of this thread, as in a model that is compiled as a whole; None without one."""


def compile_calls(function: Callable[..., Any], compiles: Any) -> Callable[..., Any]:
    """Return a function whose calls are compiled in any thread by what `compiler` returned.

    What is recomputed in backward has to be compiled as it was in the forward, or it saves other tensors.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        before = compiler()
        try:
            _set_compiler(compiles)
            return function(*args, **kwargs)
        finally:
            _set_compiler(before)

    return call


NOT_COMPILED = (
    "The backward of an offloaded model cannot run in compiled autograd: set "
    "torch._dynamo.config.compiled_autograd = False, or end offloading before the forward."
)


def in_compiled_backward() -> bool:
    """Return whether compiled autograd runs a backward; a program that uses it has imported its module."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)
