"""Which outputs of operators are saved in a region that is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["Policy", "never", "repeatable", "saveable", "worth_saving"]

Policy: TypeAlias = Callable[[Any, int, tuple[Any, ...]], bool]
"""From an operator, how often the region has called it before, and its arguments, to whether its outputs are saved."""

_aten = torch.ops.aten
_Operator = type(_aten.mm.default)  # not a higher-order operator
COSTLY = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""Matrix products, convolutions and attention: their time is large beside the bytes of their outputs."""


def never(operator: Any, number: int, arguments: tuple[Any, ...]) -> bool:
    """Save nothing: all of the region is recomputed."""
    return False


def worth_saving(operator: Any, number: int, arguments: tuple[Any, ...]) -> bool:
    """Save the outputs of matrix products, convolutions and attention."""
    return operator in COSTLY


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers; attention does with dropout only."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True


def saveable(operator: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether outputs of an operator may stand for running it again.

    Not those of a call that draws random numbers: those behind it would be others.  Not those of one that writes
    to its arguments or returns views of them: there is more to it than its outputs.  Not casts: autocast keeps those of
    weights, so a region may call a cast in its forward and not when it is recomputed, or the other way round.
    """
    # [guard: casts, which autocast may have kept]
    if operator is _aten._to_copy.default or not isinstance(operator, _Operator):
        return False
    if _draws(operator, args, kwargs or {}):  # [guard: outputs of random operators]
        return False
    schema = operator._schema
    # [guard: views and outputs in place -> True]
    return not any(of.alias_info is not None for of in (*schema.arguments, *schema.returns))


def repeatable(module: Module) -> bool:
    """Return whether a module may run twice in a step: none inside of it counts what it has seen, as BatchNorm does."""
    # [guard: BatchNorm in training -> True]
    return not any(isinstance(of, _NormBase) and of.training and of.track_running_stats for of in module.modules())
