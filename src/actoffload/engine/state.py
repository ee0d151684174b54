"""What each thread is in the middle of: the layer whose forward runs, if any."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layer import Layer

__all__ = ["enabled", "running"]


class _Running(threading.local):
    """The layers whose contexts this thread is in, innermost last."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []


running = _Running()


def enabled() -> bool:
    """Whether this thread is inside an enabled context."""
    return bool(running.layers)
