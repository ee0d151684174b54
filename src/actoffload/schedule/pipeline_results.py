"""What the simulation of a pipeline predicts, for each rank and for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from tabulate import tabulate

from .timeline import Timeline, mebibytes, milliseconds

__all__ = ["PipelineSimulation", "RankSimulation"]


@dataclass(frozen=True)
class RankSimulation:
    """What `simulate_pipeline` predicts for one rank.

    Parameters
    ----------
    end : float
        Seconds until its last computation has ended.
    bubble_seconds : float
        Seconds for which compute waited for what other ranks send, before its last computation.
    stall_seconds : float
        Seconds for which compute waited for copies.
    peak_bytes : int
        Largest number of bytes of saved activations on the device at one time.
    device_peak_bytes : int
        The same with all that the costs name beside them.
    bytes_offloaded, bytes_reloaded : int
        Bytes copied to the host and back.
    starts : tuple of float
        When each computation of the order starts.
    record : callable
        Returns the timeline.
    """

    end: float
    bubble_seconds: float
    stall_seconds: float
    peak_bytes: int
    device_peak_bytes: int
    bytes_offloaded: int
    bytes_reloaded: int
    starts: tuple[float, ...]
    record: Callable[[], Timeline] = field(repr=False, compare=False)

    @cached_property
    def timeline(self) -> Timeline:
        """Spans of compute, copies and stalls, whose `layer` is the microbatch; and the resident bytes.

        Compute in which nothing moves is one span for each computation, otherwise one for each group.
        """
        return self.record()


@dataclass(frozen=True)
class PipelineSimulation:
    """What `simulate_pipeline` predicts for one step of a schedule; ``print`` gives a table by rank.

    Parameters
    ----------
    ranks : tuple of RankSimulation
        One for each rank.
    baseline : tuple of RankSimulation
        The same without offloading.
    """

    ranks: tuple[RankSimulation, ...]
    baseline: tuple[RankSimulation, ...]

    @property
    def step_time(self) -> float:
        """Seconds until the last rank has ended."""
        return max(rank.end for rank in self.ranks)

    @property
    def baseline_time(self) -> float:
        """The same without offloading."""
        return max(rank.end for rank in self.baseline)

    @property
    def slowdown(self) -> float:
        """Step time divided by that without offloading; 1.0 means that offloading costs no time."""
        return self.step_time / self.baseline_time if self.baseline_time else 1.0

    def __str__(self) -> str:
        rows = [
            [
                str(number),
                mebibytes(without.device_peak_bytes),
                mebibytes(rank.device_peak_bytes),
                mebibytes(rank.bytes_offloaded),
                milliseconds(rank.stall_seconds),
                milliseconds(rank.bubble_seconds),
            ]
            for number, (rank, without) in enumerate(zip(self.ranks, self.baseline, strict=True))
        ]
        header = ["rank", "peak without", "peak", "offloaded", "stalled", "bubbles"]
        table = tabulate(rows, header, disable_numparse=True, colalign=("right",) * len(header))
        return f"step {milliseconds(self.step_time)}, {self.slowdown:.3f} x no offload\n\n{table}"
