"""The unpack hook, in a plain backward and in one that compiled autograd runs.

`[Note: compiled autograd]`  Compiled autograd records a backward as one graph, in which each unpack hook is a call,
and Dynamo compiles it.  Dynamo cannot trace a reload, so the graph breaks.  It breaks for each layer, not for each
tensor: where backward reaches a layer, all that the layer saved is unpacked, and the compiled code up to the next layer
reads the tensors as attributes of what autograd holds.  So a layer is reloaded while the next one is in its backward,
and evicted when its own has ended, as in a plain backward.

The version of an offloaded tensor is compared when it is unpacked, that of a kept one at the first graph break.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch.compiler import is_dynamo_compiling

from .._torch.autograd import after_backward, backward_id
from .._torch.compiling import compiled_backward, in_compiled_backward, inlined, opaque
from .._torch.tensors import version_of
from ..schedule.plan import OUTSIDE
from .layer import GRAPH_BREAK, Layer, LivenessToken
from .pack import Saved
from .storage import CompiledState, Moved, SavedStorage
from .subclasses import Compound
from .versions import changed

__all__ = ["CompiledBackward", "unpack"]


def unpack(saved: Saved) -> torch.Tensor:
    """Turn what autograd holds into the tensor; the unpack hook."""
    if is_dynamo_compiling():
        return _traced(saved)
    if not isinstance(saved, tuple):
        return saved.unpack()
    if in_compiled_backward():
        CompiledBackward.running()
    alias, version = saved[:2]
    if version_of(alias) != version:  # [guard: in-place edit of a kept tensor]
        raise changed(alias, alias.size(), version)
    return alias


inlined(unpack)


def _traced(saved: Saved) -> torch.Tensor:
    if isinstance(saved, tuple):
        if (state := saved[2].checked) is None or state[0]:
            _graph_break()
        return saved[0]
    if (found := saved.unpacked) is None or found[0]:
        _graph_break()
    return found[2]


def _graph_break() -> NoReturn:
    raise AssertionError("Dynamo breaks the graph and lets Python call the hook.")


opaque(_graph_break, GRAPH_BREAK)

_Held: TypeAlias = SavedStorage | Moved | Compound


class CompiledBackward:
    """What one backward of compiled autograd unpacks.

    `packed` is what autograd holds for all that this backward unpacks, also for other hooks than ours.  Only the
    callback that autograd calls at the end refers to this object strongly; an exception in the backward drops it.
    """

    __slots__ = ("__weakref__", "_saved", "_state", "_task", "_unpacked")

    def __init__(self, task: int, packed: Sequence[Any]) -> None:
        self._task = task
        ended: list[Any] = []
        self._state: CompiledState = ended, weakref.ref(self, ended.append)
        self._saved: dict[tuple[object, int], list[_Held]] = defaultdict(list)
        self._unpacked: list[_Held] = []  # of no layer
        for saved in packed:
            if isinstance(saved, _Held):
                self._saved[_place(saved)].append(saved)
            elif isinstance(saved, tuple) and len(saved) == 4 and isinstance(saved[2], LivenessToken):
                alias, version, token, _ = saved
                if version_of(alias) != version:  # [guard: in-place edit before a compiled backward]
                    raise changed(alias, alias.size(), version)
                token.checked = self._state

    @staticmethod
    def running() -> CompiledBackward | None:
        """Return the backward of compiled autograd that runs in this thread, if one does."""
        packed = compiled_backward()
        if packed is None:
            return None
        task, found = backward_id(), _running.get(id(packed))
        if found is None:
            found = _running[id(packed)] = CompiledBackward(task, packed)
            after_backward(found._end)
            for owner, index in [place for place in found._saved if place[1] == OUTSIDE]:
                found._unpacked += found._unpack(owner, index)
        return found if found._task == task else None  # a plain backward may run inside of it

    def unpack(self, owner: object, layer: Layer) -> None:
        """Unpack what a layer of a pass saved."""
        layer.unpacked += [weakref.ref(saved) for saved in self._unpack(owner, layer.index)]

    def _unpack(self, owner: object, index: int) -> list[_Held]:
        found = self._saved.pop((owner, index), [])
        for saved in found:
            saved.unpacked = *self._state, saved.unpack()
        return found

    def _end(self) -> None:
        """Free what was unpacked; the layers do that for what they saved."""
        for saved in self._unpacked:
            saved.unpacked = None


_running: weakref.WeakValueDictionary[int, CompiledBackward] = weakref.WeakValueDictionary()


def _place(saved: Any) -> tuple[object, int]:
    """Return the pass and the layer with which a tensor is reloaded."""
    while isinstance(saved, Compound):
        saved = next((part for part in saved.parts.values() if not isinstance(part, tuple)), None)
    if saved is None:  # all parts are kept
        return None, OUTSIDE
    storage = saved if isinstance(saved, SavedStorage) else saved.storage
    return saved.owner, min(storage.layers) if saved.index == OUTSIDE else saved.index
