"""Recomputation in backward: whole regions of a model, or all of a region but the outputs of chosen operators."""

from .policy import (
    COSTLY,
    Call,
    Given,
    Named,
    Noted,
    Policy,
    named,
    names_of,
    never,
    policy_of,
    repeatable,
    saveable,
    saving,
    worth_saving,
)
from .region import Reads, Region, recomputed

__all__ = [
    "COSTLY",
    "Call",
    "Given",
    "Named",
    "Noted",
    "Policy",
    "Reads",
    "Region",
    "named",
    "names_of",
    "never",
    "policy_of",
    "recomputed",
    "repeatable",
    "saveable",
    "saving",
    "worth_saving",
]
