"""What to offload: from measured costs and a limit of memory to a plan of the groups of a model."""

from .frontier import frontier
from .group_plan import Choice, GroupPlan
from .recomputation import choose_recomputed
from .search import choose

__all__ = ["Choice", "GroupPlan", "choose", "choose_recomputed", "frontier"]
