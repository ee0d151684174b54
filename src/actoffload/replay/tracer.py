"""Trace one call of a module with a dispatch mode."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from .._torch import find
from .._torch.modules import opaque, registered
from .._torch.subclasses import plain_parts
from .._torch.tensors import (
    DispatchMode,
    address,
    base_of,
    current_dispatch_mode,
    free_storage_weakref,
    has_own_dispatch,
    no_torch_dispatch,
    storage_behind,
    storage_weakref,
)
from ..engine.layout import View
from .policy import Policy, Rules, out_of_place, rules_of
from .trace import (
    PLAIN,
    UNKNOWN,
    Entry,
    FunctionCall,
    Node,
    Place,
    RngPosition,
    Trace,
    Value,
    Weight,
    key_of,
    same,
    states_of_python,
)

_aten = torch.ops.aten
_COPY, _HOST_READS = _aten._to_copy.default, {_aten._local_scalar_dense.default, _aten.equal.default}

GENERATED = "GeneratedBackwardFor_"
"""Beginning of the names of the functions that `torch.library.register_autograd` makes; they call their operator."""
_STANDING_IN = tuple(
    kind
    for name in ("fake_tensor.FakeTensor", "functional_tensor.FunctionalTensor")
    if (kind := find(f"_subclasses.{name}")) is not None
)
"""Classes of the tensors with which higher-order operators are traced; they compute nothing."""
_CONSTANTS = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.Size)
)


_thread = threading.local()
_Base: Any = object if DispatchMode is None else DispatchMode


class Tracer(_Base):  # type: ignore[misc]
    """Records one call of a module: a dispatch mode, hooks on the calls inside, and a look at autograd functions.

    `inputs` are the tensors among its arguments.  The `policy` sees each operator.  `stream` returns the current
    stream: what runs on another one than the first is not run again.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without the wrapper of `torch.compiler.disable`, which takes microseconds for each operator."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such."""
        return True

    def __init__(self, module: Module, inputs: Sequence[Tensor], policy: Policy, stream: Callable[[], Any]) -> None:
        super().__init__()
        self._modules = {inner: name for name, inner in module.named_modules()}
        self._policy, self._stream, self._at = policy, stream, stream()
        self._ids: dict[int, int] = {}  # values, by the address of the storage
        self._weak: list[Any] = []  # weak references to the storages, which keep their addresses and not their memory
        self._weights: dict[int, tuple[Weight, View]] = {}
        self._counts: defaultdict[str, count[int]] = defaultdict(count)
        self._function: _RunningFunction | None = None  # that runs now
        self._generated = False  # a function that PyTorch made for an operator runs
        self._first: dict[Any, int] = {}  # values, by what makes them
        self._twins: dict[int, int] = {}  # the first of the values that are equal to others, by these
        self._calls: list[Module] = []  # of modules inside, in progress
        self._thread = threading.get_ident()
        self.beginning, self._in_python = RngPosition.read(), states_of_python(self._modules)
        self.segment = 0
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.entries: list[Entry] = []
        self._handles: list[Any] = []
        for place, tensor in enumerate(inputs):
            if type(tensor) in PLAIN and _has_memory(tensor) and _address(tensor) not in self._ids:
                self._add(tensor, place, View.of(tensor))
        self._host_reads = self.paused = False  # paused: while the engine packs what is saved

    # Begin and end

    def begin(self) -> None:
        """Record from here on, in this thread."""
        # Calls of functions are seen, once for all: without a tracer it costs less than a tenth of a microsecond.
        if vars(torch.autograd.Function)["apply"] is _apply:
            torch.autograd.Function.apply = classmethod(_traced_apply)  # type: ignore[assignment]
        _thread.tracer = self
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(register_module_forward_hook(self._leave, always_call=True))
        self.__enter__()

    def end(self) -> None:
        """Record no longer; may be repeated after an interrupt."""
        while self._handles:
            self._handles.pop().remove()
        if current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        if getattr(_thread, "tracer", None) is self:
            _thread.tracer = None

    def result(self, outputs: Iterable[Tensor]) -> Trace:
        """Return what was recorded in a call that returned `outputs`."""
        returned = frozenset(self._ids.get(_address(each), UNKNOWN) for each in outputs if _has_memory(each))
        steady = not self._host_reads and self._in_python == states_of_python(self._modules)
        alive = [memory for weak in self._weak if (memory := storage_behind(weak)) is not None]
        sizes = {address(memory): memory.nbytes() for memory in alive}
        self._find_weights()
        freed = set[int]()
        for key, number in self._ids.items():
            value = self.values[number]
            shrunk = sizes.get(key, value.nbytes) < value.nbytes
            if not isinstance(value.origin, Weight):
                freed |= {number} if shrunk else set()
            # FSDP2 frees weights, and gathers them again.
            elif not shrunk and key not in self._weights:  # [guard: weights that are replaced for a time]
                value.origin = None  # `functional_call` has put a tensor in its place for the time of a call
        for number, value in enumerate(self.values):
            if number in freed or (isinstance(value.origin, Node) and not freed.isdisjoint(value.origin.reads)):
                value.origin = None
        return Trace(self.nodes, self.values, self.entries, returned, steady, self._count_drawn())

    def __del__(self) -> None:
        for weak in self._weak:
            free_storage_weakref(weak)

    def _enter(self, module: Module, args: Any) -> None:
        if self._sees_calls():
            self.segment += not self._calls
            self._calls.append(module)

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if self._sees_calls() and self._calls and self._calls[-1] is module:
            self._calls.pop()
            self.segment += not self._calls

    def _sees_calls(self) -> bool:
        # A branch of a higher-order operator is compiled.
        return not torch.compiler.is_dynamo_compiling() and threading.get_ident() == self._thread

    # Values

    def _add(self, tensor: Tensor, origin: Any = None, view: View | None = None) -> int:
        """Begin a value on the storage of a tensor."""
        memory = tensor.untyped_storage()
        key = address(memory)
        if key not in self._ids:
            self._weak.append(storage_weakref(memory))
        number = self._ids[key] = len(self.values)
        self.values.append(Value(memory.nbytes(), origin, view))
        return number

    def _value_of(self, tensor: Tensor) -> int:
        """Return the value of a plain tensor; what was not seen before is a weight, or from outside."""
        found = self._ids.get(_address(tensor))
        if found is not None:
            return found
        weight, cast = self._weight_at(tensor), _cast_weight(tensor)
        if weight is not None or cast is None or self._weight_at(cast) is None:
            return self._add(tensor, *weight or ())
        # Autocast made it in an earlier call, and has it in its cache.
        read = self._value_of(cast)
        value = self._add(tensor, view=View.of(tensor))
        place = Place(read, View.of(cast))
        self._add_node(_COPY, self._name(_COPY), (place,), {"dtype": tensor.dtype}, {value: 0}, [read])
        return value

    def _weight_at(self, tensor: Tensor) -> tuple[Weight, View] | None:
        # FSDP2 replaces parameters while modules run, so they are looked up when they are met.
        key = _address(tensor)
        if key not in self._weights:
            self._find_weights()
        return self._weights.get(key)

    def _find_weights(self) -> None:
        self._weights = {}
        for number, module in enumerate(self._modules):
            for table, tensors in enumerate(registered(module)[:2]):
                for name, tensor in tensors.items():
                    for part, plain in enumerate(() if tensor is None or is_lazy(tensor) else plain_parts(tensor)):
                        if _has_memory(plain):
                            weight = Weight(number, table, name, part), View.of(plain)
                            self._weights.setdefault(_address(plain), weight)

    # Operators

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it does."""
        kwargs = kwargs or {}
        if not PLAIN.issuperset(types):
            if any(issubclass(kind, _STANDING_IN) for kind in types):
                return operator(*args, **kwargs)
            if any(has_own_dispatch(kind) for kind in types):
                return NotImplemented  # a subclass runs operators on its parts, which come here
        if self.paused:  # [guard: copies of the engine in a traced call]
            return operator(*args, **kwargs)
        rules, function = rules_of(operator), self._function
        if function is not None:
            outputs = operator(*args, **kwargs)
            function.pure &= not (rules.draws_with(args, kwargs) or rules.communicates)
            self._write(rules, args, kwargs)
            return outputs
        name, reads = self._name(operator), list[int]()
        with_places = tuple([self._with_places(each, reads) for each in args])
        named = {key: self._with_places(each, reads) for key, each in kwargs.items()}
        counterpart = self._find_counterpart(operator, with_places, args) if rules.writes else None
        drawn = self._count_drawn() if rules.draws_with(args, kwargs) else None
        first = len(self.values)
        outputs = operator(*args, **kwargs)
        if counterpart is None:
            self._write(rules, args, kwargs)
        if operator in _HOST_READS or (operator is _COPY and outputs.is_cpu and not args[0].is_cpu):
            self._host_reads = True  # [guard: calls that follow what the host reads]
        self._policy.see(operator, name, args, kwargs, outputs)
        replayable = (
            (drawn is None or 0 <= drawn < self._count_drawn())  # from the generator of the GPU
            and (rules.replayable or counterpart is not None)
            and UNKNOWN not in reads
            # what runs under no_grad may be edited before backward
            and (self._generated or torch.is_grad_enabled())
            and self._stream() == self._at
        )
        made, plain, _ = self._add_outputs(outputs, first)
        if plain and replayable:
            self._add_node(counterpart or operator, name, with_places, named, made, reads, drawn)
        return outputs

    def _name(self, operator: Any) -> str:
        return f"{operator}#{next(self._counts[str(operator)])}"

    def _count_drawn(self) -> int:
        return 0 if self.beginning is None else self.beginning.count_drawn()

    def _find_counterpart(self, operator: Any, places: Sequence[Any], args: Sequence[Any]) -> Any:
        """Return the operator that makes what another one is about to write; see [Note: values]."""
        counterpart = out_of_place(operator)
        place = places[0] if counterpart is not None and places else None
        if not isinstance(place, Place) or place.view != self.values[place.value].view:
            return None
        types = {each.dtype for each in args if isinstance(each, Tensor)} - {place.view.dtype, torch.bool}
        return None if types or not self._forget(args[0]) else counterpart

    def _forget(self, tensor: Tensor) -> bool:
        """Let a new value begin if a tensor covers all of one that an operator makes and nothing has saved."""
        number, view = self._ids.get(_address(tensor)), View.of(tensor)
        value = None if number is None else self.values[number]
        if value is None or not isinstance(value.origin, Node) or not view.dense or view.covered != value.nbytes:
            return False
        if any(entry.value == number for entry in self.entries):
            return False
        del self._ids[_address(tensor)]
        return True

    def _with_places(self, given: Any, reads: list[int]) -> Any:
        """Return an argument with `Place` instead of tensors, and add the values of these to `reads`."""
        if isinstance(given, Tensor):
            known = _is_plain(given) and _has_memory(given)
            value = self._value_of(given) if known else UNKNOWN
            reads.append(self._twins.get(value, value))
            return Place(reads[-1], View.of(given)) if known else None
        if isinstance(given, (list, tuple)) and any(isinstance(each, (Tensor, list, tuple)) for each in given):
            return [self._with_places(each, reads) for each in given]
        return given

    def _write(self, rules: Rules, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin new values where an operator has written."""
        for place, name in rules.writes:
            given = args[place] if place < len(args) else kwargs.get(name)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(tensor, Tensor) and _has_memory(tensor):
                    overwritten = self._ids.get(_address(tensor))
                    if overwritten is not None:
                        if not isinstance(self.values[overwritten].origin, Node):
                            self.values[overwritten].origin = None  # inputs and weights that are overwritten
                        if self._function is not None and overwritten < self._function.first:
                            self._function.pure = False
                    self._add(tensor)  # values that are written in place

    def _add_outputs(self, outputs: Any, first: int) -> tuple[dict[int, int], bool, bool]:
        """Begin the values that an operator has returned, before which there were `first` ones.

        Return their places among the outputs, whether all outputs are plain, and whether all are new.
        """
        made: dict[int, int] = {}
        plain = new = True
        for place, output in enumerate(outputs if isinstance(outputs, (list, tuple)) else (outputs,)):
            if type(output) not in PLAIN or not _has_memory(output):
                plain &= not isinstance(output, Tensor) or not output.numel()
                continue
            value = self._ids.get(_address(output))
            if value is None:
                value = self._add(output)
            if value >= first:
                self.values[value].view = self.values[value].view or View.of(output)
                made.setdefault(value, place)
            else:
                new = False
        return made, plain, new

    def _add_node(
        self, operator: Any, name: str, args: Any, kwargs: Any, places: Any, reads: list[int], drawn: int | None = None
    ) -> None:
        """Note an operator that can run again, in the innermost module that runs, as the origin of values."""
        made = [(place, value) for value, place in places.items() if self.values[value].origin is None]
        if not made:
            return
        module = self._modules.get(self._calls[-1], "") if self._calls else ""
        node = Node(operator, name, args, kwargs, made, tuple(dict.fromkeys(reads)), module, self.segment, drawn)
        for _, value in made:
            self.values[value].origin = node
        self.nodes.append(node)
        if (
            drawn is not None  # [guard: operators that draw]
            or isinstance(operator, FunctionCall)
            or len(made) > 1
            or made[0][0]
        ):
            return
        value, view = made[0][1], self.values[made[0][1]].view
        key = operator, view, key_of((args, tuple(sorted(kwargs.items()))))
        first = self._first.setdefault(key, value)
        if first != value and view is not None:  # see [Note: twins]
            self._twins[value] = first
            node.operator, node.args, node.kwargs, node.reads = same, (Place(first, view),), {}, (first,)

    # Functions

    def call_function(self, function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call a `torch.autograd.Function`, which is one operator; see [Note: functions]."""
        if self._function is not None or not torch.is_grad_enabled():
            return apply(function, *args, **kwargs)
        if function.__name__.startswith(GENERATED):
            self._generated = True
            try:
                return apply(function, *args, **kwargs)
            finally:
                self._generated = False
        call = FunctionCall(function, tuple(isinstance(each, Tensor) and each.requires_grad for each in args))
        name, reads = self._name(call), list[int]()
        places = tuple([self._with_places(each, reads) for each in args])
        before = states_of_python(self._modules)
        running = self._function = _RunningFunction(len(self.values))
        try:
            outputs = apply(function, *args, **kwargs)
        finally:
            self._function = None
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        known = [each for each in flat if type(each) in PLAIN and _has_memory(each)]
        for output in known if UNKNOWN in reads else ():
            self._value_of(output)  # a function with a subclass may return a part of a weight
        returned, given = set(map(_address, known)), zip(places, args, strict=True)
        written = (type(place) is Place and _address(each) in returned and self._forget(each) for place, each in given)
        call.scratch = tuple(k for k, is_written in enumerate(written) if is_written)
        made, plain, new = self._add_outputs(flat, running.first)
        for place, value in enumerate(running.saved, len(flat)):
            if value >= running.first:
                made.setdefault(value, place)
        replayable = (
            plain
            and new  # other functions that return an input, which they may change
            and running.pure
            and before == states_of_python(self._modules)  # functions that draw from Python or NumPy
            and UNKNOWN not in reads
            and not kwargs
            and all(map(self._lasts, args))
            and self._stream() == self._at
        )
        if replayable:
            self._add_node(call, name, places, {}, made, reads)
        return outputs

    def _lasts(self, given: Any) -> bool:
        """Return whether an argument of a function may be held, and means the same in later calls."""
        if isinstance(given, (list, tuple)):
            return all(map(self._lasts, given))
        if type(given) in _CONSTANTS or isinstance(given, Tensor):
            return True
        if type(given) is FunctionType:
            return given.__closure__ is None
        # [guard: objects with tensors among the arguments of functions] those of weights and modules remain
        owners = (each for module in self._modules for each in (module, *module.parameters(recurse=False)))
        return any(given is owner or any(given is each for each in vars(owner).values()) for owner in owners)

    # What autograd saves

    def save(self, tensor: Tensor) -> Entry:
        """Note a tensor that autograd saves."""
        function = self._function
        with no_torch_dispatch():
            elsewhere = self._stream() != self._at  # [guard: reads of another stream] backward would make it there
            is_weight = isinstance(tensor, Parameter) or isinstance(base_of(tensor), Parameter)
            has_memory = _has_memory(tensor)
            hidden = elsewhere or is_weight or not _is_plain(tensor) or not has_memory
            value = self._value_of(tensor) if has_memory and not (hidden and function is None) else UNKNOWN
            if function is not None:
                function.saved.append(value)
            view = None if hidden else View.of(tensor)
            by_function = function is not None and not hidden
            entry = Entry(UNKNOWN if hidden else value, view, self.segment, by_function, self._count_drawn())
            if not hidden:
                self.values[value].view = self.values[value].view or view
        self.entries.append(entry)
        return entry


@dataclass(slots=True)
class _RunningFunction:
    """A `torch.autograd.Function` whose forward runs."""

    first: int  # the values before are not its own
    pure: bool = True  # as far as its operators show, it draws no random numbers and writes to nothing from outside
    saved: list[int] = field(default_factory=list)  # the values that it saves


opaque(Tracer.__torch_dispatch__)


def remove_tracers() -> None:
    """Remove the tracers of this thread whose own removal an interrupt prevented."""
    tracer = getattr(_thread, "tracer", None)
    if tracer is not None:
        tracer.end()
    while isinstance(mode := current_dispatch_mode(), Tracer):
        mode.__exit__(None, None, None)


_apply = vars(torch.autograd.Function)["apply"]


def _traced_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    tracer = getattr(_thread, "tracer", None)
    if tracer is None:
        return _apply.__func__(function, *args, **kwargs)
    return tracer.call_function(function, _apply.__func__, args, kwargs)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is its memory and no more; the weights of bitsandbytes have a class, and are, too."""
    kind = type(tensor)
    return kind in PLAIN or (issubclass(kind, Parameter) and not has_own_dispatch(kind))


def _address(tensor: Tensor) -> int:
    return address(tensor.untyped_storage())


def _has_memory(tensor: Any) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _cast_weight(tensor: Tensor) -> Tensor | None:
    """Return the parameter that autocast has cast to a tensor, or None."""
    node = tensor.grad_fn
    if type(node).__name__ != "ToCopyBackward0" or base_of(tensor) is not None:
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)  # type: ignore[union-attr]
    return weight if type(weight) is Parameter and _has_memory(weight) else None
