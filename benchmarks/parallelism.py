"""Offloading beside the collectives of FSDP2, DDP, tensor parallel and context parallel, and these beside copies.

Each part runs in one process for each GPU.  All ways to run a step are timed side by side, with no offload twice; a
sample is the time of the slowest rank.  Link rates are measured while all ranks copy, and `simulate` is given them.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from collectives import measure_collectives
from frontier import _Called, measured_costs
from harness import AGAIN, CHECKPOINT, NOTHING, settle
from processes import largest, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from workloads import FULL, Block, Model, Settings

import actoffload
from actoffload.measure import measure_link, measure_peak, measure_step_times
from actoffload.schedule import Link, Plan, simulate

__all__ = ["PARTS", "Sizes", "measure_part"]

LAYERS, DEFAULT, BUDGET, PAUSED = "num_layers", "default", "budget", "paused"
FSDP, DDP, TENSOR, CONTEXT, COLLECTIVES = PARTS = ("fsdp", "ddp", "tensor", "context", "collectives")
BUDGETS = 1.0, 1.03
"""Budgets as parts of the peak of activation checkpointing, up to the next page of memory.

Of two models that are made alike one may take 512 bytes more, and near the smallest peak these decide which plans fit.
"""
PAGE, MIB = 2**12, 2**20
LIMIT = 300.0
"""Seconds for the processes of a part."""
STEPS = 2
"""Steps in a row that are timed as one sample."""


@dataclass(frozen=True)
class Sizes:
    """The layers, how often they run, and the copies beside collectives.

    Parameters
    ----------
    llama, blocks : Settings
        Llama layers, and GPT blocks for context parallel, whose attention takes no grouped queries.
    counts : dict of str to tuple of int
        Numbers of layers that are offloaded, by part.
    repeats : dict of str to int
        Samples of each arm, by part.
    link : int
        Bytes of a copy with which the rates of the link are measured.
    collectives : dict of str to int
        Arguments of `measure_collectives`; the copies last several times as long as the collectives.
    """

    llama: Settings
    blocks: Settings
    counts: dict[str, tuple[int, ...]]
    repeats: dict[str, int]
    link: int
    collectives: dict[str, int]


SIZES = Sizes(
    FULL["8k"],
    FULL["gpt"],
    {FSDP: (2, 3, 4, 8), DDP: (2, 3), TENSOR: (2,), CONTEXT: (2,)},
    repeats={FSDP: 5, DDP: 4, TENSOR: 4, CONTEXT: 4},
    link=256 * MIB,
    collectives={"nbytes": 416 * MIB, "times": 20, "copied": 256 * MIB, "copies": 24, "repeats": 7},
)
SMALL = Sizes(
    Settings(4, (1, 64, 128), "float32", heads=4, kv_heads=2, intermediate=256, min_bytes=1024),
    Settings(4, (1, 64, 128), "float32", heads=2, min_bytes=1024),
    {FSDP: (1, 2), DDP: (1,), TENSOR: (1,), CONTEXT: (1,)},
    repeats=dict.fromkeys(PARTS, 2),
    link=MIB,
    collectives={"nbytes": MIB, "times": 2, "copied": MIB, "copies": 2, "repeats": 2},
)
"""Small enough for gloo on the CPU; never published."""


class Blocks(nn.Module):
    """GPT blocks one after the other."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(settings.shape[-1], settings.heads) for _ in range(settings.layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last block; input and output are (batch, tokens, hidden)."""
        for layer in self.layers:
            x = layer(x)
        return x


def _sharded(model: Any, mesh: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _replicated(model: Any, mesh: Any) -> nn.Module:
    return DistributedDataParallel(model)


def _split(model: Any, mesh: Any) -> nn.Module:
    ways: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    ways |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    ways |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, ways)
    return model


PARALLEL: dict[str, Callable[[Any, Any], nn.Module]] = {
    FSDP: _sharded,
    DDP: _replicated,
    TENSOR: _split,
    CONTEXT: lambda model, mesh: model,
}


@contextmanager
def _attention(part: str, mesh: Any, settings: Settings) -> Iterator[None]:
    """Run attention with the flash kernel; for context parallel over the sequences of all ranks, each with its part."""
    with ExitStack() as stack:
        if mesh.device_type == "cuda":
            stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            if part == CONTEXT:
                from torch.distributed.tensor.experimental import context_parallel

                # It takes the length of the sequence from a buffer; inputs are made with the length of a part.
                positions = torch.zeros(settings.shape[1] * mesh.size(), device=mesh.device_type)
                stack.enter_context(context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]))
        yield


class Trained:
    """A model of its own that is parallel in some way, and the memory that it holds between its steps."""

    def __init__(self, part: str, settings: Settings, mesh: Any, device: torch.device, call: Any = None) -> None:
        before = _in_use(device)
        self.settings, self.device, self.handle, self.count = settings, device, None, None
        self.settling_steps = 0
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        torch.manual_seed(0)  # all ranks make the same weights
        with device:
            model = (Model if settings.kv_heads else Blocks)(settings).to(self.dtype)
        for k, layer in enumerate(model.layers):
            model.layers[k] = layer if call is None else _Called(layer, call)
        self.model = PARALLEL[part](model, mesh)
        del model
        self.step()  # makes buckets and workspaces
        self.held = _in_use(device) - before

    def step(self, count: int | None = None) -> None:
        """Run one step, with a number of layers offloaded; the model is offloaded anew only for another number.

        Gradients are freed behind the step: they come during backward, while activations go.
        """
        if count != self.count:
            self.handle.remove()
            self.offload(num_layers=count)
        shape, how = self.settings.shape, {"device": self.device, "dtype": self.dtype}
        output = self.model(torch.randn(shape, requires_grad=True, **how))
        output.float().square().mean().backward()
        self.model.zero_grad()

    def offload(self, **how: Any) -> None:
        """Offload the model from now on, and run it until its plan is final."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
            self.handle = actoffload.offload(self.model, min_bytes=self.settings.min_bytes, **how)
        self.count = how.get("num_layers")

        def anywhere(settling: bool) -> bool:  # with context parallel each rank decides alone
            return largest(int(settling), self.device) > 0

        self.settling_steps, _ = settle(self.handle, partial(self.step, self.count), STEPS, anywhere)


@dataclass
class Arm:
    """One way to run a step."""

    method: str
    trained: Trained
    num_layers: int | None = None
    budget: int | None = None  # bytes, without what other models hold
    paused: bool = False  # the handle of the model offloads nothing

    def step(self) -> None:
        """Run one step."""
        with self.trained.handle.paused() if self.paused else nullcontext():
            self.trained.step(self.num_layers)

    def row(self, others: int) -> dict[str, Any]:
        """Return the peak without what other models hold, the bytes offloaded, and the stall of a recorded step."""
        row: dict[str, Any] = {"method": self.method, "num_layers": self.num_layers, "budget": self.budget}
        handle = self.trained.handle
        self.step()
        if handle is not None:
            handle.reset_statistics()
        row["peak_bytes"] = measure_peak(self.step, warmup=0) - others
        if handle is not None and not self.paused:
            row["bytes_offloaded"], row["stall_seconds"] = handle.statistics().bytes_offloaded, 0.0
            if handle.plan.offloaded:
                with handle.recording():
                    self.step()
                row["stall_seconds"] = handle.report().totals.stall_seconds
            row |= {"plan": str(handle.plan), "settling_steps": self.trained.settling_steps}
        return row


def _in_use(device: torch.device) -> int:
    """Return the bytes that tensors use now; 0 on the CPU, whose peaks count from the start of a step."""
    if device.type == "cpu":
        return 0
    torch.accelerator.synchronize()
    gc.collect()
    return int(torch.accelerator.memory_allocated())


def _measure_rank(device: torch.device, part: str, sizes: Sizes) -> dict[str, Any]:
    """Measure a part as one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
        if part == COLLECTIVES:
            return {"rows": measure_collectives(device, **sizes.collectives)}
        settings = sizes.blocks if part == CONTEXT else sizes.llama
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        dist.barrier()
        link = measure_link(sizes.link, repeats=5)
        with _attention(part, mesh, settings):
            return {"link": {"d2h": link.d2h, "h2d": link.h2d}, "rows": _measure_arms(device, part, sizes, mesh, link)}


def _measure_arms(device: torch.device, part: str, sizes: Sizes, mesh: Any, link: Link) -> list[dict[str, Any]]:
    """Measure all ways to run a step of a part; return a row for each."""
    settings = sizes.blocks if part == CONTEXT else sizes.llama
    make = partial(Trained, part, settings, mesh, device)
    counts = sizes.counts[part]
    plain, layers, default = make(), make(), make()
    arms = [Arm(NOTHING, plain), Arm(AGAIN, plain)]
    models = [plain, layers, default]
    if part == FSDP:
        models += [make(partial(checkpoint, use_reentrant=False)), *(make() for _ in BUDGETS)]
    held = sum(model.held for model in models)
    default.offload()
    predict = measured_costs(default.handle)
    layers.offload(num_layers=max(counts))
    arms += [Arm(LAYERS, layers, count) for count in counts]
    arms += [Arm(DEFAULT, default), Arm(PAUSED, default, paused=True)]
    if part == FSDP:
        checkpointed, *limited = models[3:]
        arms.append(Arm(CHECKPOINT, checkpointed))
        others = held - checkpointed.held
        peak = largest(measure_peak(checkpointed.step, warmup=1) - others, device)
        for share, model in zip(BUDGETS, limited, strict=True):
            budget = math.ceil(share * peak / PAGE) * PAGE
            model.offload(memory_budget=budget + held - model.held)
            arms.append(Arm(BUDGET, model, budget=budget))
    rows = []
    for arm in arms:
        rows.append(arm.row(held - arm.trained.held))
        handle = arm.trained.handle
        if handle is not None and predict is not None and arm.method != BUDGET and not arm.paused:
            rows[-1]["predicted_extra"] = _extra_seconds(predict, handle.plan, link)
        if dist.get_rank() == 0:
            print(f"  {arm.method} {arm.num_layers or ''}: {rows[-1]['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    samples = measure_step_times(
        {str(k): arm.step for k, arm in enumerate(arms)}, repeats=sizes.repeats[part], steps=STEPS, warmup=0
    )
    for row, of in zip(rows, samples.values(), strict=True):
        row["samples"] = of
    for model in models:
        if model.handle is not None:
            model.handle.remove()
    return rows


def _extra_seconds(predict: Any, plan: Any, link: Link) -> float | None:
    """Return by how much `simulate` expects a plan to lengthen a step with the measured costs and a link."""
    layers, _, host_seconds = predict.args
    if len(layers) != len(plan.names):
        return None
    moving, still = (
        simulate(of, layers, link, host_seconds=host_seconds).step_time for of in (plan.plan, Plan(len(layers)))
    )
    return float(moving - still)


def _merged(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of all ranks as one each: samples of the slowest rank, and what the others are for each rank."""
    rows = []
    for each in zip(*(found["rows"] for found in ranks), strict=True):
        row: dict[str, Any] = dict(each[0])
        row["samples"] = [max(of) for of in zip(*(rank["samples"] for rank in each), strict=True)]
        for key in ("peak_bytes", "bytes_offloaded", "stall_seconds"):
            if key in row:
                row[key] = [rank[key] for rank in each]
        extra = [rank["predicted_extra"] for rank in each if rank.get("predicted_extra") is not None]
        row.pop("predicted_extra", None)
        rows.append({**row, "seconds": median(row["samples"]), **({"extra": max(extra)} if extra else {})})
    return rows


def _ratios(rows: list[dict[str, Any]]) -> float:
    """Add the ratios to the first two rows, which are the same; return by how much these differ."""
    first, again = rows[0]["seconds"], rows[1]["seconds"]
    baseline = mean((first, again))
    for row in rows:
        row["ratio"] = row["seconds"] / baseline
        if "extra" in row:
            row["predicted"] = 1 + row.pop("extra") / baseline
    return float(abs(again - first) / baseline)


def measure_part(part: str, *, rehearse: bool) -> dict[str, Any]:
    """Measure one part in a process for each GPU, or in two on the CPU; return the data of its result."""
    sizes, device = (SMALL, "cpu") if rehearse else (SIZES, "cuda")
    world = 2 if rehearse else torch.cuda.device_count()
    if world < 2:
        raise SystemExit(
            f"parallelism needs two GPUs or more, and this machine has {world}; --rehearse runs on the CPU."
        )
    ranks = run_ranks(_measure_rank, part, sizes, world=world, device=device, limit=LIMIT)
    rows = _merged(ranks)
    if part == COLLECTIVES:
        noise = 0.0
        for name in dict.fromkeys(row["collective"] for row in rows):
            noise = max(noise, _ratios([row for row in rows if row["collective"] == name]))
        for k, row in enumerate(rows):
            row["covered"] = min((value for found in ranks for value in found["rows"][k]["covered"]), default=None)
            covered = "" if row["covered"] is None else f", covered {row['covered']:.0%}"
            print(f"  {row['collective']}, {row['beside']}: {row['ratio']:.3f}{covered}", flush=True)
        return {"world": world, "noise": noise, "sizes": sizes.collectives, "rows": rows}
    links = [found["link"] for found in ranks]
    link = {lane: min(of[lane] for of in links) for lane in ("d2h", "h2d")}
    settings = sizes.blocks if part == CONTEXT else sizes.llama
    found = {"world": world, "settings": settings.to_json(), "link": link, "noise": _ratios(rows), "rows": rows}
    for row in rows:
        shown = f" {row['num_layers']}" if row["num_layers"] else ""
        print(f"  {row['method']}{shown}: {row['ratio']:.3f}", flush=True)
    return found
