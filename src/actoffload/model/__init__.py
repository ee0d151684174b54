"""Whole-model API: `offload` of a model, its handle, and how the modules of a model are selected and followed."""

from ..tune.findings import Fit
from .handle import OffloadHandle, offload_model

__all__ = ["Fit", "OffloadHandle", "offload_model"]
