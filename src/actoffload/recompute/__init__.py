"""Recomputation in backward: whole regions of a model, or all of a region but the outputs of chosen operators."""

from .arguments import flags_of, objects_among, tensors_inside
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
from .state import State
from .structure import Structure, Structures
from .trace import Trace
from .watch import GENERATORS, OBJECTS, Watch, remove_modes

__all__ = [
    "COSTLY",
    "GENERATORS",
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
    "Structure",
    "Structures",
    "Trace",
    "Watch",
    "flags_of",
    "in_pipeline_stage",
    "named",
    "names_of",
    "never",
    "objects_among",
    "policy_for",
    "policy_of",
    "recomputed",
    "remove_modes",
    "saveable",
    "saving",
    "tensors_inside",
    "worth_saving",
]
