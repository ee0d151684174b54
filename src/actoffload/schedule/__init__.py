"""When to offload: plans as data, schedules that make them, and `simulate`, which predicts their cost."""

from .costs import LayerCost, Link, Saved
from .plan import Action, Do, Event, Plan, When
from .schedules import DefaultSchedule, GroupSchedule, ManualSchedule
from .simulate import simulate
from .timeline import Kind, Simulation, Span, Timeline

__all__ = [
    "Action",
    "DefaultSchedule",
    "Do",
    "Event",
    "GroupSchedule",
    "Kind",
    "LayerCost",
    "Link",
    "ManualSchedule",
    "Plan",
    "Saved",
    "Simulation",
    "Span",
    "Timeline",
    "When",
    "simulate",
]
