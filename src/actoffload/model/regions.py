"""Which calls of groups are recomputed in backward, and what of them is saved."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .._folding import fold_names
from .._torch.autograd import in_transform, saved_tensor_hooks
from .._torch.compiling import opaque
from .._torch.tensors import tree_leaves
from ..engine.pack import Saved
from ..engine.unpack import unpack
from ..recompute import (
    GENERATORS,
    OBJECTS,
    Reads,
    Region,
    Reuse,
    State,
    Structures,
    Trace,
    Watch,
    flags_of,
    in_pipeline_stage,
    never,
    objects_among,
    recomputed,
    tensors_inside,
)
from .conduct import DROPPED, Conduct, FollowedModule, group_name

__all__ = ["Regions"]

AROUND = "because they are called under saved-tensor hooks of the program, such as those of torch.utils.checkpoint"
INSIDE = "because other groups or kept modules are inside of them"
FUNCTIONAL = "because they are called with other parameters, by torch.func.functional_call"
COMMUNICATES = (
    'because they communicate with other ranks, and with recompute="auto" each of these decides for itself; with '
    "recompute=True all of them recompute all groups"
)
CAPTURED = "because a CUDA graph is captured, and they may draw random numbers"
GRAPHS = "because objects that are passed to them contain tensors with gradients, which the program may replace"
LAZY = "because their parameters are not initialized before the first forward"
TRANSFORM = "because they are called inside of a transform of torch.func"

TRACED = "traced"  # the first recomputed call, which saves no outputs

WITHOUT_CACHE = (
    f"Modules of this model cannot be recomputed in backward, {OBJECTS}: offloading alone has to make room, which may "
    "take several times as long. Transformers models train without a cache after model.config.use_cache = False."
)


def _unpack_unless_edited(saved: Saved) -> torch.Tensor | None:
    """Return a tensor that was packed, or None if it was written to since."""
    try:
        return unpack(saved)
    except RuntimeError:
        return None


_FUNCTIONAL = {
    inspect.unwrap(of).__code__ for of in (torch.func.functional_call, torch.nn.utils.stateless.functional_call)
}


def _in_functional_call() -> bool:
    frame: FrameType | None = sys._getframe(1)  # its own frame would refer to itself, and be kept by an interrupt
    while frame is not None and frame.f_code not in _FUNCTIONAL:
        frame = frame.f_back
    return frame is not None


def _recomputed(region: Region, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return recomputed(function, region, *args, **kwargs)


opaque(_recomputed)


class Regions:
    """What is known of the groups among the followed modules of a model."""

    def __init__(self, modules: Sequence[FollowedModule]) -> None:
        self._modules = modules
        self._alone: dict[int, bool] = {}  # by group
        self._owners: Counter[int] | None = None  # by the identity of a parameter: modules that have it
        # By group: calls in the forward before, and in this one.
        self._before, self._now = Counter[int](), Counter[int]()
        self._autocast = True  # the program began autocast before the forward
        self._structures = Structures()
        self._reads: dict[int, Reads] = {}
        self._traces: dict[tuple[int, Hashable], Trace] = {}  # by group and structure
        self._reuses: dict[tuple[int, Hashable], Reuse] = {}  # the same, of calls in stages of a pipeline
        self._watches: dict[Hashable, Watch] = {}  # by structure
        self._latest: dict[int, tuple[str, Watch | None]] = {}  # by group: what decided on its latest call

    def around(
        self,
        of: FollowedModule,
        conduct: Conduct,
        pack: Callable[[torch.Tensor], Any] | None,
        args: Any,
        kwargs: Any,
        *,
        stream: Callable[[], Any] = lambda: None,
        capturing: bool = False,
        compiled: bool = False,
        warn: Callable[[str], object],
        note: Callable[[Hashable], object] = lambda way: None,
    ) -> Callable[..., Any] | None:
        """Return what a function is passed to that calls a group; None if the program may call it.

        The first call of a structure is watched.  The others are recomputed if that is possible, and save with `pack`
        or on the device.  `compiled`: it is called in a model that is compiled as a whole.  `warn` gets the reason
        against it where the program can remove that, and `note` what decides which outputs a call that is recomputed
        saves.
        """
        policy = conduct.recompute.get(of.group)
        if policy is None or not torch.is_grad_enabled():
            return None
        self._now[of.group] += 1
        obstacle = self._obstacle(of)
        if obstacle:
            self._latest[of.group] = obstacle, None
            return None
        module = of.module
        structure = self._structures.of(module)
        leaves = tree_leaves((args, kwargs))
        # [guard: generator that the first call may not show]
        if structure.generators or torch.Generator in map(type, leaves):
            self._latest[of.group] = GENERATORS, None
            return None
        key = structure.kind, flags_of(leaves), compiled  # [guard: flags among the arguments of a call]
        watch = self._watches.get(key)
        if watch is None or watch.reason is None:
            if any(map(is_lazy, structure.weights())):  # [guard: parameters of lazy modules]
                self._latest[of.group] = LAZY, None
                return None
            before = self._latest.get(of.group, ("", None))[1]
            watch = self._watches[key] = Watch(module, compiled=compiled, after=before)
        self._latest[of.group] = "", watch
        if watch.reason is None:
            return watch
        if watch.reason:  # [guard: group that must not be recomputed]
            if watch.reason is OBJECTS:
                warn(WITHOUT_CACHE)
            return None
        objects = objects_among(leaves)
        # [guard: objects with a graph]
        if objects and any(part.requires_grad for part in tensors_inside(objects)):
            self._latest[of.group] = GRAPHS, None
            return None
        if conduct.apart and watch.communicates:  # [guard: group that other ranks do not recompute]
            self._latest[of.group] = COMMUNICATES, None
            return None
        if capturing and watch.draws:  # [guard: random numbers in a captured graph]
            self._latest[of.group] = CAPTURED, None
            return None
        # [guard: compiled group]
        if policy is not never and watch.compiled:
            policy = never  # compiled code is one operator
        reads, trace = self._reads.setdefault(of.group, Reads()), self._traces.setdefault((of.group, key), Trace())
        note(policy if policy is never or trace.known else TRACED)
        state = State(module, structure, watch.writers)
        timed = None if conduct.operators is None else conduct.operators.of(of.group, reads, trace)
        packing: dict[str, Any] = {} if pack is None else {"pack": pack, "unpack": _unpack_unless_edited}
        # The state of a generator cannot be read while a graph is captured; then no random number is drawn.
        alone = trace.casts_once and self._reads_alone(of.group, structure.weights())
        region = Region(
            policy,
            **packing,
            reads=reads,
            trace=trace,
            state=state,
            timed=timed,
            alone=alone,
            stream=stream,
            draws=not capturing,
            reuse=self._reuses.setdefault((of.group, key), Reuse()) if in_pipeline_stage() else None,
            name=f"the group '{group_name(of.name)}' ({type(module).__name__})",
        )
        return partial(_recomputed, region)

    def forward_begins(self, *, autocast: bool) -> None:
        """Note that a forward of the model begins; `autocast`: in a block that may have other forwards inside."""
        self._before, self._now, self._autocast = self._now, Counter(), autocast

    def _reads_alone(self, group: int, weights: Iterable[torch.Tensor]) -> bool:
        """Return whether nothing but one call of a group reads its parameters in a forward."""
        if self._owners is None:
            modules = self._modules[0].module.modules()
            self._owners = Counter(id(weight) for each in modules for weight in each._parameters.values())
        owners, calls = self._owners, (self._before[group], self._now[group])
        if self._autocast or calls != (1, 1):  # [guard: casts that another forward reads -> False]
            return False
        return all(owners[id(weight)] == 1 for weight in weights)

    def _obstacle(self, of: FollowedModule) -> str:
        """Return why a call of a group that begins now cannot be recomputed; empty if it can."""
        hooks = saved_tensor_hooks()
        if hooks is not None and hooks[1] is not unpack:  # [guard: group that the program checkpoints]
            return AROUND
        if in_transform(vmap=True):  # [guard: group inside of vmap]
            return TRANSFORM
        if _in_functional_call():  # [guard: functional call]
            return FUNCTIONAL
        return "" if self._is_alone(of) else INSIDE  # [guard: group with others inside -> True]

    def _is_alone(self, of: FollowedModule) -> bool:
        """Return whether no other module inside of a group is followed: what it saves has a place of its own."""
        if of.group not in self._alone:
            inside = {*of.module.modules()} - {of.module}
            others = {each.ref() for each in self._modules[1:] if each.role is not DROPPED}
            self._alone[of.group] = inside.isdisjoint(others)
        return self._alone[of.group]

    def refusals(self) -> str:
        """Return which groups are not recomputed though they should be, and why, in sentences; empty if all are."""
        names: dict[str, list[str]] = {}
        for name, reason in self.refused().items():
            names.setdefault(reason, []).append(name)
        return " ".join(f"Not recomputed, {reason}: {fold_names(of)}." for reason, of in names.items())

    def refused(self) -> dict[str, str]:
        """Return why groups are not recomputed though they should be, by name."""
        found = {}
        for of in self._modules:
            obstacle, watch = self._latest.get(of.group, ("", None))
            reason = obstacle or (watch and watch.reason)
            if reason:
                found[group_name(of.name)] = reason
        return found
