"""Follow the calls of a model's modules.

`[Note: following modules]`  A followed module has a ``forward`` of its own in its ``__dict__``, as with the hooks of
accelerate.  It surrounds the ``forward`` of the class, or the one that was in the ``__dict__`` before, with ``try`` and
``finally``.  The class is looked up in each call, so whatever changes it comes out right: FSDP2, parametrizations, lazy
modules and graphs that are compiled anew.  The alternatives leave something half done or break something.  Forward
hooks come in pairs, and an interrupt passes over the second.  A class of ours for each module is found by programs that
look up ``type(module)``, is lost where PyTorch sets the class, and is changed by `torch.fx.GraphModule.recompile`.

Hooks of the module run outside of the wrapper.  What they save is saved between the groups.  ``module.compile()`` and
``torch.compile(module)`` run them outside of compiled code, too: Dynamo begins no graph in the methods of
`torch.nn.Module` nor in the wrapper, but in the ``forward`` below.  In a larger graph the wrapper is a break, which
offloading needs anyway.  Groups that are recomputed are compiled in backward too, by what compiled their forward.  A
program that asked for a single graph gets `REASON` as the error.

The wrapper refers weakly to its module, which would otherwise be freed by the garbage collector only.  Copies and
pickles are plain modules: the methods that make them are in the ``__dict__`` too, and leave out what is ours.  A class
that copies its ``__dict__`` by other means gets a wrapper of the copy that follows nothing.  Replicas of
`torch.nn.DataParallel` run in threads, all at a time, so that no pass can be timed; they are plain too, with a warning.

Another library may set ``forward`` later.  If its function calls ours, the module is followed on; after removal ours
stays there and only calls the original.  If nothing refers to ours any more, a warning says so.

An interrupt in the cleanup itself is the reason why there are two ``finally``.  One interrupt, at any bytecode, leaves
nothing installed.  A second one that arrives while the first is being cleaned up may; Python has no way to defer it.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any, TypeAlias

import torch
from torch.jit import ScriptModule
from torch.nn import Module

from .._torch.compiling import Compiled, compiler, opaque
from .._torch.modules import CALLS, class_attribute
from .followed import DROPPED, ROOT, FollowedModule
from .tracker import Tracker

__all__ = ["Followers", "detach", "followers_of", "refuse_scripted"]

_Pair: TypeAlias = tuple["Followers", FollowedModule]

_ENTRY = "_actoffload_follower"

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

GONE = "This is the forward of an offloaded module that was deleted: keep a reference to the module."


def refuse_scripted(module: Module, name: str) -> None:
    """Raise a `TypeError` for a module whose calls cannot be followed."""
    if isinstance(module, ScriptModule):
        raise TypeError(
            f"The module '{name}' is a torch.jit.ScriptModule, whose calls cannot be followed: pass the module from "
            "which it was scripted."
        )


class _Follower:
    """What follows one module; a copy of it follows nothing.

    Attributes
    ----------
    ref : weakref.ref
        The module.
    pairs : tuple
        For each handle that follows the module, its `Followers` and what the module is there.
    """

    def __init__(self, module: Module) -> None:
        self.ref = weakref.ref(module)
        self.pairs: tuple[_Pair, ...] = ()
        self._before: dict[str, Any] = {}  # attributes of the module in the place of ours
        self._forward: weakref.ref[Any] | None = None  # ours

    @property
    def module(self) -> Module:
        """The module, which must still exist."""
        module = self.ref()
        assert module is not None
        return module

    @property
    def is_lost(self) -> bool:
        """Whether nothing refers to our ``forward`` any more."""
        return self._forward is None or self._forward() is None

    def install(self) -> None:
        """Put our attributes into the ``__dict__`` of the module."""
        attributes = vars(self.module)
        self._strip(attributes)
        self._before = {name: attributes[name] for name in _NAMES if name in attributes}
        forward = types.MethodType(_make_forward(self.module, self._before.get("forward")), self)
        self._forward = weakref.ref(forward, partial(_note_lost, weakref.ref(self)))
        attributes.update(zip(_NAMES, (forward, self._get_state, self._reduce, self._replicate, self), strict=True))

    def uninstall(self) -> None:
        """Take our attributes out again, unless they were replaced; may be repeated."""
        self._forward = None  # is not lost, but removed
        self._strip(vars(self.module))

    def _is_ours(self, name: str, value: Any) -> bool:
        return name in _NAMES and (value is self or getattr(value, "__self__", None) is self)

    def _strip(self, attributes: dict[str, Any]) -> None:
        for name in _NAMES:  # ends with the entry, by which a repetition finds what is left
            if self._is_ours(name, attributes.get(name)):
                if name in self._before:
                    attributes[name] = self._before[name]  # [guard: forward from before]
                else:
                    del attributes[name]

    def _plain(self, part: Any) -> Any:
        """Return a part of what a module is copied from, without our attributes."""
        if type(part) is tuple:
            return tuple(map(self._plain, part))
        if type(part) is dict and any(self._is_ours(name, part.get(name)) for name in _NAMES):
            self._strip(part := dict(part))
        return part

    # Copies

    def _get_state(self) -> Any:
        return self._plain(class_attribute(self.module, "__getstate__")())  # [guard: state of a copy]

    def _reduce(self, protocol: Any) -> Any:
        return self._plain(class_attribute(self.module, "__reduce_ex__")(protocol))

    def _replicate(self) -> Module:
        for followers, _ in self.pairs:
            followers.tracker.warn_once(REPLICAS)
        replica: Module = class_attribute(self.module, "_replicate_for_data_parallel")()
        self._strip(vars(replica))  # [guard: replica]
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> _Follower:
        copied = _Follower(copy.deepcopy(self.module, memo))
        copied._before = copy.deepcopy(self._before, memo)
        return copied


_NAMES = ("forward", "__getstate__", "__reduce_ex__", "_replicate_for_data_parallel", _ENTRY)
"""Attributes that a followed module has in its ``__dict__``."""


def _note_lost(follower: weakref.ref[_Follower], _: object) -> None:
    """Note that nothing refers to the ``forward`` of a follower any more."""
    found = follower()
    if found is not None and found.ref() is not None:
        for followers, followed in found.pairs:
            followers.lost.append(followed)


def _make_forward(module: Module, before: Any) -> Callable[..., Any]:
    """Return the ``forward`` of a follower, with the name and the signature of the one that it surrounds."""

    def forward(bound: Any, /, *args: Any, **kwargs: Any) -> Any:
        follower: _Follower | None = bound if type(bound) is _Follower else vars(bound).get(_ENTRY)
        if follower is None:  # accelerate binds the function to the module, and may still do so after `remove`
            return (class_attribute(bound, "forward") if before is None else before)(*args, **kwargs)
        module = follower.ref()
        if module is None:
            raise RuntimeError(GONE)
        return _call(module, follower, args, kwargs)

    update_wrapper(forward, type(module).forward if before is None else before, updated=())
    with suppress(TypeError, ValueError):  # no signature
        signature = inspect.signature(class_attribute(module, "forward") if before is None else before)
        itself = inspect.Parameter("__follower", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [itself, *signature.parameters.values()]
        forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return opaque(forward, REASON, compile_callees=True)


def _call(self: Module, follower: _Follower, args: Any, kwargs: Any) -> Any:
    """Call the ``forward`` of a module as if nothing followed it, and note for each handle that it runs."""
    before = follower._before.get("forward")
    forward = class_attribute(self, "forward") if before is None else before
    began: list[tuple[Tracker, int]] = []
    around: Callable[..., Any] | None = None
    compiles = compiler()
    try:
        try:
            for followers, followed in follower.pairs:
                tracker = followers.tracker
                followers.warn_of_lost()
                began.append((tracker, tracker.depth))
                around = tracker.begin(followed, args, kwargs, compiled=compiles is not None) or around
            if around is None:
                result = forward(*args, **kwargs)
            else:
                function: Callable[..., Any] = forward
                if compiles is not None:
                    function = Compiled(function, compiles)  # [guard: recomputation as it was compiled]
                result = around(function, *args, **kwargs)
            for tracker, depth in reversed(began):
                tracker.end(depth, result)  # [guard: end of a call]
            return result
        except torch.OutOfMemoryError as error:
            for tracker, _ in began:
                if tracker.depth:
                    tracker.explain(error)
            raise
        finally:
            for tracker, depth in reversed(began):
                tracker.unwind(depth)  # [guard: end of a failed call]
    finally:
        for tracker, depth in reversed(began):
            tracker.unwind(depth)  # [guard: end of a failed call, repeated after an interrupt]


CALLS.add(_call.__code__)  # reports name the tensors that a call refers to
opaque(_call, REASON, compile_callees=True)
for _function in (class_attribute, Tracker.begin, Tracker.end, Tracker.unwind):
    opaque(_function, REASON)


class Followers:
    """The followed modules of one handle, the root first; `parts` are its attributes, for `OffloadHandle.of`."""

    def __init__(self, tracker: Tracker, modules: Sequence[FollowedModule], parts: dict[str, Any]) -> None:
        self.tracker = tracker
        self.modules = tuple(modules)
        self.parts = parts
        self.lost: list[FollowedModule] = []  # modules whose `forward` was replaced
        self.installed = True
        for followed in modules:
            refuse_scripted(followed.module, followed.name)
        try:
            for followed in modules:
                follower = _follower_of(followed.module)
                if follower is None:
                    follower = _Follower(followed.module)
                if follower.is_lost:
                    follower.install()
                follower.pairs = (*follower.pairs, (self, followed))
        except BaseException:  # an interrupt
            detach(self.modules)  # [guard: half followed model]
            raise

    def warn_of_lost(self) -> None:
        """Warn about modules whose ``forward`` was replaced."""
        while self.lost:
            followed = self.lost.pop()
            if followed.role is not DROPPED:
                self.tracker.warn_once(
                    f"The forward of the module '{followed.name}' was replaced since offload was called, and what took "
                    "its place does not call it, so the module is not offloaded. Replace it before offload."
                )

    opaque(warn_of_lost, REASON)

    def remove(self) -> None:
        """Follow the modules no longer; a forward in progress in any thread ends as it began."""
        if self.installed:
            self.tracker.retire(partial(detach, self.modules))
            self.installed = False  # last: after an interrupt it is called again


def detach(modules: Iterable[FollowedModule]) -> None:
    """Follow these modules no longer; no forward of them may be in progress."""
    for followed in modules:
        module = followed.ref()
        follower = None if module is None else _follower_of(module)
        if follower is not None:
            follower.pairs = tuple(pair for pair in follower.pairs if pair[1] is not followed)
            # [guard: module of another handle -> True]
            if not follower.pairs:  # [guard: attributes of a module after removal]
                follower.uninstall()


def followers_of(model: Module) -> Followers | None:
    """Return what follows a model as its root, or None if nothing does."""
    follower = _follower_of(model)
    pairs = () if follower is None else follower.pairs
    return next((followers for followers, followed in pairs if followed.role is ROOT and followers.installed), None)


def _follower_of(module: Module) -> _Follower | None:
    """Return what follows a module, if anything does."""
    found: _Follower | None = vars(module).get(_ENTRY)
    return None if found is None or found.ref() is not module else found
