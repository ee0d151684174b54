"""Recomputation in backward: whole regions of a model, or all of a region but the outputs of chosen operators."""

from .modes import remove_modes
from .policy import Policy, never, repeatable, worth_saving
from .region import Reads, Region, recomputed
from .watch import State, Watch, structure

__all__ = [
    "Policy",
    "Reads",
    "Region",
    "State",
    "Watch",
    "never",
    "recomputed",
    "remove_modes",
    "repeatable",
    "structure",
    "worth_saving",
]
