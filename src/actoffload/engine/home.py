"""Where the storages of one pass live."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.base import Stream
from ..observe.counters import Counters
from .transfer import Transfers

__all__ = ["Home"]


@dataclass(slots=True)
class Home:
    """What serves one device in one pass, and the streams on which the pass saved tensors there."""

    transfers: Transfers
    counters: Counters
    device: torch.device  # where its tensors are
    streams: list[Stream]
