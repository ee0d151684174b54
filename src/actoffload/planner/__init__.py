"""What to offload: from measured costs and a limit of memory to a plan of the groups of a model."""

from .choose import choose, frontier, plan_pipeline
from .variants import OperatorCost, Variant, replay_ways

__all__ = ["OperatorCost", "Variant", "choose", "frontier", "plan_pipeline", "replay_ways"]
