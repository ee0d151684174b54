"""Callbacks that offload a model for as long as a framework trains it.

Each is imported when it is first named, because its module imports the framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hugging_face import OffloadCallback
    from .lightning import LightningOffloadCallback

__all__ = ["LightningOffloadCallback", "OffloadCallback"]

_MODULES = {"LightningOffloadCallback": "lightning", "OffloadCallback": "hugging_face"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
