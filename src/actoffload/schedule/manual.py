"""Manual scheduling as data: the calls that a program makes on its controller, written down."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Action, Do, Event, Plan, When

__all__ = ["ManualSchedule"]


@dataclass(frozen=True)
class ManualSchedule:
    """A plan built call by call, for `simulate` and for figures.

    Each method returns a longer schedule, so a schedule reads like the training loop that it describes.
    While a program runs, the same three actions are methods of `ManualController`.

    Parameters
    ----------
    model_layers : int
        Layers in one pass.
    calls : tuple of (Event, Action)
        What was added so far.

    Examples
    --------
    >>> from actoffload import ManualSchedule
    >>> schedule = (
    ...     ManualSchedule(model_layers=3)
    ...     .start_offload_layer(0, after_forward_of=0)
    ...     .release_activation_forward_gpu_memory(0, after_forward_of=1)
    ...     .start_reload_layer(0, before_backward_of=1)
    ... )
    >>> print(schedule.plan())
    forward end of layer 0: offload layer 0
    forward end of layer 1: release layer 0
    backward start of layer 1: reload layer 0
    """

    model_layers: int
    calls: tuple[tuple[Event, Action], ...] = ()

    def _with(self, event: Event, do: Do, layer: int) -> ManualSchedule:
        return ManualSchedule(self.model_layers, (*self.calls, (event, Action(do, layer))))

    def start_offload_layer(self, layer_id: int, *, after_forward_of: int) -> ManualSchedule:
        """Queue the copies of a layer after the forward of a layer."""
        return self._with(Event(When.FORWARD_END, after_forward_of), Do.OFFLOAD, layer_id)

    def release_activation_forward_gpu_memory(self, layer_id: int, *, after_forward_of: int) -> ManualSchedule:
        """Wait for the copies of a layer and free its device memory after the forward of a layer."""
        return self._with(Event(When.FORWARD_END, after_forward_of), Do.RELEASE, layer_id)

    def start_reload_layer(self, layer_id: int, *, before_backward_of: int) -> ManualSchedule:
        """Queue the copies back before the backward of a layer."""
        return self._with(Event(When.BACKWARD_START, before_backward_of), Do.RELOAD, layer_id)

    def plan(self) -> Plan:
        """Return the schedule as data.

        Raises
        ------
        ValueError
            If the calls are out of order, repeated, or name a layer that does not exist.
        """
        steps: dict[Event, tuple[Action, ...]] = {}
        for event, action in self.calls:
            steps[event] = (*steps.get(event, ()), action)
        return Plan(self.model_layers, steps)
