"""Modules, and the wrappers around them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch.nn import Module

from .lookup import find


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


SHARDED = ("FSDPModule", "ReplicateModule")
"""Classes that ``fully_shard`` and ``replicate`` mix into the class of a module."""

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

_call = getattr(getattr(Module, "_call_impl", None), "__code__", None)


def current_module() -> weakref.ref[Module] | None:
    """Return the innermost module whose forward runs in this thread, if any."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _call is not None:
        if frame.f_code is _call:
            return weakref.ref(frame.f_locals["self"])
        frame = frame.f_back
    return None
