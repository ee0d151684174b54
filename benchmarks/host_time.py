"""Host time: what offloading adds to a step of Llama layers and to one saved tensor.

The reference is `Bare`: the same copies with hooks and CUDA calls alone, for a model that saves the same tensors in
every step and changes none of them.  No offloader in Python that copies each storage by itself takes less.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any, TypeAlias

import torch
from harness import WholeModel, record_saves, synchronize
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from workloads import Settings, Stack

import actoffload
from actoffload.engine.hooks import Packer
from actoffload.engine.passes import Pass
from actoffload.model import tracker
from actoffload.model.tracker import Tracker

WARMUP = 5
HOOKS_ALONE = "autograd's hooks alone, doing nothing"
OFFLOADED = "offloaded and reloaded"
TENSORS = (16, 80)  # few enough that neither kernels nor copies fill the device's queue
SMALL, ELIGIBLE = 256, 256 * 1024  # elements
PARAMETERS = (1, 20, 200)
CALLS = ((Packer, "pack"), (tracker, "unpack"), (Pass, "backward_reached"), (Tracker, "begin"), (Tracker, "end"))
"""What runs in a step of an offloaded model, called by autograd and by modules; `backward_reached` also by `unpack`."""


@dataclass(slots=True)
class _Slot:
    """An offloaded storage: its host copy, its layout, and how many saved tensors are on it."""

    host: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    uses: int = 1


_Again: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]
"""A storage that is offloaded already: the index of the save that offloaded it, and the layout of this one."""


class Bare:
    """Offload what `actoffload.offload` does in the first layers; each layer is freed when two more have run."""

    def __init__(self, stack: Stack, layers: int) -> None:
        self._stack, self._device = stack, stack.device
        self._out, self._back = torch.Stream(stack.device), torch.Stream(stack.device)
        self._saves: list[_Slot | _Again | None] = []  # what is done with each save of a step
        self._learn(layers)
        # The saves that are offloaded.
        self.order = [k for k, save in enumerate(self._saves) if isinstance(save, _Slot)]
        self._each = len(self.order) // layers  # storages of a layer
        self._next = 0
        self._copied: deque[tuple[list[torch.Tensor], torch.Event]] = deque()
        self._ahead: list[int] = []  # saves to reload, the next one last
        self._reloaded: dict[int, list[Any]] = {}  # save -> memory, event of its copy until it was waited for, uses

    def _learn(self, layers: int) -> None:
        """Run a step, and allocate host memory for each storage to offload."""
        saves = record_saves(self._stack)
        weights = {weight.data_ptr() for weight in self._stack.twin.parameters()}
        in_layers: dict[int, set[str]] = defaultdict(set)
        for tensor, name in saves:
            in_layers[tensor.untyped_storage().data_ptr()].add(".".join(name.split(".")[:2]))
        moved = {f"layers.{number}" for number in range(layers)}
        first: dict[int, int] = {}
        for k, (tensor, _) in enumerate(saves):
            address = tensor.untyped_storage().data_ptr()
            small = tensor.nbytes < self._stack.settings.min_bytes
            if small or address in weights or len(in_layers[address]) > 1 or not in_layers[address] <= moved:
                self._saves.append(None)
            elif address in first:
                slot = self._saves[first[address]]
                assert isinstance(slot, _Slot)
                slot.uses += 1
                self._saves.append((first[address], tensor.size(), tensor.stride()))
            else:
                first[address] = k
                memory = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
                host = memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
                self._saves.append(_Slot(host, tensor.size(), tensor.stride()))

    def step(self, between: Callable[[], object] | None = None) -> None:
        """Run a step, with a call between forward and backward."""
        self._next, self._ahead = 0, self.order.copy()
        self._compute = torch.accelerator.current_stream()
        with saved_tensors_hooks(self._pack, self._unpack):
            self._stack.step(between=between)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | int | _Again:
        k = self._next
        self._next += 1
        save = self._saves[k]
        if not isinstance(save, _Slot):
            return save or (tensor if tensor.is_leaf else tensor.detach())
        held = [tensor.detach()]
        self._out.wait_event(self._compute.record_event())
        with self._out:
            save.host.copy_(held[0], True)
        self._copied.append((held, self._out.record_event()))
        last = k == self.order[-1]
        while len(self._copied) > (0 if last else 2 * self._each):
            held, copied = self._copied.popleft()
            self._compute.wait_event(copied)
            held.clear()
        return k

    def _unpack(self, saved: torch.Tensor | int | _Again) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        k = saved if isinstance(saved, int) else saved[0]
        if self._ahead and len(self._reloaded) <= self._each:
            self._reload()
        memory, copied, uses = entry = self._reloaded[k]
        if copied is not None:
            self._compute.wait_event(copied)
            entry[1] = None
        entry[2] = uses - 1
        if not entry[2]:
            del self._reloaded[k]
        return memory if isinstance(saved, int) else memory.as_strided(saved[1], saved[2])

    def _reload(self) -> None:
        """Queue the copies of two layers, or of as many as are left."""
        saves = [self._ahead.pop() for _ in range(min(2 * self._each, len(self._ahead)))]
        slots = [self._saves[k] for k in saves]
        empty = [torch.empty_strided(s.size, s.stride, dtype=s.host.dtype, device=self._device) for s in slots]
        self._back.wait_event(self._compute.record_event())
        for k, slot, memory in zip(saves, slots, empty, strict=True):
            with self._back:
                memory.copy_(slot.host, True)
            self._reloaded[k] = [memory, self._back.record_event(), slot.uses]


def host_seconds(step: Callable[[Callable[[], object]], object], device: torch.device) -> tuple[float, float, float]:
    """Return the host time of forward and of backward of a step, and of the device after them.

    `step` calls its argument between the two.  The device is idle before each, so the host never waits for its queue.
    """
    turns: list[float] = []

    def turn() -> None:
        turns.append(time.perf_counter())
        synchronize(device)
        turns.append(time.perf_counter())

    turn()
    step(turn)
    turn()
    return turns[2] - turns[1], turns[4] - turns[3], turns[3] - turns[2] + turns[5] - turns[4]


@contextmanager
def _timed(owner: Any, name: str, found: dict[tuple[str, str], list[float]]) -> Iterator[None]:
    """Time the calls of a function, by the kind of what a pack hook returns or an unpack hook is given."""
    function = getattr(owner, name)

    def timed(*args: Any, **how: Any) -> Any:
        begun = time.perf_counter()
        result = function(*args, **how)
        seconds = time.perf_counter() - begun
        hook = args[-1] if name.endswith("unpack") else result if name.endswith("pack") else None
        found.setdefault((name, "" if hook is None else type(hook).__name__), []).append(seconds)
        return result

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, function)


def profile_calls(step: Callable[[], object], calls: Sequence[tuple[Any, str]], repeats: int) -> list[dict[str, Any]]:
    """Return how often each call comes in a step, and the median of the seconds that it takes."""
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(_timed(owner, name, found))
        for _ in range(repeats):
            step()
    rows = [{"call": c, "of": of, "count": len(s) / repeats, "seconds": median(s)} for (c, of), s in found.items()]
    return sorted(rows, key=lambda row: -row["count"] * row["seconds"])


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_layers(settings: Settings, device: torch.device, repeats: int) -> dict[str, Any]:
    """Measure steps without offload, with all but two layers offloaded, with paused hooks and with `Bare`, interleaved.

    A step has so few tokens that it takes the host longer than the device.  ``added`` are seconds of host time of a
    step, ``ratio`` is added / added by `Bare`, which needs an accelerator, ``behind`` the device's time after the host.
    """
    stack = Stack(settings, device)
    source, count = WholeModel(stack), settings.layers - 2
    source.step(count)  # the schedule is changed before anything is timed
    bare = None if device.type == "cpu" else Bare(stack, count)
    cases = {"without": lambda turn: stack.step(between=turn), "paused": lambda turn: source.step(count, turn)}
    cases["with"] = cases["paused"]
    if bare is not None:
        cases["bare"] = bare.step

    def once(case: str) -> tuple[float, float, float]:
        with source.handle.paused() if case == "paused" else nullcontext():
            return host_seconds(cases[case], device)

    for case in list(cases) * WARMUP:
        once(case)
    source.handle.reset_statistics()
    once("with")
    tensors = source.handle.statistics().tensors_offloaded
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in cases}
    with _no_collection():
        for _ in range(repeats):
            for case in cases:
                found[case].append(once(case))
        calls = {"with": profile_calls(partial(once, "with"), CALLS, repeats)}
        if bare is not None:
            hooks = (Bare, "_pack"), (Bare, "_unpack")
            calls["bare"] = profile_calls(partial(once, "bare"), hooks, repeats)
    source.close()
    medians = {case: [median(column) for column in zip(*samples, strict=True)] for case, samples in found.items()}
    host = {case: {"forward": forward, "backward": backward} for case, (forward, backward, _) in medians.items()}
    added = {case: sum(host[case].values()) - sum(host["without"].values()) for case in cases}
    behind = {case: seconds for case, (*_, seconds) in medians.items()}
    data: dict[str, Any] = {"settings": settings.to_json(), "repeats": repeats, "num_layers": count}
    data |= {"tensors_offloaded": tensors, "host": host, "behind": behind}
    data |= {"added": added["with"], "added_paused": added["paused"], "calls": calls}
    data |= {"added_per_layer": added["with"] / count, "added_per_tensor": added["with"] / tensors}
    if bare is not None:
        rounds = zip(found["without"], found["with"], found["bare"], strict=True)
        each = [(sum(w[:2]) - sum(none[:2])) / (sum(b[:2]) - sum(none[:2])) for none, w, b in rounds]
        low, _, high = quantiles(each, n=4)
        data |= {"added_bare": added["bare"], "tensors_bare": len(bare.order)}
        data |= {"ratio": added["with"] / added["bare"], "ratio_quartiles": [low, high]}
    return data


class Chain(nn.Module):
    """Operations that save one tensor each, or a constant without gradient, in a layer with some parameters."""

    def __init__(self, parameters: int, constants: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(parameters)])
        self.constants = constants

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Apply the operations."""
        for k in range(count):
            x = x * self.constants[k] if self.constants else x.sin()
        return x


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _once(
    chain: Chain, elements: int, where: int, device: torch.device, pair: Any, count: int
) -> tuple[float, float, float]:
    """Return the host seconds of a step of three layers, of which layer `where` saves `count` tensors."""
    context, sync_function = pair

    def step(turn: Callable[[], object]) -> None:
        x = torch.ones(elements, device=device, dtype=torch.float16, requires_grad=True) * 0.5
        for k in range(3):
            with context:
                x = chain(x, count if k == where else 1)
            x = sync_function(x)
        loss = x.sum()
        turn()
        loss.backward()

    return host_seconds(step, device)


def measure_tensors(repeats: int, device: torch.device) -> dict[str, Any]:
    """Measure the host time of one saved tensor: passed through or offloaded, in layers of 1, 20 and 200 parameters.

    It is what a context adds for each tensor more in one of three layers; what is left is the time of the layers.
    """
    nothing = actoffload.get_cpu_offload_context(enabled=False)
    offloading = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    constants = [torch.ones(ELIGIBLE, device=device, dtype=torch.float16) for _ in range(max(TENSORS))]
    kinds = {
        "passed through, too small": (SMALL, 0, []),
        "passed through, layer stays": (ELIGIBLE, 2, []),
        "passed through, layer stays, no gradient": (ELIGIBLE, 2, constants),
    }
    cases = [(HOOKS_ALONE, 1, (SMALL, 0, []))]
    cases += [(name, count, kind) for name, kind in kinds.items() for count in PARAMETERS]
    cases.append((OFFLOADED, 1, (ELIGIBLE, 0, [])))
    rows = []
    for name, parameters, (elements, where, saved) in cases:
        pair = (saved_tensors_hooks(_same, _same), _same) if name == HOOKS_ALONE else offloading
        chain = Chain(parameters, saved)
        once = partial(_once, chain, elements, where, device)
        arms = [(which, count) for count in TENSORS for which in (nothing, pair)]
        for _ in range(min(10, repeats)):
            for arm in arms:
                once(*arm)
        offloading[0].reset_statistics()
        once(pair, TENSORS[1])
        statistics = offloading[0].statistics()
        with _no_collection():
            found = [[once(*arm) for arm in arms] for _ in range(repeats)]
        sides = [[median(column) for column in zip(*side, strict=True)] for side in zip(*found, strict=True)]
        few, many = ([hooked[k] - without[k] for k in (0, 1)] for without, hooked in (sides[:2], sides[2:]))
        each = [(m - f) / (TENSORS[1] - TENSORS[0]) for f, m in zip(few, many, strict=True)]
        rows.append({"case": name, "parameters": parameters, "tensors_offloaded": statistics.tensors_offloaded})
        rows[-1] |= {"seconds": sum(each), "forward_seconds": each[0], "backward_seconds": each[1]}
        rows[-1] |= {"layer_seconds": (sum(few) - TENSORS[0] * sum(each)) / 3}
    offloading[0].close()
    return {"repeats": repeats, "cases": rows}
