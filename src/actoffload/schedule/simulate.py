"""Simulation of a plan: from bytes, times and a link to a timeline, the peak and the stalls.

Each queue of a device has a clock: compute, offload (D2H) and reload (H2D).  An operation begins when its queue is free
and what it waits for is done.  The engine on the reference device performs the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._arguments import check_kind, check_kinds, check_seconds
from .costs import LayerCost, Link, Saved, backward_starts
from .plan import Do, Plan, When
from .timeline import Kind, Simulation, Span, Timeline

__all__ = ["simulate"]


def simulate(plan: Plan, layers: Sequence[LayerCost], link: Link, *, host_seconds: float = 0.0) -> Simulation:
    """Predict one step: a forward of all layers, then their backward in reverse order.

    Parameters
    ----------
    plan : Plan
        What is done when.
    layers : sequence of LayerCost
        One per layer of the plan, in order of the forward.
    link : Link
        How fast copies are.
    host_seconds : float
        Seconds that the host spends on each saved tensor of an offloaded layer, in forward and again in backward.

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
    their `Saved.needed_at`, and a tensor is freed when the next one is needed.  Compute of which the host has not yet
    queued the work waits for it, which is no stall.

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
    check_kind(Plan, plan=plan)
    check_kinds(LayerCost, layers=layers)
    check_kind(Link, link=link)
    check_seconds(host_seconds=host_seconds)
    if len(layers) != plan.model_layers:
        raise ValueError(
            f"The plan has {plan.model_layers} layers but {len(layers)} costs were given; "
            "give one LayerCost per layer, in order of the forward."
        )
    run = _Run(plan, tuple(layers), _Clocks(link), _Memory(other=layers[0].other_bytes[0]), host_seconds)
    for layer in range(plan.model_layers):
        run.forward(layer)
    forward_time, forward_stall = run.clocks.compute, run.clocks.stalled
    run.clocks.stalled = 0.0
    for layer in reversed(range(plan.model_layers)):
        run.backward(layer)
    return Simulation(
        timeline=Timeline.build(run.clocks.spans, run.memory.resident, source="simulated"),
        step_time=run.clocks.compute,
        forward_time=forward_time,
        baseline=backward_starts(layers)[-1],
        forward_stall=forward_stall,
        backward_stall=run.clocks.stalled,
        reloaded_on_demand=run.on_demand,
        device_peak_bytes=run.memory.peak,
    )


@dataclass(slots=True)
class _Clocks:
    """When compute, the host and the copies are done with what they have, in seconds since the step began."""

    link: Link
    compute: float = 0.0
    host: float = 0.0
    stalled: float = 0.0
    running: tuple[Kind, int] | None = None  # the forward or backward of a layer
    start: float = 0.0  # when it began
    since: float = 0.0  # when it began, or went on after a stall
    stalled_before: float = 0.0
    host_start: float = 0.0
    d2h: float = 0.0  # end of the last copy to the host
    h2d: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def begin(self, kind: Kind, layer: int) -> None:
        """Begin the compute of a layer."""
        self.running = kind, layer
        self.start = self.since = self.compute
        self.stalled_before = self.stalled
        self.host_start = self.host

    def reach(self, seconds: float, host_seconds: float) -> None:
        """Let compute run until a time, in seconds since the begin of the layer without stalls, and never back.

        The host needs `host_seconds` to queue this compute; compute waits for it, which is no stall.
        """
        self.host = max(self.host, self.host_start + host_seconds)
        self.compute = max(self.compute, self.start + seconds + self.stalled - self.stalled_before, self.host)

    def hook(self, seconds: float) -> None:
        """Let the host spend some seconds on a saved tensor."""
        self.host += seconds
        self.host_start += seconds

    def end(self) -> None:
        """End the compute of a layer, or of the part of it before a stall."""
        if self.running is not None and self.compute > self.since:
            self.spans.append(Span(*self.running, self.since, self.compute))
        self.running = None

    def wait(self, time: float, layer: int) -> None:
        """Let compute wait for a copy of a layer."""
        start, running = self.compute, self.running
        if time <= start:
            return
        self.end()
        self.compute = self.since = time
        self.stalled += time - start
        self.spans.append(Span(Kind.STALL, layer, start, time))
        self.running = running

    def copy_out(self, layer: int, nbytes: int, ready: float) -> float:
        """Queue a copy to the host; return when it is done."""
        start = max(self.d2h, ready)
        self.d2h = self._copied(start, nbytes, self.h2d, back=False)
        self.spans.append(Span(Kind.D2H, layer, start, self.d2h, nbytes))
        return self.d2h

    def copy_back(self, layer: int, nbytes: int) -> float:
        """Queue a copy to the device, at the present time of compute; return when it is done."""
        start = max(self.h2d, self.compute)
        self.h2d = self._copied(start, nbytes, self.d2h, back=True)
        self.spans.append(Span(Kind.H2D, layer, start, self.h2d, nbytes))
        return self.h2d

    def _copied(self, start: float, nbytes: int, busy: float, *, back: bool) -> float:
        link = self.link
        seconds = nbytes / (link.h2d if back else link.d2h)
        if busy <= start:
            return start + (link.latency + seconds)
        return link.end(start + link.latency, seconds, busy, back=back)


@dataclass(slots=True)
class _Memory:
    """The bytes on the device: resident saved tensors, and the other bytes at the borders of sections of the step."""

    other: int  # at the latest border
    nbytes: int = 0  # of resident saved tensors
    peak: int = 0  # with other bytes and temporaries
    at_border: int = 0  # resident at the latest border
    highest: int = 0  # resident since then
    resident: list[tuple[float, int]] = field(default_factory=list)

    def occupy(self, nbytes: int, time: float) -> None:
        """Allocate or free the memory of saved tensors at a time of compute."""
        if nbytes:
            self.nbytes += nbytes
            self.highest = max(self.highest, self.nbytes)
            self.resident.append((time, self.nbytes))

    def reserve(self, nbytes: int) -> None:
        """Count memory that is allocated before `occupy` says what for."""
        self.highest = max(self.highest, self.nbytes + nbytes)

    def border(self, other: int, temporary: int = 0) -> None:
        """End a section of the step, in which so much was allocated for a time."""
        between = self.highest - max(self.at_border, self.nbytes)
        borders = max(self.at_border + self.other, self.nbytes + other)
        self.peak = max(self.peak, borders + between + temporary)
        self.other, self.at_border, self.highest = other, self.nbytes, self.nbytes


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
    """The clocks, the memory and the live tensors."""

    plan: Plan
    layers: tuple[LayerCost, ...]
    clocks: _Clocks
    memory: _Memory
    host_seconds: float
    on_demand: int = 0
    releasing: int | None = None  # the layer that is released incrementally by the forward
    to_release: dict[int, int] = field(default_factory=dict)  # bytes
    offloading: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    held: dict[int, list[_Held]] = field(default_factory=dict)

    def forward(self, layer: int) -> None:
        cost, clocks = self.layers[layer], self.clocks
        tensors = self.held[layer] = []
        self._gap(cost.gap_forward, cost.other_bytes[0], cost.gap_forward_temporary)
        self._act(When.FORWARD_START, layer)
        clocks.begin(Kind.FORWARD, layer)
        if cost.unpacks_at_once:
            self.memory.reserve(cost.nbytes)  # its forward has written all before it saves any
        for saved in cost.saved:
            clocks.reach(saved.saved_at * cost.forward, saved.saved_at * cost.host_forward)
            tensors.append(_Held(saved, ready=clocks.compute))
            self._occupy(saved.nbytes)
            self._release_incrementally(saved.nbytes)
            if layer in self.offloading:
                clocks.hook(self.host_seconds)
                self._copy_out(layer, tensors[-1])
        clocks.reach(cost.forward, cost.host_forward)
        self.releasing = None
        clocks.end()
        self._occupy(cost.kept_bytes)
        self.memory.border(cost.other_bytes[1], cost.forward_temporary)
        self._act(When.FORWARD_END, layer)

    def _gap(self, seconds: float, other: int, temporary: int) -> None:
        """Compute between two layers."""
        self.clocks.compute += seconds
        self.memory.border(other, temporary)

    def _release_incrementally(self, nbytes: int) -> None:
        earlier = self.releasing
        if earlier is None or earlier in self.released:
            return
        self.to_release[earlier] = self.to_release.get(earlier, 0) + nbytes
        for tensor in self.held[earlier]:
            if self.to_release[earlier] <= 0:
                break
            if tensor.on_device:
                self.clocks.wait(tensor.copied, earlier)
                tensor.on_device = False
                self._occupy(-tensor.cost.nbytes)
                self.to_release[earlier] -= tensor.cost.nbytes

    def backward(self, layer: int) -> None:
        cost, clocks = self.layers[layer], self.clocks
        self._gap(cost.gap_backward, cost.other_bytes[2], cost.gap_backward_temporary)
        self._act(When.BACKWARD_START, layer)
        clocks.begin(Kind.BACKWARD, layer)
        tensors = self.held.pop(layer)
        # The copies of a layer that was never released may still read its memory.
        still_read = layer in self.offloading and layer not in self.released
        copied = max((tensor.copied for tensor in tensors), default=0.0) if still_read else 0.0
        in_use = 0
        for tensor in [tensors[k] for k in cost.order_of_use]:
            if not cost.unpacks_at_once:
                at = tensor.cost.needed_at
                clocks.reach(at * cost.backward, at * cost.host_backward)
                self._free(in_use, copied, layer)
                in_use = 0
            in_use += tensor.cost.nbytes
            if layer in self.offloading:
                clocks.hook(self.host_seconds)
            if not tensor.on_device:
                self.on_demand += 1
                self._occupy(tensor.cost.nbytes)
                self._copy_back(layer, tensor)
            clocks.wait(tensor.arrival, layer)
        clocks.reach(cost.backward, cost.host_backward)
        self._free(in_use, copied, layer)
        clocks.end()
        self._occupy(-cost.kept_bytes)
        self.memory.border(cost.other_bytes[3], cost.backward_temporary)
        self._act(When.BACKWARD_END, layer)

    def _free(self, nbytes: int, copied: float, layer: int) -> None:
        """Free a tensor in backward, once nothing reads it."""
        if nbytes:
            self.clocks.wait(copied, layer)
        self._occupy(-nbytes)

    def _act(self, when: When, layer: int) -> None:
        actions = self.plan.at(when, layer)
        for action in actions:
            if action.do is Do.OFFLOAD:
                self._offload(action.layer)
            elif action.do is Do.INCREMENTAL_RELEASE:
                self.releasing = action.layer
            elif action.do is Do.RELEASE:
                self._release(action.layer)
            else:
                self._reload(action.layer)
        if actions:  # [guard: simulated peak of an event]
            self.memory.border(self.memory.other)

    def _offload(self, layer: int) -> None:
        self.offloading.add(layer)
        for tensor in self.held.get(layer, ()):
            self._copy_out(layer, tensor)

    def _release(self, layer: int) -> None:
        tensors = [tensor for tensor in self.held[layer] if tensor.on_device]
        self.released.add(layer)
        self.clocks.wait(max((tensor.copied for tensor in tensors), default=0.0), layer)
        for tensor in tensors:
            tensor.on_device = False
        self._occupy(-sum(tensor.cost.nbytes for tensor in tensors))

    def _reload(self, layer: int) -> None:
        tensors = [tensor for tensor in self.held[layer] if not tensor.on_device]
        self._occupy(sum(tensor.cost.nbytes for tensor in tensors))
        for tensor in reversed(tensors):
            self._copy_back(layer, tensor)

    def _copy_out(self, layer: int, tensor: _Held) -> None:
        tensor.copied = self.clocks.copy_out(layer, tensor.cost.nbytes, tensor.ready)

    def _copy_back(self, layer: int, tensor: _Held) -> None:
        tensor.arrival, tensor.on_device = self.clocks.copy_back(layer, tensor.cost.nbytes), True

    def _occupy(self, nbytes: int) -> None:
        self.memory.occupy(nbytes, self.clocks.compute)
