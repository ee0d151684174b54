"""Follow the calls of a model's modules.

`[Note: following modules]`  A followed module gets another class: a subclass of its own, of the same name, whose
``__call__`` surrounds the original one with ``try`` and ``finally``, as FSDP2 gives it a class for its methods.  The
alternatives leave something half done or break something.  Forward hooks come in pairs, and an interrupt passes over
the second; `torch.nn.Module.compile` compiles them with the module.  An attribute of the instance in place of
``_call_impl`` is shared by the replicas of `torch.nn.DataParallel`, which would all call the original.  The class
stands outside of hooks and of compiled code, whenever either is added.  It costs this: ``type(module) is X`` is false
for a followed module, ``isinstance`` is true.

What follows a module is an entry in its ``__dict__``, so replicas have it and copies do not: they are plain modules of
the original class.  Replicas of `torch.nn.DataParallel` run their forwards in threads, all at a time, so that no pass
can be timed; they are called as if nothing followed them, with one warning.  A copy for a process that is started with
it (``multiprocessing`` with ``spawn``) warns there.  A class that another library derived from ours (FSDP2,
parametrizations) stays after removal.

An interrupt in the cleanup itself is the reason why there are two ``finally``.  One interrupt, at any bytecode, leaves
nothing installed.  A second one that arrives while the first is being cleaned up may; Python has no way to defer it.

Dynamo does not trace ``__call__``: the graph breaks there, and the groups are compiled one by one, which offloading
needs anyway.  Those that are recomputed are compiled in backward too, by what compiled their forward.  A program that
asked for a single graph gets `REASON` as the error.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeAlias

from torch.jit import ScriptModule
from torch.nn import Module

from .._torch.compiling import Compiled, compiler, opaque
from .._torch.modules import CALLS
from .._warnings import warn
from .conduct import ROOT, FollowedModule
from .tracker import Tracker

__all__ = ["Followers", "detach", "followers_of", "original_class", "refuse_scripted"]

_Pair: TypeAlias = tuple["Followers", FollowedModule]

_ENTRY = "_actoffload_followed"
_ORIGINAL = "_actoffload_original"

REASON = (
    "actoffload follows the chosen modules of a model, and those that keep names, from outside of compiled code; "
    "compile them one by one: for layer in layers: layer.compile(fullgraph=True), and without fullgraph where keep "
    "names a module inside of a layer; torch.export.export works with strict=False, or after remove() of the handle"
)


REPLICAS = (
    "Nothing is offloaded in the replicas of torch.nn.DataParallel, which wraps a model on several GPUs; a Trainer of "
    "Hugging Face does so without a launcher. Start one process for each GPU, with torchrun or accelerate launch, and "
    "call offload in each."
)


def refuse_scripted(module: Module, name: str) -> None:
    """Raise a `TypeError` for a module whose calls cannot be followed."""
    if isinstance(module, ScriptModule):
        raise TypeError(
            f"The module '{name}' is a torch.jit.ScriptModule, whose calls cannot be followed: pass the module from "
            "which it was scripted."
        )


class _Entry(tuple[_Pair, ...]):
    """What follows one module; a copy of it follows nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entry, ()


_classes: dict[type[Module], type[Module]] = {}


def original_class(kind: Any) -> Any:
    """Return the class that a followed module had before; anything else as it is."""
    return vars(kind).get(_ORIGINAL, kind) if isinstance(kind, type) else kind


def _followed_class(original: type[Module]) -> type[Module]:
    """Return the class for followed modules of a class; always the same one, as compiled code depends on it."""
    if hasattr(original, _ORIGINAL):  # a class that another library derived from ours
        return original
    if original in _classes:
        return _classes[original]

    def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        began: list[tuple[Tracker, int]] = []
        around: Callable[..., Any] | None = None
        compiles = compiler()
        try:
            try:
                for followers, of in _following(self):
                    tracker = followers.tracker
                    began.append((tracker, tracker.depth))
                    around = tracker.begin(of, args, kwargs, compiled=compiles is not None) or around
                if around is None:
                    result = original.__call__(self, *args, **kwargs)
                else:
                    function: Callable[..., Any] = partial(original.__call__, self)
                    if compiles is not None:
                        function = Compiled(function, compiles)  # [guard: recomputation as it was compiled]
                    result = around(function, *args, **kwargs)
                for tracker, depth in reversed(began):
                    tracker.end(depth, result)  # [guard: end of a call]
                return result
            finally:
                for tracker, depth in reversed(began):
                    tracker.unwind(depth)  # [guard: end of a failed call]
        finally:
            for tracker, depth in reversed(began):
                tracker.unwind(depth)  # [guard: end of a failed call, repeated after an interrupt]

    def __reduce_ex__(self: Module, protocol: Any) -> Any:  # noqa: N807
        reduced = original.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _ENTRY}  # [guard: entry of a copy]
        arguments = tuple(map(original_class, arguments))
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle requires the present class there
            function = arguments[0].__new__
        function = original_class(function)
        if get_spawning_popen() is not None and any(of.role is ROOT for _, of in _pairs(self)):
            return _in_worker, (function, *arguments), *rest  # [guard: model that a new process gets]
        return function, arguments, *rest

    opaque(__call__, REASON, compile_callees=True)
    CALLS.add(__call__.__code__)  # reports name the tensors that a call refers to
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"__slots__": (), _ORIGINAL: original, "__call__": __call__, "__reduce_ex__": __reduce_ex__}
    _classes[original] = types.new_class(original.__name__, (original,), exec_body=lambda body: body.update(names))
    return _classes[original]


for _function in (Tracker.begin, Tracker.end, Tracker.unwind):
    opaque(_function, REASON)


class Followers:
    """The followed modules of one handle, the root first; `parts` are its attributes, for `OffloadHandle.of`."""

    def __init__(self, tracker: Tracker, modules: Sequence[FollowedModule], parts: dict[str, Any]) -> None:
        self.tracker = tracker
        self.modules = tuple(modules)
        self.parts = parts
        self.installed = True
        for of in modules:
            refuse_scripted(of.module, of.name)
        try:
            for of in modules:
                module = of.module
                vars(module)[_ENTRY] = _Entry((*_pairs(module), (self, of)))
                _set_class(module, _followed_class(type(module)))
        except BaseException:  # an interrupt, or a class that cannot be derived from
            detach(self.modules)  # [guard: half followed model]
            raise

    def remove(self) -> None:
        """Follow the modules no longer; a forward in progress in any thread ends as it began."""
        if self.installed:
            self.tracker.retire(partial(detach, self.modules))
            self.installed = False  # last: after an interrupt it is called again


def detach(modules: Iterable[FollowedModule]) -> None:
    """Follow these modules no longer; no forward of them may be in progress."""
    for of in modules:
        module = of.ref()
        if module is not None:
            vars(module)[_ENTRY] = _Entry(pair for pair in _pairs(module) if pair[1] is not of)
            # [guard: module of another handle -> True]
            if not _pairs(module):  # [guard: class of a module after removal]
                vars(module).pop(_ENTRY, None)
                _set_class(module, original_class(type(module)))


def _in_worker(function: Any, *arguments: Any) -> Any:
    """Make a copy of an offloaded model in a process that was started with it, and warn."""
    made = function(*arguments)
    warn(
        f"Offloading of this {type(made).__name__} ended where it was passed to a new process: call actoffload.offload "
        "in that process."
    )
    return made


def followers_of(model: Module) -> Followers | None:
    """Return what follows a model as its root, or None if nothing does."""
    roots = (followers for followers, of in _pairs(model) if of.role is ROOT and of.ref() is model)
    return next((followers for followers in roots if followers.installed), None)


def _following(module: Module) -> _Entry:
    """Return what follows the calls of a module."""
    pairs = _pairs(module)
    if pairs and "_is_replica" in vars(module):  # [guard: replica]
        for followers, _ in pairs:
            followers.tracker.warn_once(REPLICAS)
        return _Entry()
    return pairs


def _pairs(module: Module) -> _Entry:
    return vars(module).get(_ENTRY) or _Entry()


def _set_class(module: Module, kind: type[Module]) -> None:
    # What torch.compile returns passes assignments on to the module that it wraps.
    if type(module) is not kind:
        object.__setattr__(module, "__class__", kind)
