"""Whole-model API: `offload`, its handle, and how the modules of a model are selected and followed."""

from .handle import OffloadHandle
from .offload import offload

__all__ = ["OffloadHandle", "offload"]
