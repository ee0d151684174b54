"""Recomputation in backward: whole regions of a model, or all of a region but the outputs of chosen operators."""

from .policy import Policy, never, repeatable, worth_saving
from .region import Reads, Region, recomputed

__all__ = ["Policy", "Reads", "Region", "never", "recomputed", "repeatable", "worth_saving"]
