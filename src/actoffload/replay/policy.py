"""Which operators are replayed: the policies of programs and plans, and what no policy can allow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

_aten = torch.ops.aten
_Operator = type(_aten.mm.default)  # not a higher-order operator

_COSTLY = (
    "mm addmm bmm baddbmm convolution cudnn_convolution "
    "_grouped_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2 "  # of experts, and of float8
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
COSTLY = frozenset(getattr(_aten, name).default for name in _COSTLY.split() if hasattr(_aten, name))
"""Matrix products, convolutions and attention: their time is large beside the bytes of their outputs."""

PolicyArgument: TypeAlias = Callable[..., Any] | Collection[Any]
"""A policy as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes one."""


@dataclass(frozen=True)
class Policy:
    """Which saved values stay, and which operators are not run again.

    What autograd saves of the results of calls with some `names`, as ``aten.mm.default#2`` for the third call of a
    matrix product, stays; where other values need a result that is not saved, they run again.  No call of `operators`
    is run again, nor one for which `given` returns True, a policy of the program that is called with the tensors of
    each operator in a traced call.  If it `holds`, each value that is made again stays until its last use: see
    `program` [Note: parts].  Unless it `redraws`, operators that draw random numbers are not run again.
    """

    names: frozenset[str] = frozenset()
    operators: frozenset[Any] = frozenset()
    given: Callable[..., Any] | None = None
    holds: bool = False
    redraws: bool = True
    kept: set[str] = field(default_factory=set, compare=False)
    """Names of the operators that are not run again, as far as calls have shown."""

    def keeps(self, node: Any) -> bool:
        """Return whether a traced call of an operator is not run again."""
        found = node.operator in self.operators or node.name in self.kept
        if found:
            self.kept.add(node.name)
        return found or (node.drawn is not None and not self.redraws)

    def see(self, operator: Any, name: str, args: Any, kwargs: Any, outputs: Any) -> None:
        """Ask the policy of the program about an operator that has run in a traced call."""
        if self.given is not None and self.given(operator, args, kwargs, outputs):
            self.kept.add(name)


everything = Policy()
"""Run everything again that can be."""

SAVED = {policy for policy in CheckpointPolicy if not policy.name.endswith("RECOMPUTE")}
_has_output = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


def policy_for(recompute: Any) -> Policy:
    """Return the policy for the argument `recompute` of `offload`; raise a `TypeError` for what is none.

    ``"auto"`` runs cheap operators again, True everything that can be.  Otherwise it is a policy as
    ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it: operators whose outputs are saved, or a
    function ``(ctx, op, *args, **kwargs)`` that returns a `CheckpointPolicy` or a bool, in calls that are traced.
    """
    if recompute is True:
        return everything
    if isinstance(recompute, str) and recompute == "auto":
        return Policy(operators=COSTLY)
    expected = (
        "expected 'auto', True, False, operators such as [torch.ops.aten.mm.default], or a function (ctx, op, *args, "
        "**kwargs)"
    )
    if isinstance(recompute, (_Operator, type(_aten.mm))) or not callable(recompute):
        several = isinstance(recompute, Collection) and not isinstance(recompute, str)
        if not several or not recompute:
            more = " True runs everything again that can be." if several else ""
            raise TypeError(f"recompute is {recompute!r}; {expected}.{more}")
        for operator in recompute:
            if not isinstance(operator, _Operator):
                raise TypeError(f"recompute has {operator} of type {type(operator).__name__}; {expected}.")
        return Policy(operators=frozenset(recompute))
    with suppress(ValueError):  # of a function that is not in Python
        parameters = inspect.signature(recompute)
        try:
            parameters.bind(None, None, None, memory_format=None)
        except TypeError:
            name = getattr(recompute, "__name__", type(recompute).__name__)
            raise TypeError(
                f"recompute is the function {name}{parameters}, which cannot be called as the policy (ctx, op, *args, "
                "**kwargs)."
            ) from None

    def given(operator: Any, args: Any, kwargs: Any, outputs: Any) -> bool:
        more = {"op_output": outputs} if _has_output else {}
        found = recompute(SelectiveCheckpointContext(is_recompute=False, **more), operator, *args, **kwargs)
        if not isinstance(found, bool | CheckpointPolicy):
            raise TypeError(f"The policy for recompute returned {found!r} for {operator}; expected a CheckpointPolicy.")
        return found if isinstance(found, bool) else found in SAVED

    return Policy(given=given)


# What no policy allows

_FACTORIES = ("empty", "new_", "zeros", "ones", "full", "rand", "arange", "scalar_tensor", "linspace", "eye", "lift")
_NONDETERMINISTIC = (
    "scatter", "index_add", "index_put", "index_copy", "index_reduce", "put", "histc", "bincount", "median", "cumsum",
    "cumprod", "logcumsumexp", "embedding_bag", "_embedding_bag", "ctc_loss", "_ctc_loss", "kthvalue", "unique",
    "_unique", "nonzero", "masked_scatter", "mkldnn_rnn_layer",
)  # fmt: skip
"""Operators with atomic additions on a GPU or sizes that depend on values (PyTorch's notes on reproducibility).

The workspace of a recurrent layer has parts that nothing writes.
"""

_COLLECTIVES = (
    "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "fsdp", "symm_mem", "_dtensor",
)  # fmt: skip
_PYTORCH = ("aten", "prim", "prims", "torch_attn")
"""Namespaces of operators whose tags say whether they draw random numbers."""


class Rules(NamedTuple):
    """What the schema of an operator says about running it again."""

    replayable: bool = False  # in principle
    draws: bool = False  # random numbers, in any case or with dropout
    dropout: tuple[int, Any] | None = None  # place and default of the argument that says so
    writes: tuple[tuple[int, str], ...] = ()  # places and names of the arguments that it writes to
    scratch: tuple[int, ...] = ()  # places of running statistics that it writes, which its schema does not say
    foreign: bool = False  # of another library, so that its tags may be missing
    communicates: bool = False  # a collective, or part of one

    def draws_with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call draws random numbers; attention does with dropout only."""
        if not self.draws or self.dropout is None:
            return self.draws
        place, default = self.dropout
        return bool(args[place] if place < len(args) else kwargs.get("dropout_p", default))


@cache  # reading a schema takes microseconds
def rules_of(operator: Any) -> Rules:
    """Return what is known of an operator."""
    if not isinstance(operator, _Operator):  # a higher-order operator
        return Rules(communicates=getattr(operator, "namespace", "") in _COLLECTIVES)
    schema = operator._schema
    name = schema.name.rpartition("::")[2]
    arguments = list(enumerate(schema.arguments))
    places = {argument.name: (place, argument.default_value) for place, argument in arguments}
    written = tuple((k, each.name) for k, each in arguments if each.alias_info is not None and each.alias_info.is_write)
    communicates = operator.namespace in _COLLECTIVES
    replayable = (
        any("Tensor" in str(argument.type) for argument in schema.arguments)
        and not written
        and not communicates  # collectives are not repeated
        and not name.startswith(_FACTORIES)  # factories, which an unseen kernel may fill
        and not name.startswith(_NONDETERMINISTIC)  # operators with atomic additions
    )
    return Rules(
        replayable,
        torch.Tag.nondeterministic_seeded in operator.tags,
        places.get("dropout_p"),
        written,
        tuple(places[each][0] for each in ("running_mean", "running_var") if each in places),
        operator.namespace not in _PYTORCH,
        communicates,
    )


@cache
def out_of_place(operator: Any) -> Any:
    """Return the operator that returns what another one writes to its first argument; None if there is none."""
    name = operator._schema.name.rpartition("::")[2]
    writes = rules_of(operator).writes == ((0, "self"),) and torch.Tag.inplace_view not in operator.tags
    if operator.namespace != "aten" or not name.endswith("_") or not writes:
        return None
    found = getattr(getattr(_aten, name[:-1], None), operator._overloadname, None)
    return found if isinstance(found, _Operator) and rules_of(found).replayable and not rules_of(found).draws else None
