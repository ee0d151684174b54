"""The followed modules of a model: what each of them is, how its calls are followed, and what they share.

`[Note: following modules]`  A followed module has a ``forward`` in its ``__dict__``, around the one of its class, or
the one that was in the ``__dict__`` before, with ``try`` and ``finally``.  The class is looked up in each call, so what
changes it works: FSDP2, parametrizations, lazy modules, edited graphs.  Forward hooks come in pairs, and an interrupt
passes over the second.  A class for each module would change ``type(module)``, and is lost where PyTorch sets the
class.

Hooks of the module run outside of the wrapper, so they save between the groups.  Dynamo compiles the ``forward`` inside
of the wrapper; in a larger graph the wrapper is a break, with `REASON` where a single graph was asked for.

The wrapper refers weakly to its module, which would otherwise be freed by the garbage collector only.  Copies, pickles
and replicas of `torch.nn.DataParallel`, whose threads no pass can time, are plain modules.  If another library sets
``forward`` later, and nothing refers to ours any more, a warning says so.

There are two ``finally`` because of an interrupt in the cleanup itself.  A second interrupt during the cleanup may
leave something installed; Python has no way to defer it.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
from torch.jit import ScriptModule
from torch.nn import Module

from .._torch.modules import CALLS, Follower, class_attribute, compile_calls, compiler, is_compiled, opaque
from ..engine.engine import Engine
from ..report.build import PassLog

ROOT, GROUP, KEPT = "root", "group", "kept"

WHOLE = "(the whole model)"
"""Name of the model as a group."""


@dataclass(eq=False)
class FollowedModule:
    """A module whose calls are followed.  It is referenced weakly, because the module itself refers to this object."""

    role: str  # ROOT, GROUP or KEPT
    name: str
    ref: weakref.ref[Module]
    group: int = -1  # its index among the chosen modules
    kind: str = ""  # groups of one kind are scheduled alike
    compiled: bool = False  # it was called in a model that is compiled as a whole

    @property
    def is_compiled(self) -> bool:
        """Whether it runs as compiled code."""
        return self.compiled or is_compiled(self.module)

    @property
    def module(self) -> Module:
        """The module, which must still exist."""
        found = self.ref()
        assert found is not None
        return found


@dataclass(eq=False)
class ModelState:
    """What all parts of the offloading of a model share."""

    modules: Sequence[FollowedModule]  # the model itself first
    engine: Engine
    meet: Callable[[], None] | None = None  # called once, before the first forward
    checks_coverage: bool = False  # warn after the first forward if groups are less than half of what it saved

    def __post_init__(self) -> None:
        self.groups = [followed for followed in self.modules if followed.group >= 0]
        # Of the latest pass; before the first one, the order in which modules are registered.
        self.order = tuple(range(len(self.groups)))
        self.log = PassLog(partial(_label, self.groups))  # not a method: a cycle is freed late

    @property
    def root(self) -> FollowedModule:
        """The model."""
        return self.modules[0]

    def names(self, sequence: Iterable[int] | None = None) -> tuple[str, ...]:
        """Return the names of the groups of a sequence, by default in their expected execution order."""
        return tuple(self.groups[group].name for group in (self.order if sequence is None else sequence))

    def kinds(self, sequence: Iterable[int]) -> list[str]:
        """Return the kinds of the groups of a sequence."""
        return [self.groups[group].kind for group in sequence]


def _label(groups: Sequence[FollowedModule], group: int) -> tuple[str, str]:
    """Return the name and the kind of a group."""
    return groups[group].name, groups[group].kind


# Calls

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


class _Following(NamedTuple):
    """One handle that follows a module, and what the module is there."""

    tracker: Any  # a `Tracker`
    followed: FollowedModule
    handle: Any


class _Follower(Follower):
    """What follows one module; a copy of it follows nothing."""

    entry = "_actoffload_follower"

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.all_following: tuple[_Following, ...] = ()
        self._forward: weakref.ref[Any] | None = None  # ours

    @property
    def is_lost(self) -> bool:
        """Whether nothing refers to our ``forward`` any more."""
        return self._forward is None or self._forward() is None

    def follow(self) -> None:
        """Put our methods into the ``__dict__`` of the module."""
        self.strip(vars(self.ref()))
        forward = types.MethodType(_make_forward(self), self)
        self._forward = weakref.ref(forward)
        self.install({"forward": forward, "__reduce_ex__": self._reduce, _REPLICATE: self._replicate})

    # Copies

    def _reduce(self, protocol: Any) -> Any:
        return self._plain(self.original("__reduce_ex__")(protocol))

    def _plain(self, part: Any) -> Any:
        """Return a part of what a module is copied from, without our attributes."""
        if type(part) is tuple:
            return tuple(map(self._plain, part))
        if type(part) is dict and part.get(self.entry) is self:
            self.strip(part := dict(part))  # [guard: state of a copy]
        return part

    def _replicate(self) -> Module:
        for following in self.all_following:
            following.tracker.warn_once(REPLICAS)
        replica: Module = self.original(_REPLICATE)()
        self.strip(vars(replica))  # [guard: replica]
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> _Follower:
        module: Any = copy.deepcopy(self.ref(), memo)
        copied = _Follower(module)
        copied.before, copied._names = copy.deepcopy(self.before, memo), self._names
        return copied


_REPLICATE = "_replicate_for_data_parallel"


def _make_forward(follower: _Follower) -> Callable[..., Any]:
    """Return the ``forward`` of a follower, with the name and the signature of the one that it surrounds."""
    module: Any = follower.ref()
    before = vars(module).get("forward")

    def forward(bound: Any, /, *args: Any, **kwargs: Any) -> Any:
        follower: _Follower | None = bound if type(bound) is _Follower else vars(bound).get(_Follower.entry)
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
    forward = follower.original("forward")
    began: list[tuple[Any, int]] = []
    around: Callable[..., Any] | None = None
    compiles = compiler()
    try:
        try:
            for tracker, followed, _ in follower.all_following:
                began.append((tracker, tracker.depth))
                around = tracker.begin(followed, args, kwargs, compiled=compiles is not None) or around
            if around is None:
                result = forward(*args, **kwargs)
            else:
                function: Callable[..., Any] = forward
                if compiles is not None:
                    function = compile_calls(function, compiles)  # [guard: recomputation as it was compiled]
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
for _function in (class_attribute, Follower.original):
    opaque(_function, REASON)


# Beginning and end


def follow(trackers: Iterable[Any], handle: Any) -> None:
    """Let trackers see the calls of their modules; all or nothing.  `handle_of` returns the handle for their roots."""
    all_following = [_Following(tracker, each, handle) for tracker in trackers for each in tracker.state.modules]
    for _, followed, _ in all_following:
        refuse_scripted(followed.module, followed.name)
    try:
        for following in all_following:
            module = following.followed.module
            follower = _Follower.find(module) or _Follower(module)
            if follower.is_lost:
                follower.follow()
            follower.all_following = (*follower.all_following, following)
    except BaseException:  # an interrupt
        unfollow(following.followed for following in all_following)  # [guard: half followed model]
        raise


def unfollow(modules: Iterable[FollowedModule]) -> None:
    """Follow these modules no longer; no forward of them may be in progress."""
    for followed in modules:
        module = followed.ref()
        follower = None if module is None else _Follower.find(module)
        if module is not None and follower is not None:
            follower.all_following = tuple(each for each in follower.all_following if each.followed is not followed)
            # [guard: module of another handle -> True]
            if not follower.all_following:  # [guard: attributes of a module after removal]
                follower.strip(vars(module))


def handle_of(model: Module) -> Any:
    """Return the handle that follows a model as its root, or None."""
    follower = _Follower.find(model)
    all_following = () if follower is None else follower.all_following
    handles = (each.handle for each in all_following if each.followed.role is ROOT and each.handle.installed)
    return next(handles, None)


def lost_modules(modules: Iterable[FollowedModule]) -> Iterator[str]:
    """Yield a sentence about each module that is followed no longer, because the program replaced something."""
    for followed in modules:
        module = followed.ref()
        follower = None if module is None else _Follower.find(module)
        if (module is None and followed.role is not ROOT) or (follower is not None and follower.is_lost):
            what = "module" if module is None else "forward of the module"
            yield (
                f"The {what} '{followed.name}' has been replaced or deleted since offload was called; what took its "
                "place is not offloaded. Call remove() of the handle, then offload again."
            )
