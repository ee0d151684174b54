"""Putting a tracker's ears on modules: forward hooks, and what takes their place around compiled modules.

`[Note: compiled modules]`  ``module.compile()`` compiles the call of the module together with its hooks.  So a module
that was compiled in place gets a wrapper around its compiled call, and inside of it its hooks do nothing.  Hooks that
are reached in the compilation of something larger, the whole model say, cannot be compiled: they break the graph there,
and the groups are compiled one by one, which is what offloading needs anyway.  Who asked for a single graph is told so.
Where Dynamo does not compile the call of a module but what it calls, it would compile the hooks too, each for itself,
and again for every type of module and every change of an argument; so they are not to be compiled by themselves.
What was compiled before there were hooks does not see them: Dynamo's guards leave hooks out.  So what it has compiled
for the modules around the chosen ones is dropped, to be compiled again with the next call.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from .._torch import compiled_only_inline, forget_compiled, opaque
from .tracker import ROOT, Place, Tracker

__all__ = ["ModuleHooks", "hooks_of"]

_installed: weakref.WeakKeyDictionary[Module, weakref.ref[ModuleHooks]] = weakref.WeakKeyDictionary()

REASON = (
    "actoffload follows the chosen modules of a model, and those that keep names, from outside of compiled code; "
    "compile them one by one: for layer in layers: layer.compile(fullgraph=True)"
)


class _Hook:
    """A hook of one place.  A copied or unpickled module is another module, which nobody follows."""

    def __init__(self, tracker: Tracker | None, place: Place | None) -> None:
        self.tracker = tracker
        self.place = place

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, None)


class _Before(_Hook):
    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        if self.tracker is not None and not _surrounded(module):  # that of a copy is compiled, to nothing
            _begin(self, args, kwargs)


class _After(_Hook):
    def __call__(self, module: Module, args: Any, output: Any) -> None:
        if self.tracker is not None and not _surrounded(module):
            _end(self, output)


class _Around(threading.local):
    """Stands around the compiled call of a module; see [Note: compiled modules].

    A thread that is inside of it finds that in `depth`.
    """

    def __init__(self, call: Callable[..., Any], before: Sequence[_Hook], after: Sequence[_Hook]) -> None:
        self.call = call
        self.depth = 0
        self._before = before
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self._before:
            _begin(hook, args, kwargs)
        output = None
        self.depth += 1
        try:
            output = self.call(*args, **kwargs)
        except BaseException:
            for hook in self._after:
                _end(hook, None)
            raise
        finally:
            self.depth -= 1
        for hook in self._after:
            _end(hook, output)
        return output


def _surrounded(module: Module) -> bool:
    around = module._compiled_call_impl
    return isinstance(around, _Around) and (torch.compiler.is_compiling() or around.depth > 0)


def _begin(hook: _Hook, args: Any, kwargs: Any) -> None:
    tracker, place = hook.tracker, hook.place
    if tracker is not None and place is not None:
        tracker.begin(place, args, kwargs)


def _end(hook: _Hook, output: Any) -> None:
    tracker, place = hook.tracker, hook.place
    if tracker is not None and place is not None:
        tracker.end(place, output)


opaque(_begin, REASON)
opaque(_end, REASON)
for _function in (_Before.__call__, _After.__call__, _Around.__call__, _surrounded):
    compiled_only_inline(_function)


class ModuleHooks:
    """All hooks of one handle.

    Parameters
    ----------
    tracker : Tracker
        Who is told.
    places : sequence of Place
        The root first.
    behind : object
        What a handle consists of, for who has lost his.
    """

    def __init__(self, tracker: Tracker, places: Sequence[Place], behind: Any = None) -> None:
        self.places = tuple(places)
        self.behind = behind
        self._handles: list[RemovableHandle] = []
        self._around: list[tuple[Place, list[_Hook], list[_Hook]]] = []
        self.tracker: Tracker | None = tracker
        self._missed = False
        of: dict[Module, tuple[Place, list[_Hook], list[_Hook]]] = {}
        for place in places:
            before = _Before(tracker, place)
            self._handles.append(place.module.register_forward_pre_hook(before, with_kwargs=True))
            of.setdefault(place.module, (place, [], []))[1].append(before)
        for place in reversed(places):  # a module that is the root and a group as well ends as a group first
            after = _After(tracker, place)
            self._handles.append(place.module.register_forward_hook(after, always_call=True))
            of[place.module][2].append(after)
            if place.role is ROOT:
                self._handles.append(place.module.register_forward_pre_hook(self._look, prepend=True))
        self._around += of.values()
        self.surround()
        _installed[places[0].module] = weakref.ref(self)
        _forget_compiled(places[0].module, {place.module for place in places[1:]}, {})

    def _look(self, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.surround()

    compiled_only_inline(_look)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHooks:
        return _nothing()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    def surround(self) -> None:
        """Put wrappers around modules that have been compiled in place since the last time."""
        for place, before, after in self._around:
            module = place.ref()
            if module is None:
                self._miss(place)
                continue
            call = module._compiled_call_impl
            if call is not None and not isinstance(call, _Around):
                module._compiled_call_impl = _Around(call, before, after)

    def _miss(self, place: Place) -> None:
        """Tell, once, that a module is gone that was there when the hooks were put on."""
        if not self._missed:
            self._missed = True
            warnings.warn(
                f"The module '{place.name}' has been replaced or deleted since offload was called; nobody follows what "
                "took its place. Call remove() of the handle and offload again. This is said once.",
                UserWarning,
                stacklevel=5,
            )

    def remove(self) -> None:
        """Take everything off again; where a forward is under way, when it ends."""
        if self.tracker is not None:
            self.tracker.retire(self._take_off)
            self.tracker = None

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        for place, _, _ in self._around:
            module = place.ref()
            if module is not None and isinstance(module._compiled_call_impl, _Around):
                module._compiled_call_impl = module._compiled_call_impl.call
        self._handles.clear()
        self._around.clear()


def hooks_of(model: Module) -> ModuleHooks | None:
    """Return the hooks on a model, or None if nobody follows it, or nobody any more."""
    ref = _installed.get(model)
    hooks = None if ref is None else ref()
    return None if hooks is None or hooks.tracker is None else hooks


def _forget_compiled(module: Module, followed: Set[Module], known: dict[Module, bool]) -> bool:
    """Drop what was compiled for modules around those that are followed; return whether there are any in this one."""
    found = known.get(module)
    if found is None:
        found = False
        for child in module.children():
            found |= _forget_compiled(child, followed, known)
        if found:
            forget_compiled(module.forward)
        known[module] = found
    return found or module in followed


def _nothing() -> ModuleHooks:
    empty = ModuleHooks.__new__(ModuleHooks)
    empty._handles, empty._around, empty.tracker, empty._missed = [], [], None, False
    empty.places, empty.behind = (), None
    return empty
