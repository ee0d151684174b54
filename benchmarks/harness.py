"""Measure the arms of a workload side by side: step times, peaks and copies, and what follows from them.

All arms run the same weights in one process, interleaved.  No offload is timed as two arms, whose difference is the
noise.  Every method runs once before anything is measured, so that its workspaces exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from workloads import Settings, Stack

import actoffload
from actoffload.measure import MemoryMeter, measure_link, measure_peak, measure_step_times, measured_costs
from actoffload.schedule import Kind, Link, Plan, Timeline, simulate

NOTHING, AGAIN, OURS = "no offload", "no offload, again", "actoffload"
CHECKPOINT, SAVE = "checkpoint", "save_on_cpu"
SETTLING = 60
"""Steps after which the plan of a handle has to be final."""
Rows: TypeAlias = dict[tuple[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Arm:
    """One way to run a step, and the context or handle that counts what it copies."""

    method: str
    num_layers: int
    step: Callable[[], object]
    offloader: Any = None

    @property
    def key(self) -> tuple[str, int]:
        return self.method, self.num_layers


def _in_context(pair: Any, k: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    context, sync_function = pair
    with context:
        x = layer(x)
    return sync_function(x)


def _saved_on_cpu(count: int, pinned: bool, k: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu(pin_memory=pinned) if k < count else nullcontext():
        return layer(x)


def _checkpointed(count: int, k: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False) if k < count else layer(x)


def context_step(stack: Stack, pair: Any) -> Callable[[], object]:
    """Return a step with a context around each layer."""
    return partial(stack.step, run=partial(_in_context, pair))


class Contexts:
    """Arms with a context around each layer, and the other methods for the same numbers of layers."""

    def __init__(self, stack: Stack) -> None:
        self._stack, settings = stack, stack.settings
        self._pairs = {
            count: actoffload.get_cpu_offload_context(enabled=True, num_layers=count, model_layers=settings.layers)
            for count in settings.counts
        }
        self.arms = [Arm(OURS, n, context_step(stack, pair), pair[0]) for n, pair in self._pairs.items()]
        pinned = stack.device.type != "cpu"
        for count in settings.counts:
            self.arms.append(Arm(CHECKPOINT, count, partial(stack.step, run=partial(_checkpointed, count))))
            self.arms.append(Arm(SAVE, count, partial(stack.step, run=partial(_saved_on_cpu, count, pinned))))

    def details(self, rows: Rows, link: Link) -> dict[str, Any]:
        """Add what `simulate` predicts and the recorded copies to the rows; return the measured costs of the layers."""
        layers = self._stack.settings.layers
        *manual, _ = actoffload.get_cpu_offload_context(enabled=True, model_layers=layers, manual_synchronization=True)
        self._record(manual, 1)
        costs = measured_costs(self._record(manual, 5))
        still = simulate(Plan(layers), costs, link)
        for count, pair in self._pairs.items():
            row, moving = rows[OURS, count], simulate(pair[0].plan, costs, link)
            # What a step does outside of the layers, input and loss, is the same with and without offload.
            predicted = moving.step_time + sum(row["compute"].values()) - still.step_time
            row["predicted_seconds"], row["deviation"] = predicted, row["seconds"] / predicted - 1
            row["predicted_stall_seconds"] = moving.stall_seconds
            recorded = self._record(pair, 3)
            row["copies"] = {"stall_seconds": median(t.seconds(Kind.STALL) for t in recorded)}
            for kind, name in ((Kind.D2H, "d2h"), (Kind.H2D, "h2d")):
                row["copies"][name] = recorded[0].nbytes(kind) / median(t.seconds(kind) for t in recorded)
        return {"layers": [{**asdict(cost), "saved": [astuple(s) for s in cost.saved]} for cost in costs]}

    def _record(self, pair: Any, steps: int) -> list[Timeline]:
        timelines = []
        for _ in range(steps):
            with pair[0].record_timeline() as recorder:
                context_step(self._stack, pair)()
            timelines.append(recorder.timeline())
        return timelines

    def close(self) -> None:
        """Free the host memory."""
        for context, _ in self._pairs.values():
            context.close()


class WholeModel:
    """Arms of one model under `actoffload.offload`."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._offload(stack.settings.layers - 1)
        self.arms = [Arm(OURS, n, partial(self.step, n), self) for n in stack.settings.counts]

    def _offload(self, count: int) -> None:
        self._count, stack = count, self._stack
        self.handle = actoffload.offload(stack.model, num_layers=count, min_bytes=stack.settings.min_bytes)

    def statistics(self) -> Any:
        """Return the statistics of the present handle."""
        return self.handle.statistics()

    def reset_statistics(self) -> None:
        """Reset the statistics of the present handle."""
        self.handle.reset_statistics()

    def step(self, count: int, between: Callable[[], object] | None = None) -> None:
        """Run one step; the model is offloaded anew only if the number changes, so not in what is timed."""
        if count != self._count:
            self.handle.remove()
            self._offload(count)
        self._stack.step(self._stack.model, between)

    def details(self, rows: Rows, link: Link) -> dict[str, Any]:
        """Return recorded steps: with the most layers whose copies fit, and with all but two."""
        fitting = [count for (method, count), row in rows.items() if method == OURS and row["fits"]]
        most = max(1, self._stack.settings.layers - 2)
        return {"timelines": [self._timeline(n) for n in sorted({max(fitting, default=1), most})]}

    def _timeline(self, count: int) -> dict[str, Any]:
        self.step(count)
        with self.handle.recording():
            self.step(count)
        step = self.handle.timeline()
        return {
            "num_layers": count,
            "end_seconds": step.timeline.end,
            "seconds": {kind.name.lower(): seconds for kind, seconds in step.seconds.items()},
            "bandwidth": {kind.name.lower(): speed for kind, speed in step.bandwidth.items()},
            "stalls": [
                {"layer": layer, "forward": times.forward_stall, "backward": times.backward_stall}
                for layer, times in enumerate(step.by_layer())
            ],
        }

    def close(self) -> None:
        """Remove the hooks and free the host memory."""
        self.handle.remove()


def record_saves(stack: Stack) -> list[tuple[torch.Tensor, str]]:
    """Run a step without offload; return each tensor that autograd saves, and the module of the layers that runs."""
    saves: list[tuple[torch.Tensor, str]] = []
    running, handles = [""], []
    for name, module in stack.twin.named_modules():
        if name.startswith("layers."):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            handles.append(module.register_forward_hook(lambda *_: running.pop() and None))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saves.append((tensor.detach(), running[-1]))
        return saves[-1][0]

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stack.step()
    for handle in handles:
        handle.remove()
    return saves


def saved_storages(stack: Stack) -> list[dict[str, Any]]:
    """Return the storages that autograd saves in the layers, without weights, in order: each with its first tensor."""
    storages: dict[int, dict[str, Any]] = {}
    weights = {weight.data_ptr() for weight in stack.twin.parameters()}
    for tensor, name in record_saves(stack):
        storage = tensor.untyped_storage()
        if name and storage.data_ptr() not in weights:
            _, layer, *module = name.split(".")
            entry = {"module": ".".join(module), "dtype": str(tensor.dtype).removeprefix("torch.")}
            entry |= {"shape": tuple(tensor.shape), "nbytes": storage.nbytes(), "tensor_nbytes": 0, "layers": set()}
            found = storages.setdefault(storage.data_ptr(), entry)
            found["tensor_nbytes"] = max(found["tensor_nbytes"], tensor.nbytes)
            found["layers"].add(int(layer))
    return list(storages.values())


def absent_bytes(saved: list[dict[str, Any]], num_layers: int, min_bytes: int) -> int:
    """Return the bytes absent from the device at the peak, the end of forward: storages of offloaded layers alone."""
    return sum(s["nbytes"] for s in saved if max(s["layers"]) < num_layers and s["tensor_nbytes"] >= min_bytes)


def forward_share(stack: Stack, repeats: int = 5) -> float:
    """Return the part of a step without offload that is forward; the loss counts as backward."""
    shares = []
    for _ in range(repeats):
        with MemoryMeter() as meter:
            meter.sample()
            stack.step(between=meter.sample)
            meter.sample()
        (first, _), (middle, _), (last, _) = meter.samples
        shares.append((middle - first) / (last - first))
    return median(shares)


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def settle(
    handle: Any, step: Callable[[], object], steps: int, anywhere: Callable[[bool], bool] = bool
) -> tuple[int, int]:
    """Run steps until the plan of a handle is final; return their number, and the largest peak in bytes.

    They wait for the device where those wait that are timed later, by `measure_step_times` with the same `steps`, so
    that the plan is chosen in steps like these.

    Parameters
    ----------
    handle, step, steps
        The handle of the model that `step` trains, and the number of steps that are timed in a row.
    anywhere : callable
        From whether the plan of this rank may change to whether that of any rank may: all run equally many steps.

    Raises
    ------
    RuntimeError
        If the plan is not final after `SETTLING` steps.
    """
    number = peak = 0
    timed = partial(measure_step_times, {"": step}, repeats=1, steps=steps, warmup=0)
    while anywhere(handle.settling):
        check_settling(number, handle)
        peak, number = max(peak, measure_peak(timed, warmup=0)), number + 1 + steps
    return number, peak


def check_settling(number: int, handle: Any) -> None:
    """Raise a `RuntimeError` if the plan of a handle may still change after so many steps."""
    if number >= SETTLING:
        raise RuntimeError(f"The plan is not final after {number} steps: {handle.plan.because}")


def driver_calls(device: torch.device) -> dict[str, int]:
    """Return how often memory was allocated from the driver so far, on the device and on the host."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats() | torch.cuda.host_memory_stats()
    names = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_host_alloc", "num_host_free")
    return {name: int(stats.get(name, 0)) for name in names}


def counted(arm: Arm, device: torch.device, link: Link) -> dict[str, Any]:
    """Return the peak, the copies and roughly the seconds of the second of two steps."""
    arm.step()
    if arm.offloader is not None:
        arm.offloader.reset_statistics()
    with MemoryMeter() as meter:
        begun = time.perf_counter()
        arm.step()
        synchronize(device)
        seconds = time.perf_counter() - begun
    row = {"peak_bytes": meter.peak_bytes, "rough_seconds": seconds}
    if arm.offloader is not None:
        statistics = arm.offloader.statistics()
        names = ("tensors_offloaded", "bytes_offloaded", "bytes_reloaded", "reloaded_on_demand", "host_bytes")
        row |= {name: getattr(statistics, name) for name in names}
        row |= {"d2h_seconds": row["bytes_offloaded"] / link.d2h, "h2d_seconds": row["bytes_reloaded"] / link.h2d}
        row["host_ratio"] = row["host_bytes"] / row["bytes_offloaded"]
    return row


def fits(row: dict[str, Any], compute: dict[str, float]) -> bool:
    """Whether D2H copies take no longer than forward, and H2D copies no longer than backward."""
    return bool(row["d2h_seconds"] <= compute["forward"] and row["h2d_seconds"] <= compute["backward"])


def bound_seconds(row: dict[str, Any], compute: dict[str, float]) -> float:
    """Return the time of a step whose copies run entirely beside compute, each as fast as it is alone."""
    return max(compute["forward"], row["d2h_seconds"]) + max(compute["backward"], row["h2d_seconds"])


def timed(arms: list[Arm], rows: Rows, share: float, seconds: float, steps: int) -> Rows:
    """Time arms, the first of them no offload, for some seconds; `share` is the part of its step that is forward."""
    once = sum(rows[arm.key]["rough_seconds"] for arm in arms) * (1 + steps)
    repeats = min(9, max(2, round(seconds / once)))
    functions: dict[Any, Callable[[], object]] = {arm.key: arm.step for arm in arms}
    samples: dict[Any, list[float]] = measure_step_times(functions, repeats=repeats, steps=steps, warmup=0)
    baseline = median(samples[arms[0].key])
    compute = {"forward": baseline * share, "backward": baseline * (1 - share)}
    print(f"  {len(arms)} arms timed, {repeats} repeats", flush=True)
    return {
        key: {"seconds": median(found), "samples": found, "ratio": median(found) / baseline, "compute": compute}
        for key, found in samples.items()
    }


def _rounds(arms: list[Arm], rows: Rows, compute: dict[str, float]) -> Iterable[list[Arm]]:
    """Return the arms that are timed together: copies that fit, those that do not, other methods."""
    none, again, *others = arms
    rounds: dict[bool | None, list[Arm]] = {True: [again], False: [], None: []}
    for arm in others:
        rounds[fits(rows[arm.key], compute) if arm.method == OURS else None].append(arm)
    return [[none, *some] for some in rounds.values() if some]


def measure(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Measure all arms of one workload; return the data of its result."""
    stack = Stack(settings, device)
    source = WholeModel(stack) if stack.whole else Contexts(stack)
    none = Arm(NOTHING, 0, stack.step)
    arms = [none, replace(none, method=AGAIN), *source.arms]
    saved = saved_storages(stack)
    link = measure_link(*((2**20, 3) if device.type == "cpu" else ()))
    for arm in {arm.method: arm for arm in arms}.values():  # of each method the one with the most layers
        arm.step()
    share = forward_share(stack)
    rows = {arm.key: counted(arm, device, link) for arm in reversed(arms)}
    print("  peaks and copies measured", flush=True)

    once = rows[none.key]["rough_seconds"]
    before, found = driver_calls(device), {}
    for some in _rounds(arms, rows, {"forward": once * share, "backward": once * (1 - share)}):
        found = timed(some, rows, share, settings.seconds, settings.steps) | found
    calls = {name: count - before[name] for name, count in driver_calls(device).items()}
    peak = rows[none.key]["peak_bytes"]
    for key, row in rows.items():
        row |= {**found[key], "drop_bytes": peak - row["peak_bytes"]}
        del row["rough_seconds"]
        if "bytes_offloaded" in row:
            row["bytes_absent"] = absent_bytes(saved, key[1], settings.min_bytes)
            row["r"] = row["drop_bytes"] / row["bytes_absent"]
            row["fits"], row["bound_seconds"] = fits(row, row["compute"]), bound_seconds(row, row["compute"])
            row["bound_ratio"] = row["seconds"] / row["bound_seconds"]
    details = source.details(rows, link)
    source.close()
    return {
        "settings": settings.to_json(),
        "link": {"d2h": link.d2h, "h2d": link.h2d},
        "compute": rows[none.key]["compute"],
        "noise": abs(rows[AGAIN, 0]["ratio"] - 1),
        "driver_calls": calls,
        "saved": [{**s, "layers": sorted(s["layers"])} for s in saved if 1 in s["layers"]],
        "arms": [{"method": arm.method, "num_layers": arm.num_layers, **rows[arm.key]} for arm in arms],
        **details,
    }
