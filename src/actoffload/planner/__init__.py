"""What to offload: from measured costs and a limit of memory to a plan of the groups of a model."""

from .frontier import frontier
from .group_plan import Choice, GroupPlan
from .pipeline_search import plan_pipeline
from .recomputation import choose_recomputed
from .search import choose
from .variants import OperatorCost, Variant, replay_ways

__all__ = [
    "Choice",
    "GroupPlan",
    "OperatorCost",
    "Variant",
    "choose",
    "choose_recomputed",
    "frontier",
    "plan_pipeline",
    "replay_ways",
]
