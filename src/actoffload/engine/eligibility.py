"""Which saved tensors stay on the device, each with a reason: weights and buffers above all.

A mark of the program is found by the address of its storage.  It holds a weak reference, which keeps the address from
being given to another storage, so a mark never applies to another storage.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.nn import Module, Parameter
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy

from .._torch.modules import RESHARD, registered
from .._torch.subclasses import Wrappers, has_parts, parts_of, plain_parts, unchanged
from .._torch.tensors import CASTS, address, base_of, is_freed, storage_expired, storage_weakref, version_of
from ..device.base import Backend, StreamPosition
from .host_pool import Resources
from .layout import View
from .statistics import Reason

MIN_ELEMENTS = 256 * 1024
"""Smaller tensors stay: a copy of them costs more time than it saves memory (Transformer Engine's limit)."""

LARGEST_ELEMENT = 16  # [guard: largest element]


class Limit(NamedTuple):
    """Tensors with fewer elements, or fewer bytes, stay."""

    elements: int
    nbytes: int

    @property
    def surely(self) -> int:
        """A number of elements with fewer of which a tensor stays, whatever its type."""
        return max(self.elements, -(-self.nbytes // LARGEST_ELEMENT))


def stays(tensor: torch.Tensor, backend: Backend, owned: ModuleTensors, limit: Limit) -> Reason | None:
    """Return why a saved tensor without a class of its own is kept on the device, or None if it can be offloaded."""
    count = tensor.numel()
    if count < limit.elements or count * tensor.itemsize < limit.nbytes:
        return Reason.SMALL
    if tensor.device.type != backend.type:
        return Reason.DEVICE
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return Reason.LAYOUT
    needs_gradient, base = tensor.requires_grad, base_of(tensor)
    if (base is not None or needs_gradient) and (reason := tied(tensor)) is not None:
        return reason
    # The local part of a DTensor parameter requires a gradient, as a view of what requires none.
    if not needs_gradient or (base is not None and not base.requires_grad):
        reason = owned.reason(address(tensor.untyped_storage()))
        if reason is not None:
            return reason
    if kept and address(tensor.untyped_storage()) in kept:
        return Reason.MARKED
    if 0 in tensor.stride():
        distinct = View.of(tensor).covered
        if distinct < limit.elements * tensor.itemsize or distinct < limit.nbytes:
            return Reason.SMALL
    if is_freed(tensor):  # [guard: tensor whose memory the program has freed]
        return Reason.FREED
    return None


def tied(tensor: torch.Tensor) -> Reason | None:
    """Return why a tensor stays that the graph ties to a leaf: it is one, a view of one, or a parameter's cast."""
    base = base_of(tensor)
    # Without a graph, as in the forward of an autograd function, PyTorch makes views that seem to be leaves.
    between = base is not None and base.grad_fn is not None  # [guard: views that functions save]
    for leaf in (tensor, base):
        if leaf is not None and leaf.is_leaf and not between:
            # Also a frozen one; asking whether something is a parameter takes long, and a plain tensor never is.
            if type(leaf) is not torch.Tensor and isinstance(leaf, Parameter):
                return Reason.PARAMETER
            if leaf.requires_grad:
                return Reason.LEAF
    # A parameter in another dtype, as autocast makes, or one that a backward has transposed.  Autocast is off inside of
    # the operations that it has cast for, so whether it is on says nothing.
    node = (tensor if base is None else base).grad_fn if tensor.requires_grad else None
    if node is not None and type(node).__name__ in CASTS:
        source = getattr(node.next_functions[0][0], "variable", None)
        return Reason.PARAMETER if isinstance(source, Parameter) else None
    return None


# Parameters and buffers of modules

_Place: TypeAlias = tuple[Mapping[str, torch.Tensor | None], str, Reason]
"""The table of a module in which a tensor is, its name there, and why it is kept."""


class ModuleTensors:
    """The parameters and buffers of the modules that run in one layer; for a group of a model, of that model."""

    __slots__ = ("_entered", "_group", "_model", "_places")

    def __init__(self, group: Module | None = None, model: ModelTensors | None = None) -> None:
        self._entered: dict[Module, None] = {}  # since the last question
        self._places: dict[int, _Place] = {}
        self._group, self._model = group, model

    def enter(self, module: Module) -> None:
        """Note that the forward of a module begins, or that it gets another parameter or buffer."""
        self._entered[module] = None

    def forget(self) -> None:
        """Drop the references to the modules; the layer has ended."""
        self._entered.clear()
        self._places.clear()
        self._group = None

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at an address is kept, or None if no module owns it."""
        if self._model is not None:
            found = self._model.reason(key)
            if found is not None or not self._model.sharded or self._group is None:
                return found
            self.enter(self._group)  # modules in it may have got their parameters since the last question
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
    """The contexts that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.layers: list[ModuleTensors] = []  # what the modules own that run in them, except in those of models
        self.backends: list[Backend] = []


running = _Running()


def is_cpu_offload_enabled() -> bool:
    """Return whether the calling thread is inside an enabled offloading context."""
    return bool(running.backends)


def _entered(module: Module, *more: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and running.layers:
        running.layers[-1].enter(module)


class ModuleCalls:
    """Calls `_entered` with each module whose forward begins, or that gets a parameter or buffer, in a layer."""

    def __init__(self) -> None:
        self._layers: set[ModuleTensors] = set()
        self._lock = threading.Lock()
        self._handles: list[Any] = []

    def watch(self, owned: ModuleTensors) -> None:
        """Note every module that runs in this thread, until `unwatch`."""
        running.layers.append(owned)
        self.add_user(owned)

    def unwatch(self, owned: ModuleTensors) -> None:
        """Note no more modules, and drop those that were noted; may be repeated after an interrupt."""
        if owned in running.layers:
            running.layers.remove(owned)
        owned.forget()
        self.remove_user(owned)

    # No interrupt comes between the bytecodes that take a lock.  Those of other functions are tried one by one.

    def add_user(self, owned: ModuleTensors) -> None:
        """Install the hooks, with the keys of before: a compiled module is compiled again when a key changes."""
        with self._lock:
            self._layers.add(owned)
            for handle in self._handles:
                handle.hooks_dict_ref()[handle.id] = _entered
            for register in (
                global_hooks.register_module_forward_pre_hook,
                global_hooks.register_module_parameter_registration_hook,
                global_hooks.register_module_buffer_registration_hook,
            )[len(self._handles) :]:
                self._handles.append(register(_entered))

    def remove_user(self, owned: ModuleTensors) -> None:
        """Remove the hooks, if no other layer needs them."""
        with self._lock:
            self._layers.discard(owned)
            if not self._layers:
                for handle in self._handles:
                    handle.remove()


module_calls = ModuleCalls()


def _addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where a tensor's memory is, or that of its parts."""
    kind = type(tensor)
    if kind is Parameter or kind is torch.Tensor:
        return (address(tensor.untyped_storage()),) if tensor.layout is torch.strided else ()
    if is_lazy(tensor):
        return ()
    return tuple(address(part.untyped_storage()) for part in plain_parts(tensor) if part.layout is torch.strided)


class ModelTensors:
    """The parameters and buffers of a model, by the address of their storage, as of the first question of a pass.

    Reading all tables of a model takes longer than packing all that its layers save.  So once two passes in a row have
    read the same, one of `TRUSTED` passes reads.  Until then, memory that has just become a buffer may be copied.
    """

    TRUSTED = 8

    def __init__(self, model: Module, earlier: ModelTensors | None = None) -> None:
        # No reference to a tensor, also no weak one: `torch.utils.swap_tensors` refuses tensors that have any.
        self._model = weakref.ref(model)
        # A pass that asked nothing read nothing.
        self._earlier: ModelTensors | None = (
            earlier if earlier is None or earlier._reasons is not None else earlier._earlier
        )
        self._reasons: dict[int, Reason] | None = None
        self._trusted = 0  # number of later passes that use it as it is
        self.sharded = False  # parameters are replaced in each pass

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at an address is kept, or None if the model did not own it."""
        if self._reasons is None:
            earlier, self._earlier = self._earlier, None
            if earlier is not None and earlier._trusted:
                self._reasons, self._trusted = earlier._reasons, earlier._trusted - 1
            else:
                self._read()
                # [guard: tensors of an earlier pass -> True]
                if earlier is not None and not self.sharded and self._reasons == earlier._reasons:
                    self._trusted = self.TRUSTED - 1
        assert self._reasons is not None
        return self._reasons.get(key)

    def _read(self) -> None:
        model = self._model()
        modules = [] if model is None else _modules_in(model)
        self._reasons = {key: reason for key, (_, _, reason) in _places(modules).items()}
        self.sharded = any(hasattr(kind, RESHARD) for kind in {type(module) for module in modules})


# Marks of the program


class StorageRef:
    """A weak reference to a storage; it keeps the address and not the memory."""

    __slots__ = ("__weakref__", "_resources")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._resources = Resources.of(self, storage_weakref(storage))

    @property
    def expired(self) -> bool:
        """Whether the memory is freed."""
        return storage_expired(self._resources.weak)


class Final(StorageRef):
    """A storage was final at a position of its stream."""

    __slots__ = ("ready", "version", "whole", "wrappers")

    def __init__(self, tensor: torch.Tensor, ready: StreamPosition, *, whole: bool, wrappers: Wrappers = ()) -> None:
        super().__init__(tensor.untyped_storage())
        self.version, self.ready, self.whole, self.wrappers = version_of(tensor), ready, whole, wrappers


M = TypeVar("M", bound=StorageRef)
_marks_lock = threading.Lock()


class Marks(dict[int, M]):
    """Marks of storages by address; the caller of a look-up holds the storage that lies there now."""

    def __init__(self) -> None:
        super().__init__()
        self._sweep_at = 64

    def add(self, storage: torch.UntypedStorage, mark: M) -> None:
        """Add the mark of a storage, and now and then drop those of storages that are gone."""
        with _marks_lock:
            self[address(storage)] = mark
            if len(self) >= self._sweep_at:  # [guard: sweep of marks]
                for key in [key for key, each in self.items() if each.expired]:
                    del self[key]
                self._sweep_at = 2 * len(self) + 64


kept = Marks[StorageRef]()
finals = Marks[Final]()


def mark_kept(tensor: torch.Tensor) -> None:
    """Note that a tensor's storage stays on the device."""
    storage = tensor.untyped_storage()
    kept.add(storage, StorageRef(storage))  # [keep: address of a marked storage]


def mark_not_offload(*tensors: Any) -> None:
    """Keep tensors on the device when autograd saves them.

    The mark belongs to the storage: it applies to every view, also to earlier ones, and ends when the storage is freed.
    Of an object with several tensors it applies to each.

    Parameters
    ----------
    *tensors : torch.Tensor, object or None
        Tensors of any shape, also subclasses with ``__tensor_flatten__``; objects with ``prepare_for_saving`` and
        ``restore_from_saved``, or with ``get_data_tensors``.  None is skipped.

    Raises
    ------
    TypeError
        If an argument is none of these.

    Notes
    -----
    As in Transformer Engine's PyTorch API, whose quantized tensors are such objects.

    Examples
    --------
    >>> hidden = torch.randn(512, 1024)
    >>> actoffload.mark_not_offload(hidden, hidden.t())
    """
    for value in _checked(tensors, "mark_not_offload"):
        for tensor, _ in parts_of(value):
            if tensor.layout is torch.strided:  # others are kept anyway, and have no storage
                mark_kept(tensor)


def start_offload(*tensors: Any, offload_base_tensor: bool = False) -> None:
    """Let the copies of final tensors start here, before autograd saves them, as in Transformer Engine's PyTorch API.

    A copy normally waits for all work that is on the current stream when the tensor is saved.  A fused function saves
    its tensors at its end; with this call after each was computed, the copies start earlier.  An in-place change
    afterwards cancels the call.  Outside of an enabled context, and for tensors that are never saved, it does nothing.

    Parameters
    ----------
    *tensors : torch.Tensor, object or None
        As for `mark_not_offload`, on the offloading device.
    offload_base_tensor : bool
        Offload the whole storage of each tensor even if the saved view covers little of it, such as the interleaved
        query, key and value of one projection.
    """
    found = _checked(tensors, "start_offload")
    if not is_cpu_offload_enabled():
        return
    backend = running.backends[-1]
    for tensor, wrappers in (part for value in found for part in parts_of(value)):
        if tensor.device.type == backend.type and tensor.layout is torch.strided:
            stream = backend.current_stream(backend.place(tensor))
            ready = StreamPosition(backend.record(stream), 0, backend.capturing())
            # [keep: address of a final storage]
            note = Final(tensor, ready, whole=offload_base_tensor, wrappers=wrappers)
            finals.add(tensor.untyped_storage(), note)


def _checked(values: Iterable[Any], name: str) -> list[Any]:
    """Return the arguments of a function that are not None."""
    found = [value for value in values if value is not None]
    for value in found:
        if not has_parts(value):
            raise TypeError(
                f"{name} got a {type(value).__name__}; expected tensors, objects with prepare_for_saving and "
                "restore_from_saved, objects with get_data_tensors, or None."
            )
    return found


def take_final(key: int, version: int) -> Final | None:
    """Return the note on the storage at an address, unless it was changed since."""
    note = finals.get(key)
    if note is None or not unchanged(note.wrappers):
        return None
    if note.version != version:  # [guard: edit after start_offload]
        return None
    return note
