"""Activation offloading for PyTorch.

`offload` takes a whole model, or a pipeline schedule, as it is.  `get_cpu_offload_context` goes around each layer of a
training loop.  What else is public is in the subpackages: `actoffload.schedule` (plans and `simulate`),
`actoffload.report`, `actoffload.measure`, `actoffload.machine`, `actoffload.moe`, `actoffload.integrations`,
`actoffload.context` and `actoffload.device`.
"""

from . import measure as measure
from . import moe as moe
from . import schedule as schedule
from .context import get_cpu_offload_context
from .device import ReferenceDeviceWarning
from .engine.eligibility import is_cpu_offload_enabled, mark_not_offload, start_offload
from .engine.engine import HostMemoryWarning
from .model import Fit, OffloadHandle
from .pipeline import PipelineHandle, offload
from .report import find_synchronizations, gather_reports

__version__ = "0.1.0.dev0"

__all__ = [
    "Fit",
    "HostMemoryWarning",
    "OffloadHandle",
    "PipelineHandle",
    "ReferenceDeviceWarning",
    "find_synchronizations",
    "gather_reports",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_not_offload",
    "offload",
    "start_offload",
]
