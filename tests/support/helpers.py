"""What the tests of the core share: running layers with and without offload, and comparing bit by bit."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import actoffload
from actoffload.context import OffloadContext
from actoffload.device import use
from actoffload.engine import eligibility

LIMIT = 256 * 1024
"""Smallest number of elements of an offloaded tensor."""
PLACE = torch.device("cpu")
"""Where models and data are; the fixture `place` changes it."""


def place_backend() -> Any:
    """Return the accelerator if `PLACE` is one, or else a reference device of its own."""
    return actoffload.device.ReferenceDevice() if PLACE.type == "cpu" else actoffload.device.backend()


@contextmanager
def min_elements(elements: int = 64) -> Iterator[None]:
    """Offload tensors of this many elements or more, for tests in which the size does not matter."""
    before = eligibility.MIN_ELEMENTS
    eligibility.MIN_ELEMENTS = elements
    try:
        yield
    finally:
        eligibility.MIN_ELEMENTS = before


def make(num_layers: int, model_layers: int, **more: Any) -> tuple[OffloadContext, Callable[[Any], Any]]:
    """Return an enabled context and its synchronization function."""
    with use(more.pop("device", None) or place_backend()):
        context, sync = actoffload.get_cpu_offload_context(True, num_layers, model_layers, **more)
    return context, sync


def make_manual(model_layers: int, **more: Any) -> tuple[OffloadContext, Callable[[Any], Any], Any]:
    """Return the three objects of manual synchronization."""
    with use(more.pop("device", None) or place_backend()):
        context, sync, controller = actoffload.get_cpu_offload_context(
            True, model_layers=model_layers, manual_synchronization=True, **more
        )
    return context, sync, controller


def forward(layers: Sequence[Callable[[Any], Any]], x: Any, context: Any, sync: Any) -> Any:
    """Run layers in order, each in the context."""
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)
    return x


def plain(layers: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    """Run layers in order."""
    for layer in layers:
        x = layer(x)
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits (a NaN equals itself)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def nothing_held(context: OffloadContext | actoffload.OffloadHandle) -> None:
    """Check that no byte is held on the device or in use on the host."""
    statistics = context.statistics()
    assert statistics.resident_bytes == 0
    assert statistics.host_bytes_used == 0


@contextmanager
def no_gc() -> Iterator[None]:
    """Run without the collector: what is freed here is freed by reference counts.

    Garbage of other tests is collected before, as often as that frees something: finalizers make garbage too.
    """
    while gc.collect():
        pass
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def deterministic() -> Iterator[None]:
    """Run with deterministic kernels, on an accelerator that is idle in the end."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Make every operation for which the host waits for an accelerator raise an error."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def alive(*types: type) -> int:
    """Return how many objects of some types the collector knows, reachable or not."""
    return sum(type(thing) in types for thing in gc.get_objects())


class Failing(actoffload.device.ReferenceDevice):
    """A device on which a chosen call fails a number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.calls: Counter[str] = Counter()

    def fail(self, call: str, times: int = 1, after: int = 0) -> None:
        self.failing[call], self.after[call] = times, after

    def _maybe(self, call: str) -> None:
        self.calls[call] += 1
        if self.after.get(call, 0) > 0:
            self.after[call] -= 1
        elif self.failing.get(call, 0) > 0:
            self.failing[call] -= 1
            raise RuntimeError(f"{call} failed")


def _failing(call: str) -> Callable[..., Any]:
    def method(self: Failing, *args: Any, **more: Any) -> Any:
        self._maybe(call)
        return getattr(actoffload.device.ReferenceDevice, call)(self, *args, **more)

    return method


for _call in ("empty_host", "empty_device", "to_host", "to_device", "wait"):
    setattr(Failing, _call, _failing(_call))


class Saves(torch.autograd.Function):
    """Saves tensors, and appends what is unpacked in backward to a list."""

    @staticmethod
    def forward(ctx, x, seen, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.seen += ctx.saved_tensors
        return grad, None, *[None] * len(ctx.saved_tensors)


def in_threads(*work: Callable[[], object]) -> None:
    """Run functions in threads of their own, which begin together; raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(work))

    def run(job: Callable[[], object]) -> None:
        try:
            barrier.wait(10)
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread has not ended within 120 s"
    if errors:
        raise errors[0]
