"""The outcome of a simulation, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass

from .timeline import Kind, Timeline

__all__ = ["Simulation"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Simulation:
    """What `simulate` predicts for one step; ``print`` gives a table.

    Parameters
    ----------
    timeline : Timeline
        Spans of compute, copies and stalls, and the resident bytes.
    step_time : float
        Seconds from the start of the first forward to the end of the last backward.
    forward_time : float
        Seconds of `step_time` until the last forward has ended.
    baseline : float
        Seconds that the step takes when nothing is offloaded.
    forward_stall, backward_stall : float
        Seconds for which compute waited for copies, in forward and in backward.
    reloaded_on_demand : int
        Saved tensors that came back only when backward asked for them.
    """

    timeline: Timeline
    step_time: float
    forward_time: float
    baseline: float
    forward_stall: float
    backward_stall: float
    reloaded_on_demand: int

    @property
    def backward_time(self) -> float:
        """Seconds from the end of the last forward to the end of the step."""
        return self.step_time - self.forward_time

    @property
    def stall_seconds(self) -> float:
        """Seconds for which compute waited for copies, forward and backward together."""
        return self.forward_stall + self.backward_stall

    @property
    def slowdown(self) -> float:
        """Step time over step time without offload; 1.0 says that offloading costs nothing."""
        return self.step_time / self.baseline if self.baseline else 1.0

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes of saved activations on the device at one time."""
        return self.timeline.peak_bytes

    @property
    def bytes_offloaded(self) -> int:
        """Bytes copied to the host."""
        return self.timeline.nbytes(Kind.D2H)

    @property
    def bytes_reloaded(self) -> int:
        """Bytes copied back; less than `bytes_offloaded` if a layer was copied out but never released."""
        return self.timeline.nbytes(Kind.H2D)

    def __str__(self) -> str:
        on_demand = f"host to device, {self.reloaded_on_demand} tensors on demand"
        rows = (
            ("step", _ms(self.step_time), f"{self.slowdown:.3f} x no offload"),
            ("forward", _ms(self.forward_time), f"{_ms(self.forward_stall)} stalled"),
            ("backward", _ms(self.backward_time), f"{_ms(self.backward_stall)} stalled"),
            ("peak", _mib(self.peak_bytes), "saved activations on the device"),
            ("offloaded", _mib(self.bytes_offloaded), "device to host"),
            ("reloaded", _mib(self.bytes_reloaded), on_demand),
        )
        width = max(len(value) for _, value, _ in rows)
        return "\n".join(f"{name:<10}{value:>{width}}  {note}" for name, value, note in rows)
