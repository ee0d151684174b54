"""What each thread is in the middle of: the layer whose forward runs, if any."""

from __future__ import annotations

import threading

from ..device.base import Backend

__all__ = ["enabled", "running"]


class _Running(threading.local):
    """The kinds of device of the contexts that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.backends: list[Backend] = []


running = _Running()


def enabled() -> bool:
    """Whether this thread is inside an enabled context."""
    return bool(running.backends)
