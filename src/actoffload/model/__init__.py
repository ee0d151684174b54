"""Whole-model API: `offload` of a model, its handle, and how the modules of a model are selected and followed."""

from .handle import OffloadHandle
from .offload import offload_model
from .tuning.findings import Fit

__all__ = ["Fit", "OffloadHandle", "offload_model"]
