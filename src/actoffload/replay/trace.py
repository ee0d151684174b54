"""What one call of a module computes: operators, the values that they make, and what autograd saves of them.

`[Note: values]`  A *value* is the content of one storage, named by a number.  Tensors on it are *places*: a value with
a type, size, stride and offset.  An operator that writes to a storage begins a new value, so a value never changes.
Where it writes all of a value that nothing has saved, as ``relu_`` does behind a convolution, its counterpart that
returns a new tensor makes the new value.
A value has a *maker*, the operator that returned its storage, or a *source*, an argument of the call or a weight of the
module.  What has neither is only known where autograd saves it: results of random operators, unless the numbers can be
drawn again, of factories such as ``empty``, which a kernel that dispatch does not see may fill, and tensors from
outside of the call.

`[Note: functions]`  A `torch.autograd.Function` is one operator, because its forward may launch kernels of its own.
Running it again means to call its ``forward`` with an empty context; what it saves counts as its outputs.

`[Note: twins]`  Autocast casts the input of three projections three times, and autograd saves each result.  An operator
that is called again with the same arguments makes the same value, so the program takes the first one in its place.  It
costs no time, and one of them is held, kept or offloaded in place of three.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..engine.layout import View

__all__ = [
    "UNKNOWN",
    "Entry",
    "FunctionCall",
    "Node",
    "Place",
    "Trace",
    "Value",
    "Weight",
    "leaves",
    "returns_one",
    "same",
    "with_twins",
]

UNKNOWN = -1


class Place(NamedTuple):
    """Where a tensor lies: a value, and the view of it."""

    value: int
    view: View


class Weight(NamedTuple):
    """A parameter or buffer, by the place of its module among the modules of the call and by its name there."""

    module: int
    table: int  # 0 for parameters, 1 for buffers
    name: str
    part: int  # of a tensor subclass


@dataclass(slots=True)
class Value:
    """The content of one storage."""

    nbytes: int
    maker: int = UNKNOWN  # the operator that makes it again; see [Note: values]
    source: int | Weight | None = None  # an argument of the call, by its place among the tensors; or a weight
    view: View | None = None  # how the tensor lies that the maker returns or the source is


@dataclass(slots=True, eq=False)
class Node:
    """One call of an operator that can be run again, with `Place` instead of tensors."""

    operator: Any
    name: str  # ``aten.mm.default#2``: the third call of the operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, int]]  # places among its outputs, and the values there
    reads: tuple[int, ...]  # values
    module: str  # the name of the module in which it ran
    segment: int  # as in `Entry`
    drawn: int | None = None  # random numbers of the call before its own, if it draws; see [Note: random numbers]


class Entry(NamedTuple):
    """One tensor that autograd saves in the call, in the order of saving."""

    value: int  # `UNKNOWN` for weights and what is no plain tensor
    view: View | None
    segment: int  # which of the modules directly inside of the group was running
    by_function: bool  # a `torch.autograd.Function` saves it, whose backward may write to it
    drawn: int = 0  # random numbers of the call before it was saved


@dataclass(slots=True, eq=False)
class Trace:
    """What one call of a module computes."""

    nodes: list[Node]
    values: list[Value]
    entries: list[Entry]
    returned: frozenset[int]  # values that the module returns
    steady: bool  # the host read no values and drew no random numbers, so another call may do the same
    drawn: int = 0  # random numbers of the whole call


class FunctionCall:
    """Calls the forward of a `torch.autograd.Function`; see [Note: functions]."""

    def __init__(self, function: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self.function, self._needs_input_grad = function, needs_input_grad

    def __repr__(self) -> str:
        return f"{self.function.__module__.partition('.')[0]}.{self.function.__qualname__}"

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Return the outputs, and behind them what it saves for backward."""
        context: Any = FunctionCtx()
        context.needs_input_grad = self._needs_input_grad
        function = self.function
        with torch.no_grad():
            if _has_setup_context(function):
                outputs = function.forward(*args)
                function.setup_context(context, args, outputs)
            else:
                outputs = function.forward(context, *args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, *(saved for saved in getattr(context, "to_save", ()) if saved is not None)


_plain_setup = getattr(torch.autograd.Function, "setup_context", None)


def _has_setup_context(function: Any) -> bool:
    return getattr(function, "setup_context", None) is not _plain_setup


def leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from leaves(part)
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from leaves(part)


# Twins


def same(tensor: Tensor) -> Tensor:
    """Return a tensor itself: the operator of a twin."""
    return tensor


def returns_one(operator: Any) -> bool:
    """Return whether an operator returns one tensor."""
    if operator is same:
        return True
    returns = operator._schema.returns
    return len(returns) == 1 and "[]" not in str(returns[0].type)


def with_twins(trace: Trace, banned: Collection[int]) -> list[Node]:
    """Return the operators of a trace, `same` in place of those that repeat an earlier one."""
    first: dict[Any, int] = {}
    twins: dict[int, int] = {}  # values
    nodes = []
    for node in trace.nodes:
        nodes.append(node)
        if isinstance(node.operator, FunctionCall) or [place for place, _ in node.made] != [0]:
            continue
        if node.drawn is not None:  # [guard: operators that draw]
            continue
        value = node.made[0][1]
        view = trace.values[value].view
        key = node.operator, view, _key((node.args, tuple(sorted(node.kwargs.items()))), twins)
        twin = first.setdefault(key, value) if view is not None and returns_one(node.operator) else value
        if twin != value and twin not in banned:  # [guard: twins of values that stay]
            assert view is not None
            twins[value] = twin
            nodes[-1] = replace(node, operator=same, args=(Place(twin, view),), kwargs={}, reads=(twin,))
    return nodes


def _key(given: Any, twins: Mapping[int, int]) -> Any:
    """Return arguments so that only the same ones are equal: 1 is not True, and 0.0 is not -0.0."""
    if isinstance(given, Place):
        return twins.get(given.value, given.value), given.view
    if isinstance(given, (list, tuple)):
        return type(given), *[_key(each, twins) for each in given]
    return type(given), repr(given) if isinstance(given, (float, complex)) else given
