"""The parameters and buffers that modules own: of the calls that run, of a model, and of a group of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module, Parameter
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy

from .._torch.modules import RESHARD, registered
from .._torch.tensors import address
from .statistics import Reason
from .subclasses import plain_parts

__all__ = ["GroupTensors", "ModelTensors", "ModuleTensors", "unwatch", "watch"]

_Place: TypeAlias = tuple[Mapping[str, torch.Tensor | None], str, Reason]
"""The table of a module in which a tensor is, its name there, and why it is kept."""


class ModuleTensors:
    """The parameters and buffers of the modules that run in one layer, by the address of their storage."""

    __slots__ = ("_entered", "_places")

    def __init__(self) -> None:
        self._entered: dict[Module, None] = {}  # since the last question
        self._places: dict[int, _Place] = {}

    def enter(self, module: Module) -> None:
        """Note that the forward of a module begins, or that it gets another parameter or buffer."""
        self._entered[module] = None

    def forget(self) -> None:
        """Drop the references to the modules; the layer has ended."""
        self._entered.clear()
        self._places.clear()

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at an address is kept, or None if no module owns it."""
        if self._entered:
            # A sharding wrapper replaces parameters in a hook before the forward of its module, those of inner modules
            # too.  So the tables of a module are read again each time that it has been entered.
            modules: dict[Module, None] = {}
            for root in self._entered:
                if root not in modules:
                    modules.update(dict.fromkeys(_modules_in(root)))
            self._places.update(_places(modules))
            self._entered.clear()
        place = self._places.get(key)
        if place is None:
            return None
        table, name, reason = place
        tensor = table.get(name)  # another tensor may be in its place now
        return reason if tensor is not None and key in _addresses(tensor) else None


def _places(modules: Iterable[Module]) -> dict[int, _Place]:
    """Return where the parameters and buffers of modules are, by the address of their storage."""
    found: dict[int, _Place] = {}
    for module in modules:
        parameters, buffers, _ = registered(module)
        for table, reason in ((parameters, Reason.PARAMETER), (buffers, Reason.BUFFER)):
            for name, tensor in table.items():
                if tensor is not None:
                    for key in _addresses(tensor):
                        found[key] = table, name, reason
    return found


def _modules_in(root: Module) -> list[Module]:
    """Return a module and all that are in it, each once; what `Module.modules` yields, many times faster."""
    found = {root: None}
    waiting = [root]
    while waiting:
        for child in registered(waiting.pop())[2].values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


class _Running(threading.local):
    """The layers whose modules run in this thread, innermost last."""

    def __init__(self) -> None:
        self.layers: list[ModuleTensors] = []


_running = _Running()


def _entered(module: Module, *more: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _running.layers:
        _running.layers[-1].enter(module)


class ModuleCalls:
    """Calls `_entered` with each module whose forward begins, or that gets a parameter or buffer, while it has users.

    The hooks keep their keys: a compiled module is compiled again when the key of a global hook changes.
    """

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._installed = False

    def add_user(self, user: object) -> None:
        """Call it from here on."""
        with self._lock:
            self._users.add(user)
            if self._installed:
                return
            for handle in self._handles:
                handle.hooks_dict_ref()[handle.id] = _entered
            for register in (
                global_hooks.register_module_forward_pre_hook,
                global_hooks.register_module_parameter_registration_hook,
                global_hooks.register_module_buffer_registration_hook,
            )[len(self._handles) :]:
                self._handles.append(register(_entered))
            self._installed = True

    def remove_user(self, user: object) -> None:
        """Call it no more if this was the last user; may be repeated after an interrupt."""
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._installed = False
                for handle in self._handles:
                    handle.remove()


_calls = ModuleCalls()


def watch(owned: ModuleTensors) -> None:
    """Note every module that runs in this thread, until `unwatch`."""
    _running.layers.append(owned)
    _calls.add_user(owned)


def unwatch(owned: ModuleTensors) -> None:
    """Note no more modules, and drop those that were noted; may be repeated after an interrupt."""
    if owned in _running.layers:
        _running.layers.remove(owned)
    owned.forget()
    _calls.remove_user(owned)


def _addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where a tensor's memory is, or that of its parts."""
    kind = type(tensor)
    if kind is Parameter or kind is torch.Tensor:
        return (address(tensor.untyped_storage()),) if tensor.layout is torch.strided else ()
    if is_lazy(tensor):
        return ()
    return tuple(address(part.untyped_storage()) for part in plain_parts(tensor) if part.layout is torch.strided)


class _Read(NamedTuple):
    """What the tables of a model held.

    There is no reference to a tensor, also no weak one: `torch.utils.swap_tensors` refuses tensors that have any.
    """

    modules: list[weakref.ref[Module]]
    children: list[int]  # identities of the modules in the tables
    memory: list[_Memory]


_Memory: TypeAlias = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]
"""Where the parameters and the buffers of a module are."""


def _memory_of(tables: Iterable[tuple[Mapping[str, Any], ...]]) -> list[_Memory]:
    """Return where the parameters and buffers in the tables of some modules are."""
    return [
        (
            [_addresses(tensor) for tensor in parameters.values() if tensor is not None],
            [_addresses(tensor) for tensor in buffers.values() if tensor is not None],
        )
        for parameters, buffers, _ in tables
    ]


def _children_in(tables: Iterable[tuple[Mapping[str, Any], ...]]) -> list[int]:
    """Return the identities of the modules in the tables of some modules."""
    return [id(child) for _, _, children in tables for child in children.values()]


class ModelTensors:
    """The parameters and buffers of a model, by the address of their storage, as of the first question of a pass.

    To read all tables of a model takes about as long as to pack all that a layer saves.  So what an earlier pass has
    read is used again if every table still holds the same modules, and tensors in the same memory.
    """

    def __init__(self, model: Module, earlier: ModelTensors | None = None) -> None:
        self._model = weakref.ref(model)
        # A pass that asked nothing read nothing.
        self._earlier: ModelTensors | None = (
            earlier if earlier is None or earlier._reasons is not None else earlier._earlier
        )
        self._reasons: dict[int, Reason] | None = None
        self._read_from: _Read | None = None
        self.sharded = False

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at an address is kept, or None if the model did not own it."""
        if self._reasons is None:
            earlier, self._earlier = self._earlier, None
            if earlier is not None and earlier._is_current():  # [guard: tensors of an earlier pass -> True]
                self._reasons, self._read_from = earlier._reasons, earlier._read_from
            else:
                self._read()
        assert self._reasons is not None
        return self._reasons.get(key)

    def _read(self) -> None:
        model = self._model()
        modules = [] if model is None else _modules_in(model)
        self._reasons = {key: reason for key, (_, _, reason) in _places(modules).items()}
        self.sharded = any(hasattr(kind, RESHARD) for kind in {type(module) for module in modules})
        if self.sharded:  # parameters are replaced in each pass
            return
        tables = list(map(registered, modules))
        self._read_from = _Read(list(map(weakref.ref, modules)), _children_in(tables), _memory_of(tables))

    def _is_current(self) -> bool:
        """Return whether the model still holds what was read."""
        read = self._read_from
        if self._reasons is None or read is None:
            return False
        modules = [ref() for ref in read.modules]
        if None in modules:
            return False
        tables = list(map(registered, modules))  # type: ignore[arg-type]
        if _children_in(tables) != read.children:  # [guard: module added or replaced since]
            return False
        return _memory_of(tables) == read.memory  # [guard: memory of a parameter replaced since -> True]


class GroupTensors(ModuleTensors):
    """The parameters and buffers of the model, and those that a group of it got from a sharding wrapper meanwhile."""

    __slots__ = ("_group", "_model", "_samples")

    def __init__(self, group: Module | None, model: ModelTensors) -> None:
        super().__init__()
        self._group = group
        self._model = model
        self._samples: list[list[Any]] | None = None  # a sharded module, where a parameter of it is, which was there

    def forget(self) -> None:
        """Drop the references to the modules; the group has ended."""
        super().forget()
        self._group = self._samples = None

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at an address is kept, or None if neither owns it."""
        found = self._model.reason(key)
        if found is not None or not self._model.sharded or self._group is None:
            return found
        if self._samples is None:
            self.enter(self._group)
            self._samples = [[unit, *where, None] for unit in _modules_in(self._group) if (where := _sample(unit))]
        for sample in self._samples:
            unit, table, name, before = sample
            sample[3] = table.get(name)
            if sample[3] is not before:  # all parameters of a sharded module are replaced together
                self.enter(unit)
        return super().reason(key)


def _sample(unit: Module) -> tuple[Mapping[str, Any], str] | None:
    """Return where a parameter is that is sharded with a module; None for modules that are not sharded themselves."""
    waiting = [unit] if hasattr(type(unit), RESHARD) else []
    while waiting:
        parameters, _, children = registered(waiting.pop())
        if parameters:
            return parameters, next(iter(parameters))
        waiting += [child for child in children.values() if child is not None and not hasattr(type(child), RESHARD)]
    return None
