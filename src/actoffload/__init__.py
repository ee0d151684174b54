"""Activation offloading for PyTorch.

Keeps the activations that autograd saves for backward in host memory instead of device memory, and brings them
back in time.  `offload` takes a whole model as it is; `get_cpu_offload_context` goes around each layer of a loop of
one's own; `simulate` says beforehand what a schedule costs.
"""

from . import moe
from .context import get_cpu_offload_context
from .controller import ManualController
from .device import ReferenceDevice, ReferenceDeviceWarning
from .engine.engine import HostMemoryWarning
from .engine.passes import Pass
from .handle import OffloadHandle
from .marks import is_cpu_offload_enabled, mark_not_offload, start_offload
from .model import offload
from .observe.counters import Reason, Statistics
from .observe.ranks import RankReports, gather_reports
from .observe.recorder import TimelineRecorder
from .observe.report import GroupReport, HeldStorage, Report
from .observe.step_timeline import LayerTimes, StepTimeline
from .observe.synchronization import Synchronization, Synchronizations, find_synchronizations
from .offload_context import OffloadContext
from .schedule.costs import LayerCost, Link, Saved
from .schedule.default import DefaultSchedule
from .schedule.groups import GroupSchedule
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
    "GroupReport",
    "GroupSchedule",
    "HeldStorage",
    "HostMemoryWarning",
    "Kind",
    "LayerCost",
    "LayerTimes",
    "Link",
    "ManualController",
    "ManualSchedule",
    "OffloadContext",
    "OffloadHandle",
    "Pass",
    "Plan",
    "RankReports",
    "Reason",
    "ReferenceDevice",
    "ReferenceDeviceWarning",
    "Report",
    "Saved",
    "Simulation",
    "Span",
    "Statistics",
    "StepTimeline",
    "Synchronization",
    "Synchronizations",
    "Timeline",
    "TimelineRecorder",
    "When",
    "find_synchronizations",
    "gather_reports",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_not_offload",
    "moe",
    "offload",
    "simulate",
    "start_offload",
]
