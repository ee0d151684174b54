"""Simulation of a plan: from bytes, times and a link to a timeline, the peak and the stalls.

There are three clocks, one for each queue of a device: compute, offload (D2H) and reload (H2D).  An operation begins
when its queue is free and what it waits for is done.  The engine on the reference device performs the same operations
in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from .costs import LayerCost, Link, Saved
from .plan import Do, Plan, When, reserve
from .timeline import Kind, Simulation, Span, Timeline

__all__ = ["simulate"]


def simulate(plan: Plan, layers: Sequence[LayerCost], link: Link) -> Simulation:
    """Predict one step: a forward of all layers, then their backward in reverse order.

    Parameters
    ----------
    plan : Plan
        What is done when.
    layers : sequence of LayerCost
        One per layer of the plan, in order of the forward.
    link : Link
        How fast copies are.

    Returns
    -------
    Simulation
        Times in seconds, sizes in bytes.

    Raises
    ------
    ValueError
        If there are more or fewer costs than layers in the plan.

    Notes
    -----
    The host runs ahead of the device: a copy starts as soon as its tensor is ready and its queue is free, however late
    it is queued.  Copies in one direction run one after the other.  Backward uses the tensors of a layer in order of
    their `Saved.needed_at`, and a tensor is freed when the next one is needed.

    Examples
    --------
    Two of five layers are offloaded, their copies are as fast as forward, and compute never waits:

    >>> from actoffload.schedule import DefaultSchedule, LayerCost, Link, simulate
    >>> layers = [LayerCost.even(256 * 2**20, forward=0.010, backward=0.020)] * 5
    >>> link = Link(d2h=25.6 * 2**30, h2d=25.6 * 2**30)
    >>> print(simulate(DefaultSchedule(num_layers=2, model_layers=5).plan(), layers, link))
    step      150.000 ms  1.000 x no offload
    forward    50.000 ms  0.000 ms stalled
    backward  100.000 ms  0.000 ms stalled
    peak       768.0 MiB  saved activations on the device
    offloaded  512.0 MiB  device to host
    reloaded   512.0 MiB  host to device, 0 tensors on demand
    """
    if len(layers) != plan.model_layers:
        raise ValueError(
            f"The plan has {plan.model_layers} layers but {len(layers)} costs were given; "
            "give one LayerCost per layer, in order of the forward."
        )
    run = _Run(plan, tuple(layers), link)
    for layer in range(plan.model_layers):
        run.forward(layer)
    forward_time, forward_stall = run.compute, run.stalled
    run.stalled = 0.0
    for layer in reversed(range(plan.model_layers)):
        run.backward(layer)
    # Rounded as the clock of compute is; `sum` of Python 3.12 rounds less.
    alone = [*(cost.forward for cost in layers), *(cost.backward for cost in reversed(layers))]
    return Simulation(
        timeline=Timeline.build(run.spans, run.resident, source="simulated"),
        step_time=run.compute,
        forward_time=forward_time,
        baseline=reduce(add, alone, 0.0),
        forward_stall=forward_stall,
        backward_stall=run.stalled,
        reloaded_on_demand=run.on_demand,
    )


@dataclass(slots=True)
class _Held:
    """One saved tensor in the run."""

    cost: Saved
    ready: float  # compute has written it
    copied: float = 0.0  # its copy on the host is complete
    on_device: bool = True
    arrival: float = 0.0  # its copy back is complete


@dataclass(slots=True)
class _Run:
    """The three clocks, the live tensors, and the recorded spans."""

    plan: Plan
    layers: tuple[LayerCost, ...]
    link: Link
    compute: float = 0.0
    d2h: float = 0.0
    h2d: float = 0.0
    stalled: float = 0.0
    running: tuple[Kind, int] | None = None  # the forward or backward of a layer
    start: float = 0.0  # when it began
    since: float = 0.0  # when it began, or went on after a stall
    stalled_before: float = 0.0
    on_demand: int = 0
    nbytes: int = 0
    releasing: int | None = None  # the layer that is released incrementally by the forward
    to_release: dict[int, int] = field(default_factory=dict)  # bytes
    prefetching: int | None = None  # the layer that is prefetched into what the backward frees
    room: int = 0  # bytes that backward has freed and nothing uses
    offloading: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    held: dict[int, list[_Held]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)

    def forward(self, layer: int) -> None:
        cost = self.layers[layer]
        tensors = self.held[layer] = []
        self._act(When.FORWARD_START, layer)
        self._begin(Kind.FORWARD, layer)
        for saved in cost.saved:
            self._reach(saved.saved_at * cost.forward)
            tensors.append(_Held(saved, ready=self.compute))
            self._occupy(saved.nbytes)
            self._release_incrementally(saved.nbytes)
            if layer in self.offloading:
                self._copy_out(layer, tensors[-1])
        self._reach(cost.forward)
        self.releasing = None
        self._end()
        self._act(When.FORWARD_END, layer)

    def _release_incrementally(self, nbytes: int) -> None:
        earlier = self.releasing
        if earlier is None or earlier in self.released:
            return
        self.to_release[earlier] = self.to_release.get(earlier, 0) + nbytes
        for tensor in self.held[earlier]:
            if self.to_release[earlier] <= 0:
                break
            if tensor.on_device:
                self._wait(tensor.copied, earlier)
                tensor.on_device = False
                self._occupy(-tensor.cost.nbytes)
                self.to_release[earlier] -= tensor.cost.nbytes

    def backward(self, layer: int) -> None:
        cost = self.layers[layer]
        self._act(When.BACKWARD_START, layer)
        self._begin(Kind.BACKWARD, layer)
        tensors = self.held.pop(layer)
        # The copies of a layer that was never released may still read its memory.
        still_read = layer in self.offloading and layer not in self.released
        copied = max((tensor.copied for tensor in tensors), default=0.0) if still_read else 0.0
        in_use = 0
        for tensor in [tensors[k] for k in cost.order_of_use]:
            self._reach(tensor.cost.needed_at * cost.backward)
            self._free(in_use, copied, layer)
            in_use = tensor.cost.nbytes
            if not tensor.on_device:
                self.on_demand += 1
                self._occupy(tensor.cost.nbytes)
                self._copy_back(layer, tensor)
            self._prefetch()
            self._wait(tensor.arrival, layer)
        self._reach(cost.backward)
        self._free(in_use, copied, layer)
        self.prefetching, self.room = None, 0
        self._end()
        self._act(When.BACKWARD_END, layer)

    def _free(self, nbytes: int, copied: float, layer: int) -> None:
        """Free a tensor in backward, once nothing reads it."""
        if nbytes:
            self._wait(copied, layer)
        self._occupy(-nbytes)
        self.room += nbytes

    def _act(self, when: When, layer: int) -> None:
        for action in self.plan.at(when, layer):
            if action.do is Do.OFFLOAD:
                self._offload(action.layer)
            elif action.do is Do.INCREMENTAL_RELEASE:
                self.releasing = action.layer
            elif action.do is Do.RELEASE:
                self._release(action.layer)
            elif action.do is Do.INCREMENTAL_PREFETCH:
                self.prefetching, self.room = action.layer, -reserve(self.layers[layer].nbytes)
            else:
                self._reload(action.layer)

    def _offload(self, layer: int) -> None:
        self.offloading.add(layer)
        for tensor in self.held.get(layer, ()):
            self._copy_out(layer, tensor)

    def _release(self, layer: int) -> None:
        tensors = [tensor for tensor in self.held[layer] if tensor.on_device]
        self.released.add(layer)
        self._wait(max((tensor.copied for tensor in tensors), default=0.0), layer)
        for tensor in tensors:
            tensor.on_device = False
        self._occupy(-sum(tensor.cost.nbytes for tensor in tensors))

    def _reload(self, layer: int) -> None:
        tensors = [tensor for tensor in self.held[layer] if not tensor.on_device]
        self._occupy(sum(tensor.cost.nbytes for tensor in tensors))
        for tensor in reversed(tensors):
            self._copy_back(layer, tensor)

    def _prefetch(self) -> None:
        if self.prefetching is None:
            return
        for tensor in reversed(self.held[self.prefetching]):
            if tensor.on_device:
                continue
            if tensor.cost.nbytes > self.room:
                break
            self.room -= tensor.cost.nbytes
            self._occupy(tensor.cost.nbytes)
            self._copy_back(self.prefetching, tensor)

    def _copy_out(self, layer: int, tensor: _Held) -> None:
        start = max(self.d2h, tensor.ready)
        self.d2h = start + (self.link.latency + tensor.cost.nbytes / self.link.d2h)
        tensor.copied = self.d2h
        self.spans.append(Span(Kind.D2H, layer, start, self.d2h, tensor.cost.nbytes))

    def _copy_back(self, layer: int, tensor: _Held) -> None:
        start = max(self.h2d, self.compute)
        self.h2d = start + (self.link.latency + tensor.cost.nbytes / self.link.h2d)
        tensor.arrival, tensor.on_device = self.h2d, True
        self.spans.append(Span(Kind.H2D, layer, start, self.h2d, tensor.cost.nbytes))

    def _begin(self, kind: Kind, layer: int) -> None:
        self.running = kind, layer
        self.start = self.since = self.compute
        self.stalled_before = self.stalled

    def _reach(self, seconds: float) -> None:
        """Let compute run until so many seconds after the begin of the layer without stalls, and never back."""
        self.compute = max(self.compute, self.start + seconds + self.stalled - self.stalled_before)

    def _end(self) -> None:
        """End the compute of a layer, or of the part of it before a stall."""
        if self.running is not None and self.compute > self.since:
            self.spans.append(Span(*self.running, self.since, self.compute))
        self.running = None

    def _wait(self, time: float, layer: int) -> None:
        start, running = self.compute, self.running
        if time <= start:
            return
        self._end()
        self.compute = self.since = time
        self.stalled += time - start
        self.spans.append(Span(Kind.STALL, layer, start, time))
        self.running = running

    def _occupy(self, nbytes: int) -> None:
        """Allocate or free device memory at the present time of compute."""
        if nbytes:
            self.nbytes += nbytes
            self.resident.append((self.compute, self.nbytes))
