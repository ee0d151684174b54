"""Default scheduling: the first layers of a sequential model leave, the link works while others compute."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Action, Do, Event, Plan, When

__all__ = ["DefaultSchedule"]


@dataclass(frozen=True, slots=True)
class DefaultSchedule:
    """Offload the first `num_layers` of `model_layers`; at most the difference is resident at any time.

    With ``window = model_layers - num_layers``, layer ``i`` is copied out while it and the layers behind it
    compute, has left before layer ``i + window`` starts, and comes back once the backward of layer
    ``i + window`` has freed the room.  The rule is that of Transformer Engine's CPU offloading.

    Parameters
    ----------
    num_layers : int
        Layers to offload, from the first; 0 offloads nothing.
    model_layers : int
        Layers in one pass; more than `num_layers`.

    Raises
    ------
    ValueError
        If `num_layers` is negative or not smaller than `model_layers`.

    Examples
    --------
    >>> DefaultSchedule(num_layers=2, model_layers=5).window
    3
    """

    num_layers: int
    model_layers: int

    def __post_init__(self) -> None:
        if self.model_layers < 1:
            raise ValueError(f"model_layers is {self.model_layers}; expected the number of layers, at least 1.")
        if self.num_layers < 0:
            raise ValueError(f"num_layers is {self.num_layers}; expected 0 or more.")
        if self.num_layers >= self.model_layers:
            raise ValueError(
                f"num_layers is {self.num_layers} but model_layers is {self.model_layers}: the last layer's "
                "activations are needed at once, so offload at most model_layers - 1 layers."
            )

    @property
    def window(self) -> int:
        """Number of layers whose activations may be resident at the same time."""
        return self.model_layers - self.num_layers

    @property
    def overlaps(self) -> bool:
        """Whether a copy can run beside compute; with one resident layer each waits for the other."""
        return self.num_layers == 0 or self.window > 1

    def plan(self) -> Plan:
        """Return the schedule as data."""
        steps: dict[Event, tuple[Action, ...]] = {}
        for i in range(self.num_layers):
            pairs = (
                (Event(When.FORWARD_START, i), Action(Do.OFFLOAD, i)),
                (Event(When.FORWARD_START, i + self.window), Action(Do.RELEASE, i)),
                (Event(When.BACKWARD_END, i + self.window), Action(Do.RELOAD, i)),
            )
            for event, action in pairs:
                # A release comes before the copies of the layer that starts: what leaves makes the room.
                first = action.do is Do.RELEASE
                old = steps.get(event, ())
                steps[event] = (action, *old) if first else (*old, action)
        return Plan(self.model_layers, steps)
