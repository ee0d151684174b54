"""Callbacks that offload a model for as long as a framework trains it; importing this package imports no framework."""

from .hugging_face import OffloadCallback
from .lightning import LightningOffloadCallback

__all__ = ["LightningOffloadCallback", "OffloadCallback"]
