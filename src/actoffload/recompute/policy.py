"""Which outputs of operators are saved in a region that is recomputed."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .._torch.tensors import storage_address

__all__ = [
    "Among",
    "Call",
    "Concern",
    "Given",
    "Named",
    "Policy",
    "addresses_written",
    "concern_of",
    "draws",
    "named",
    "never",
    "policy_for",
    "policy_of",
    "saveable",
    "saving",
    "worth_saving",
    "writes",
]


class Call(NamedTuple):
    """One call of an operator in a region."""

    operator: Any
    number: int  # how often the region has called it before
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


Policy: TypeAlias = Callable[[Call], bool]
"""From a call of an operator to whether its outputs are saved."""
Concern: TypeAlias = Callable[..., bool]
"""From an operator, and the number of a call, to whether its outputs may be saved."""
Given: TypeAlias = Callable[..., Any] | Collection[Any]
"""A policy as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes one."""

_aten = torch.ops.aten
_Operator = type(_aten.mm.default)  # not a higher-order operator
_OPERATORS = _Operator, type(_aten.mm)  # which can be called, too

_PRODUCTS = (
    "mm addmm bmm baddbmm convolution "
    "_grouped_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2"  # of experts, and of float8
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
COSTLY = {
    getattr(_aten, name).default
    for name in (*_PRODUCTS.split(), *_ATTENTION.split())
    if hasattr(_aten, name)  # in this version of PyTorch
}
"""Matrix products, convolutions and attention: their time is large beside the bytes of their outputs."""


def never(call: Call) -> bool:
    """Save nothing: all of the region is recomputed."""
    return False


class Among:
    """Save the outputs of some operators.

    Such a policy has a second method, `concerns`: whether it may save outputs of an operator, or of one call of it.
    """

    def __init__(self, operators: Collection[Any]) -> None:
        self._operators = frozenset(operators)

    def concerns(self, operator: Any, number: int | None = None) -> bool:
        """Return whether outputs of an operator may be saved."""
        return operator in self._operators

    def __call__(self, call: Call) -> bool:
        """Return whether the outputs are saved."""
        return self.concerns(call.operator)


worth_saving = Among(COSTLY)
"""Save the outputs of matrix products, convolutions and attention."""


def concern_of(policy: Policy) -> Concern | None:
    """Return the method `concerns` of a policy; None if it has none, so that it may save any outputs."""
    found: Concern | None = getattr(policy, "concerns", None)
    return found


SAVED = {policy for policy in CheckpointPolicy if not policy.name.endswith("RECOMPUTE")}
_has_output = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


def policy_of(given: Given) -> Policy:
    """Return the policy for one as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it.

    Parameters
    ----------
    given : collection of torch.ops operators, or callable
        The operators whose outputs are saved, or a function ``(ctx, op, *args, **kwargs)`` that returns a
        `torch.utils.checkpoint.CheckpointPolicy` or a bool.  It is called in forward only.  Outputs with a policy for
        the CPU are saved; the plan says whether they are offloaded.

    Raises
    ------
    TypeError
        If it is neither, or if the function returns anything else.
    """
    if isinstance(given, _OPERATORS) or not callable(given):
        return _policy_of_operators(given)
    with suppress(ValueError):  # of a function that is not in Python
        parameters = inspect.signature(given)
        try:
            parameters.bind(None, None, None, memory_format=None)
        except TypeError:
            name = getattr(given, "__name__", type(given).__name__)
            raise TypeError(
                f"recompute is the function {name}{parameters}, which cannot be called as the policy (ctx, op, *args, "
                "**kwargs)."
            ) from None

    def policy(call: Call) -> bool:
        more = {"op_output": call.outputs} if _has_output else {}
        context = SelectiveCheckpointContext(is_recompute=False, **more)
        found = given(context, call.operator, *call.args, **call.kwargs)
        if not isinstance(found, bool | CheckpointPolicy):
            raise TypeError(
                f"The policy for recompute returned {found!r} for {call.operator}; expected a CheckpointPolicy."
            )
        return found if isinstance(found, bool) else found in SAVED

    return policy


def _policy_of_operators(given: Any) -> Policy:
    expected = (
        "expected 'auto', True, False, operators such as [torch.ops.aten.mm.default], or a function (ctx, op, *args, "
        "**kwargs)"
    )
    if not isinstance(given, Collection) or isinstance(given, str):
        raise TypeError(f"recompute is {given!r}; {expected}.")
    for operator in given:
        if not isinstance(operator, _Operator):
            raise TypeError(f"recompute has {operator} of type {type(operator).__name__}; {expected}.")
    return Among(given) if given else never


def named(operator: Any, number: int) -> str:
    """Return the name of a call, from the number of calls of its operator before: ``aten.mm.default#0``."""
    return f"{operator}#{number}"


class Named:
    """Save the outputs of the operators with given names; see `named`.  An operator that does not run is left out."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._numbers = defaultdict[str, set[int]](set)
        for name in self.names:
            operator, _, number = name.rpartition("#")
            self._numbers[operator].add(int(number))
        self._known: dict[Any, Collection[int]] = {}  # by operator, as its name takes some time

    def concerns(self, operator: Any, number: int | None = None) -> bool:
        """Return whether outputs of an operator, or of one call of it, may be saved."""
        numbers = self._known.get(operator)
        if numbers is None:
            numbers = self._known[operator] = self._numbers.get(str(operator), ())
        return bool(numbers) if number is None else number in numbers

    def __call__(self, call: Call) -> bool:
        """Return whether the outputs are saved."""
        return self.concerns(call.operator, call.number)


class Noted:
    """A policy that notes the names of the operators whose outputs it saves."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.concerns = policy, concern_of(policy)
        self.names: dict[str, None] = {}

    def __call__(self, call: Call) -> bool:
        """Return whether the outputs are saved."""
        found = self._policy(call)
        if found:
            self.names[named(call.operator, call.number)] = None
        return found


def policy_for(recompute: Any) -> Policy:
    """Return the policy for the argument `recompute` of `offload`, for groups that are recomputed.

    It is `worth_saving` for True and ``"auto"``.  Errors are those of `policy_of`.
    """
    policy = worth_saving if isinstance(recompute, bool) or recompute == "auto" else policy_of(recompute)
    return policy if policy is never else Noted(policy)


def names_of(policy: Policy) -> tuple[str, ...]:
    """Return the names of the operators whose outputs a policy saves, as far as they are known."""
    return tuple(sorted(getattr(policy, "names", ())))


def saving(names: Iterable[str]) -> Policy:
    """Return the policy that saves the outputs of the operators with given names."""
    return _saving(tuple(names))


@cache  # blocks are alike, and a policy has looked up the names of the operators that it met
def _saving(names: tuple[str, ...]) -> Policy:
    return Named(names) if names else never


APART = frozenset((_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default))
"""Operators whose outputs are views of their input, but have version counters of their own; schemas do not tell."""


class _Kind(NamedTuple):
    """What an operator does."""

    changes: bool  # it writes to arguments, returns views of them, or is a cast
    draws: bool  # it draws random numbers, in any case or with dropout
    dropout: int | None  # place of the argument that says so; None for an operator that always draws
    default: Any = None  # of that argument


@cache  # reading a schema takes microseconds
def _kind(operator: Any) -> _Kind:
    # [guard: casts, which autocast may have kept]
    if operator is _aten._to_copy.default or not isinstance(operator, _Operator):
        return _Kind(True, False, None)
    schema = operator._schema
    changes = any(of.alias_info is not None for of in (*schema.arguments, *schema.returns))
    places = {of.name: (place, of.default_value) for place, of in enumerate(schema.arguments)}
    tags = torch.Tag.nondeterministic_seeded in operator.tags
    return _Kind(changes, tags, *places.get("dropout_p", (None, None)))


@cache
def writes(operator: Any) -> bool:
    """Return whether an operator writes to arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and any(of.alias_info and of.alias_info.is_write for of in schema.arguments)


def addresses_written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the addresses of the storages to which a call of such an operator writes."""
    found = set[int]()
    for place, of in enumerate(operator._schema.arguments):
        if of.alias_info and of.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(of.name)
            tensors = given if isinstance(given, list | tuple) else (given,)
            found.update(storage_address(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return found


_drawing = set[Any]()
"""Operators of other libraries that were seen to draw random numbers, although no tag of theirs says so."""


def note_drawing(operator: Any) -> None:
    """Note that an operator draws random numbers."""
    _drawing.add(operator)


def draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers; attention does with dropout only."""
    kind = _kind(operator)
    if not kind.draws or kind.dropout is None:
        return kind.draws or operator in _drawing  # [guard: operators without a tag]
    place = kind.dropout
    return bool(
        args[place] if place < len(args) else kwargs.get("dropout_p", kind.default)
    )  # [guard: dropout -> False]


def saveable(operator: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether outputs of an operator may stand for running it again.

    Not those of a call that draws random numbers: those behind it would be others.  Not those of one that writes
    to its arguments or returns views of them: there is more to it than its outputs.  Not casts: autocast keeps those of
    weights, so a region may call a cast in its forward and not when it is recomputed, or the other way round.
    """
    if _kind(operator).changes:  # [guard: views and outputs in place -> False]
        return False
    return not draws(operator, args, kwargs or {})
