"""When to offload: plans as data, schedules that make them, and `simulate`, which predicts their cost."""

from .costs import LayerCost, Link, Saved, StageCost
from .pipeline import (
    Chunk,
    ChunkAction,
    Computation,
    Moment,
    PipelinePlan,
    Step,
    Transfer,
    gpipe,
    one_f_one_b,
    read_order,
)
from .plan import Action, Do, Event, Plan, When
from .schedules import DefaultSchedule, GroupSchedule
from .simulate import PipelineSimulation, simulate, simulate_pipeline
from .timeline import Kind, Simulation, Span, Timeline

__all__ = [
    "Action",
    "Chunk",
    "ChunkAction",
    "Computation",
    "DefaultSchedule",
    "Do",
    "Event",
    "GroupSchedule",
    "Kind",
    "LayerCost",
    "Link",
    "Moment",
    "PipelinePlan",
    "PipelineSimulation",
    "Plan",
    "Saved",
    "Simulation",
    "Span",
    "StageCost",
    "Step",
    "Timeline",
    "Transfer",
    "When",
    "gpipe",
    "one_f_one_b",
    "read_order",
    "simulate",
    "simulate_pipeline",
]
