"""Run a program with offloading on the adversarial device and without, and compare."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Any

import helpers
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.context import OffloadContext
from actoffload.device import use
from actoffload.engine import eligibility, host_pool
from actoffload.engine.engine import Engine
from actoffload.engine.layer import Phase
from actoffload.engine.passes import Pass
from actoffload.schedule.plan import Plan

from .device import AdversarialDevice
from .models import DEVICE_KINDS, KINDS, LEAST, ROWS, STREAM_KINDS, WIDTH, weights
from .orders import Mode
from .programs import Backward, Drop, Forward, Node, Program, Validate

LAYERS = {**KINDS, **STREAM_KINDS, **DEVICE_KINDS}


@contextmanager
def scaled_down() -> Iterator[None]:
    """Scale the thresholds of the engine down to tensors of a few hundred bytes, and record the reads of backward."""
    fetch = Pass.fetch
    clear_marks()

    def watched(self: Pass, *arguments: Any) -> Tensor:
        tensor = fetch(self, *arguments)
        if isinstance(self.backend, AdversarialDevice):
            self.backend.used(tensor)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eligibility, "MIN_ELEMENTS", LEAST)
        patch.setattr(host_pool, "ALIGN", 64)
        patch.setattr(host_pool, "GRANULE", 1024)
        patch.setattr(Pass, "fetch", watched)
        yield


def clear_marks() -> None:
    """Clear the marks of earlier runs: with any mark left, the engine takes a slower path."""
    eligibility.kept.clear()
    eligibility.finals.clear()


class InjectedError(Exception):
    """The error that a program raises on purpose."""


class Module(nn.Module):
    """The module of a node."""

    def __init__(self, node: Node, numbers: Iterator[int], env: Run, roles: dict[str, list[nn.Module]]) -> None:
        super().__init__()
        self.number, self.node, self.env = next(numbers), node, env
        roles.setdefault(node.role, []).append(self)
        self.inner, self.weights = nn.ModuleList(), nn.ParameterList()
        self.order: list[Any] = []
        for part in node.parts:
            if isinstance(part, Node):
                self.inner.append(Module(part, numbers, env, roles))
                self.order.append(self.inner[-1].run)
            else:
                self.weights.append(nn.Parameter(weights(len(self.weights) + 1)[-1]))
                self.order.append(partial(self.compute, LAYERS[part], len(self.weights) - 1))

    def compute(self, operation: Any, number: int, x: Tensor) -> Tensor:
        result: Tensor = operation(self.env, x, self.weights[number])
        return result

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order:
            x = part(x)
        return x

    def run(self, x: Tensor) -> Tensor:
        """Call this module as often as its node says, or not at all if the forward skips it."""
        for _ in range(0 if self.number in self.env.step_of_forward.without else self.node.times):
            if self.node.checkpointed and torch.is_grad_enabled():
                x = checkpoint(self, x, use_reentrant=self.env.program.reentrant, preserve_rng_state=False)
            else:
                x = self(x)
        return x


class Model(Module):
    """The outermost module, whose parts are the layers of a context."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.env.step_of_forward
        for number, part in enumerate(self.order):
            with self.env.around:
                x = part(x)
                if step.raises and step.stop == number:
                    raise InjectedError
            x = self.env.layer_done(x)
            if step.stop == number:
                break
        return x


class Run:
    """One run of a program, on `device`; without offloading if that is None."""

    def __init__(self, program: Program, device: AdversarialDevice | None, seed: int = 0) -> None:
        self.program = program
        self.device = device
        self.random = random.Random(seed)
        # After an exception in a backward on the CPU, the queue of autograd keeps the nodes that were ready until a
        # later backward pops them.  This node is older than all others, so its backward pops all of them.
        self.oldest = torch.ones(1, requires_grad=True) * 1.0
        self.context: Any = None
        self.around: Any = nullcontext()
        self.sync: Callable[[Tensor], Tensor] = lambda x: x
        self.controller: Any = None
        self.inputs: list[Tensor] = []
        self.outputs: dict[int, Tensor] = {}
        self.passes: dict[int, Pass] = {}
        self.seen: list[Tensor] = []
        self.failing = False
        self.step_of_forward = Forward(-1)
        # What the layers of one pass share apart from inputs and outputs, and how many `part` operations it had.
        self.state: dict[str, Tensor] = {}
        self.parts = 0
        self.roles: dict[str, list[nn.Module]] = {}
        self.model = Model(program.model, count(), weakref.proxy(self), self.roles).to(helpers.PLACE)
        if device is not None:
            self._side = device.side_stream()
            self._open(device)

    def _open(self, device: AdversarialDevice) -> None:
        number, program = len(self.program.model.parts), self.program
        if isinstance(program.offload, dict):
            kept, groups = (self.roles.get(role, []) for role in ("kept", "group"))
            given = {"layers": groups, "keep": kept, "min_bytes": 4 * LEAST, **program.offload}
            try:
                self.context = actoffload.offload(self.model, **given)
            except ValueError:  # there are not so many groups of any kind
                self.context = actoffload.offload(self.model, **{**given, "num_layers": None})
            return
        if program.offload is None:
            stream: Any = device.new_stream(torch.device("cpu")) if program.one_stream else None
            self.context, self.sync, self.controller = actoffload.get_cpu_offload_context(
                True, 1, number, manual_synchronization=True, offload_stream=stream, max_host_bytes=program.limit
            )
        elif isinstance(program.offload, Plan):
            self.context = OffloadContext(Engine(program.offload, device, program.limit))
            self.sync = self.context.synchronize
        else:
            self.context, self.sync = actoffload.get_cpu_offload_context(
                True, program.offload, number, max_host_bytes=program.limit
            )
        self.around = self.context

    def recording(self) -> AbstractContextManager[Any]:
        """Record a timeline in a ``with`` block."""
        whole = isinstance(self.program.offload, dict)
        recording: AbstractContextManager[Any] = self.context.recording() if whole else self.context.record_timeline()
        return recording

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors that get gradients."""
        return [*self.model.parameters(), *self.inputs]

    # What layers call

    @contextmanager
    def _on_side(self, join: bool) -> Iterator[None]:
        device = self.device
        assert device is not None
        main = device.current_stream(torch.device("cpu"))
        device.wait(self._side, device.record(main))
        try:
            with device.on(self._side):
                yield
        finally:
            if join:
                device.wait(main, device.record(self._side))

    def side(self, *, join: bool) -> AbstractContextManager[None]:
        """Run a ``with`` block on a side stream; with `join`, the current stream waits for it at the end."""
        return nullcontext() if self.device is None else self._on_side(join)

    def made(self, tensor: Tensor) -> Tensor:
        """Record that the current stream has written a new tensor."""
        if self.device is not None:
            self.device.produced(tensor)
        return tensor

    def read(self, tensor: Tensor) -> None:
        """Record that the current stream reads an existing tensor."""
        # The program itself orders accesses to what is not saved for backward, or only by autograd.
        if self.device is not None and torch.is_grad_enabled() and actoffload.is_cpu_offload_enabled():
            self.device.place(tensor)

    def crossing(self) -> None:
        """Order all streams, as a copy between devices does."""
        if self.device is not None:
            self.device.barrier()

    def maybe_fail(self) -> None:
        if self.failing:
            raise InjectedError

    # Steps

    def begin(self, trained: bool) -> Tensor:
        """Return the input of a forward."""
        self.state, self.parts = {}, 0
        x = torch.linspace(-1, 1, ROWS * WIDTH, device=helpers.PLACE).view(ROWS, WIDTH) * (1 + len(self.inputs))
        if trained:
            self.inputs.append(x.requires_grad_())
        return x

    def forward(self, step: Forward | Validate) -> Tensor:
        x = self.begin(isinstance(step, Forward)) * 1.0
        self.step_of_forward = step if isinstance(step, Forward) else Forward(-1)
        if self.around is self.context and self._unfinished():
            self.context.new_pass()
        try:
            x = Model.forward(self.model, x) if self.step_of_forward.loop else self.model(x)
            return x + self.state["forked"] if "forked" in self.state else x
        finally:
            self.crossing()
            self.state = {}

    def _unfinished(self) -> bool:
        current = self.context.current_pass
        return current is not None and bool(self.outputs) and current.open

    def layer_done(self, x: Tensor) -> Tensor:
        """Synchronize a layer of a context; return its output."""
        x = self.sync(x)
        if self.controller is not None and self.step_of_forward.run >= 0:
            self.passes[self.step_of_forward.run] = self.context.current_pass
            if x.requires_grad:
                x.register_hook(lambda grad: self.manual())
            self.manual()
        return x

    def backward(self, step: Backward) -> None:
        output = self.outputs[step.run]
        gradient = torch.linspace(0.5, 1.5, output.numel(), device=output.device).view(output.shape)
        self.failing = step.fails
        self.crossing()
        aside = step.aside and self.device is not None
        try:
            with self.device.on(self._side) if aside and self.device is not None else nullcontext():
                if output.requires_grad:  # not where every module with weights was skipped
                    output.backward(gradient, retain_graph=step.retain)
        finally:
            self.failing = False
            self.crossing()
            if not step.retain:
                del output
                self.drop(step.run)

    def drop(self, run: int) -> None:
        self.passes.pop(run, None)
        self.outputs.pop(run, None)

    def manual(self) -> None:
        """Make random calls of the controller that are legal now."""
        calls = {
            Phase.SAVED: "start_offload_layer",
            Phase.OFFLOADING: "release_activation_forward_gpu_memory",
            Phase.RELEASED: "start_reload_layer",
        }
        while self.controller is not None and self.random.random() < 0.6:
            legal = [
                (calls[layer.phase], layer.index, run)
                for run in self.passes.values()
                for layer in run.layers
                if layer.phase in calls
            ]
            if not legal:
                return
            call, index, run = self.random.choice(legal)
            getattr(self.controller, call)(index, in_pass=run)

    def go(self) -> list[Tensor]:
        for step in self.program.steps:
            self.manual()
            with suppress(InjectedError):
                self.step(step)
        self.outputs.clear()
        self.passes.clear()
        self.oldest.backward(retain_graph=True)
        return self.seen + [torch.zeros(1) if leaf.grad is None else leaf.grad for leaf in self.leaves]

    def step(self, step: Any) -> None:
        if isinstance(step, Forward):
            x = self.forward(step)
            self.seen.append(x.detach().clone())
            self.outputs[step.run] = x
        elif isinstance(step, Backward):
            self.backward(step)
        elif isinstance(step, Drop):
            self.drop(step.run)
        else:
            with torch.no_grad():
                self.seen.append(self.forward(step).clone())


def execute(program: Program, device: AdversarialDevice | None, seed: int = 0) -> tuple[list[Tensor], Any]:
    """Run a program; return its outputs and gradients, and its context or handle."""
    if device is None:
        return Run(program, None).go(), None
    with use(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # windows of one layer; host memory that is exhausted on purpose
        run = Run(program, device, seed)
        with run.recording() if seed % 4 == 3 else nullcontext():  # recording adds waits of its own
            return run.go(), run.context


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bit-identical."""
    bits = [[t.contiguous().view(torch.uint8) for t in tensors] for tensors in (left, right)]
    return len(left) == len(right) and all(map(torch.equal, *bits))


def trial(
    program: Program, expected: list[Tensor], seed: int, mode: Mode = "random", batch: int = 0
) -> tuple[Any, Any]:
    """Run a program in one order and check the result; return the order and the statistics."""
    device = AdversarialDevice(seed, mode)
    device.batch = batch
    clear_marks()
    was_enabled = gc.isenabled()
    gc.disable()  # memory must be freed without the collector
    try:
        got, context = execute(program, device, seed)
        statistics = check(device, context)
    finally:
        if was_enabled:
            gc.enable()
    if not isinstance(program.offload, dict):
        assert statistics.passes == sum(isinstance(step, Forward | Validate) for step in program.steps)
    assert same(got, expected), f"gradients differ from the run without offloading: {program}, seed {seed}, {mode}"
    return tuple(device.orders.trace), statistics


def check(device: AdversarialDevice, context: Any) -> Any:
    """Check that every access was ordered and that no memory is left; return the statistics."""
    device.finish()
    statistics = context.statistics()
    assert device.violations == []
    assert device.buffers == 0
    assert statistics.resident_bytes == 0
    assert statistics.host_bytes_used == 0
    return statistics
