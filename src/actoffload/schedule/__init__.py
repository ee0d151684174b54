"""When to offload: plans as data, schedules that make them, and `simulate`, which predicts their cost."""

from .costs import LayerCost, Link, Saved, StageCost
from .orders import Computation, Event, Step, When, gpipe, one_f_one_b, read_order
from .plan import Action, Do, Plan
from .schedules import DefaultSchedule, GroupSchedule
from .simulate import PipelineSimulation, simulate, simulate_pipeline
from .timeline import Kind, Simulation, Span, Timeline

__all__ = [
    "Action",
    "Computation",
    "DefaultSchedule",
    "Do",
    "Event",
    "GroupSchedule",
    "Kind",
    "LayerCost",
    "Link",
    "PipelineSimulation",
    "Plan",
    "Saved",
    "Simulation",
    "Span",
    "StageCost",
    "Step",
    "Timeline",
    "When",
    "gpipe",
    "one_f_one_b",
    "read_order",
    "simulate",
    "simulate_pipeline",
]
