"""Run a program with offloading on the adversarial device and without, and compare."""

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import helpers
import pytest
import torch
from torch import Tensor

import actoffload
from actoffload.context import OffloadContext
from actoffload.device import use
from actoffload.engine import eligibility, host_pool
from actoffload.engine import layout as regions
from actoffload.engine.engine import Engine
from actoffload.engine.layer import Phase
from actoffload.engine.passes import Pass
from actoffload.schedule.plan import Plan

from .device import AdversarialDevice
from .models import DEVICE_KINDS, KINDS, LEAST, ROWS, STREAM_KINDS, WIDTH, weights
from .orders import Mode
from .programs import Backward, Drop, Forward, Validate

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
        patch.setattr(regions, "GRAIN", 16)
        patch.setattr(host_pool, "ALIGN", 64)
        patch.setattr(host_pool, "SPLIT", 256)
        patch.setattr(host_pool, "GRANULE", 1024)
        patch.setattr(Pass, "fetch", watched)
        yield


def clear_marks() -> None:
    """Clear the marks of earlier runs: with any mark left, the engine takes a slower path."""
    eligibility.kept.clear()
    eligibility.finals.clear()


class InjectedError(Exception):
    """The error that a program raises on purpose."""


class Run:
    """One run of a program, on `device`; without offloading if that is None."""

    def __init__(self, program: Any, device: AdversarialDevice | None, seed: int = 0) -> None:
        self.program = program
        self.device = device
        self.random = random.Random(seed)
        # After an exception in a backward on the CPU, the queue of autograd keeps the nodes that were ready until a
        # later backward pops them.  This node is older than all others, so its backward pops all of them.
        self.oldest = torch.ones(1, requires_grad=True) * 1.0
        self.context: Any = nullcontext()
        self.sync: Callable[[Tensor], Tensor] = lambda x: x
        self.controller: Any = None
        self.inputs: list[Tensor] = []
        self.outputs: dict[int, Tensor] = {}
        self.passes: dict[int, Pass] = {}
        self.seen: list[Tensor] = []
        self.failing = False
        # What the layers of one pass share apart from inputs and outputs, and how many `part` operations it had.
        self.state: dict[str, Tensor] = {}
        self.parts = 0
        self._build()
        if device is not None:
            self._side = device.side_stream()
            self._open(device)

    def _build(self) -> None:
        self.weights = [w.requires_grad_() for w in weights(sum(map(len, self.program.layers)))]

    def _open(self, device: AdversarialDevice) -> None:
        count, program = len(self.program.layers), self.program
        if program.offload is None:
            stream: Any = device.new_stream(torch.device("cpu")) if program.one_stream else None
            self.context, self.sync, self.controller = actoffload.get_cpu_offload_context(
                True, 1, count, manual_synchronization=True, offload_stream=stream, max_host_bytes=program.limit
            )
        elif isinstance(program.offload, Plan):
            self.context = OffloadContext(Engine(program.offload, device, program.limit))
            self.sync = self.context.synchronize
        else:
            self.context, self.sync = actoffload.get_cpu_offload_context(
                True, program.offload, count, max_host_bytes=program.limit
            )

    def recording(self) -> AbstractContextManager[Any]:
        """Record a timeline in a ``with`` block."""
        recording: AbstractContextManager[Any] = self.context.record_timeline()
        return recording

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors that get gradients."""
        return [*self.weights, *self.inputs]

    @staticmethod
    def count(program: Any) -> int | None:
        """Return the number of passes of a program, or None if it is not known."""
        return sum(isinstance(step, Forward | Validate) for step in program.steps)

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
            self.device.saved(tensor, self.device.current_stream(self.device.place(tensor)))

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
        index = 0
        x = self.begin(isinstance(step, Forward))
        if self.device is not None and self._unfinished():
            self.context.new_pass()
        try:
            for number, kinds in enumerate(self.program.layers):
                with self.context:
                    for kind in kinds:
                        x = LAYERS[kind](self, x, self.weights[index])
                        index += 1
                    if isinstance(step, Forward) and step.raises and step.stop == number:
                        raise InjectedError
                x = self.sync(x)
                if isinstance(step, Forward):
                    self._layer_done(step.run, x)
                    if step.stop == number:
                        break
            return x + self.state["forked"] if "forked" in self.state else x
        finally:
            self.crossing()
            self.state = {}

    def _unfinished(self) -> bool:
        current = self.context.current_pass
        return current is not None and bool(self.outputs) and current.open

    def _layer_done(self, run: int, x: Tensor) -> None:
        if self.controller is not None:
            self.passes[run] = self.context.current_pass
            if x.requires_grad:
                x.register_hook(lambda grad: self.manual())
            self.manual()

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


def execute(
    program: Any, device: AdversarialDevice | None, seed: int = 0, kind: type[Run] = Run
) -> tuple[list[Tensor], Any]:
    """Run a program; return its outputs and gradients, and its context."""
    if device is None:
        return kind(program, None, 0).go(), None
    with use(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # windows of one layer; host memory that is exhausted on purpose
        run = kind(program, device, seed)
        with run.recording() if seed % 4 == 3 else nullcontext():  # recording adds waits of its own
            return run.go(), run.context


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bit-identical."""
    bits = [[t.contiguous().view(torch.uint8) for t in tensors] for tensors in (left, right)]
    return len(left) == len(right) and all(map(torch.equal, *bits))


def trial(
    program: Any, expected: list[Tensor], seed: int, mode: Mode = "random", kind: type[Run] = Run, batch: int = 0
) -> tuple[Any, Any]:
    """Run a program in one order and check the result; return the order and the statistics."""
    device = AdversarialDevice(seed, mode)
    device.batch = batch
    clear_marks()
    was_enabled = gc.isenabled()
    gc.disable()  # memory must be freed without the collector
    try:
        got, context = execute(program, device, seed, kind)
        statistics = check(device, context)
    finally:
        if was_enabled:
            gc.enable()
    assert kind.count(program) in (None, statistics.passes)
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
