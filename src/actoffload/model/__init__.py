"""Whole-model API: `offload`, its handle, and how the modules of a model are selected and followed."""

from .handle import OffloadHandle
from .offload import check_arguments, offload

__all__ = ["OffloadHandle", "check_arguments", "offload"]
