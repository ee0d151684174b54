"""Whole-model API: `offload`, its handle, and how the modules of a model are selected and followed."""

from .handle import OffloadHandle
from .offload import check_arguments, offload
from .tuning.findings import Fit

__all__ = ["Fit", "OffloadHandle", "check_arguments", "offload"]
