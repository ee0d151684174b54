"""Activation offloading for PyTorch.

Keeps the activations that autograd saves for backward in host memory instead of device memory, and brings them
back in time.  `get_cpu_offload_context` is the front door; `simulate` says beforehand what a schedule costs.
"""

from .context import get_cpu_offload_context
from .controller import ManualController
from .device import ReferenceDevice, ReferenceDeviceWarning
from .engine.engine import HostMemoryWarning
from .engine.passes import Pass
from .marks import is_cpu_offload_enabled, mark_not_offload, start_offload
from .observe.counters import Reason, Statistics
from .observe.recorder import TimelineRecorder
from .offload_context import OffloadContext
from .schedule.costs import LayerCost, Link, Saved
from .schedule.default import DefaultSchedule
from .schedule.manual import ManualSchedule
from .schedule.plan import Action, Do, Event, Plan, When
from .schedule.simulate import Simulation, simulate
from .schedule.timeline import Kind, Span, Timeline

__version__ = "0.1.0.dev0"

__all__ = [
    "Action",
    "DefaultSchedule",
    "Do",
    "Event",
    "HostMemoryWarning",
    "Kind",
    "LayerCost",
    "Link",
    "ManualController",
    "ManualSchedule",
    "OffloadContext",
    "Pass",
    "Plan",
    "Reason",
    "ReferenceDevice",
    "ReferenceDeviceWarning",
    "Saved",
    "Simulation",
    "Span",
    "Statistics",
    "Timeline",
    "TimelineRecorder",
    "When",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_not_offload",
    "simulate",
    "start_offload",
]
