"""What a program gets when offloading is off: the same shape, and nothing happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import TypeVar

from .device import ReferenceDevice
from .observe.counters import Counters, Statistics
from .observe.recorder import TimelineRecorder
from .schedule.plan import Plan

__all__ = ["NoController", "NoOffloadContext"]

T = TypeVar("T")


class NoOffloadContext(ContextDecorator, AbstractContextManager["NoOffloadContext"]):
    """The context of a disabled `get_cpu_offload_context`: does nothing, can be nested, and counts nothing."""

    plan = Plan(1)
    current_pass = None

    def __enter__(self) -> NoOffloadContext:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def synchronize(self, output: T) -> T:
        """Return the output."""
        return output

    def new_pass(self) -> None:
        """Do nothing."""

    def statistics(self) -> Statistics:
        """Return statistics in which every count is 0."""
        return Statistics()

    def reset_statistics(self) -> None:
        """Do nothing."""

    @contextmanager
    def record_timeline(self) -> Iterator[TimelineRecorder]:
        """Yield a recorder that sees nothing: there are no layers to time without offloading."""
        yield TimelineRecorder(ReferenceDevice(), Counters())

    def close(self) -> None:
        """Do nothing."""


class NoController:
    """The controller of a disabled context: accepts every call and does nothing."""

    def start_offload_layer(self, layer_id: int, *, in_pass: object = None) -> None:
        """Do nothing."""

    def release_activation_forward_gpu_memory(self, layer_id: int, *, in_pass: object = None) -> None:
        """Do nothing."""

    def start_reload_layer(self, layer_id: int, *, in_pass: object = None) -> None:
        """Do nothing."""
