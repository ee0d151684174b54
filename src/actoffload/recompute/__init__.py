"""Recomputation in backward: whole regions of a model, or all of a region but the outputs of chosen operators."""

from .modes import recomputed
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
    policy_for,
    policy_of,
    saveable,
    saving,
    worth_saving,
)
from .region import Reads, Region
from .reuse import Reuse, in_pipeline_stage
from .state import State, inside
from .trace import Trace
from .watch import OBJECTS, Watch, remove_modes, structure

__all__ = [
    "COSTLY",
    "OBJECTS",
    "Call",
    "Given",
    "Named",
    "Noted",
    "Policy",
    "Reads",
    "Region",
    "Reuse",
    "State",
    "Trace",
    "Watch",
    "in_pipeline_stage",
    "inside",
    "named",
    "names_of",
    "never",
    "policy_for",
    "policy_of",
    "recomputed",
    "remove_modes",
    "saveable",
    "saving",
    "structure",
    "worth_saving",
]
