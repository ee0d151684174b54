"""Llama layers in a plain loop: eager and compiled, sharded by FSDP2, and as stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE, Recorder, Train, Way, mean_square, plain_steps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from actoffload.schedule import Link, simulate_pipeline

__all__ = ["SMALL", "Sizes", "ranks_of", "train_stages", "trainer"]


@dataclass(frozen=True)
class Sizes:
    """A Llama, by default as wide as that of 8 billion weights, and the tokens of a sequence or microbatch."""

    layers: int
    tokens: int
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    compiled: str = ""  # backend of torch.compile
    microbatches: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.tokens,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            attn_implementation="sdpa",
            use_cache=False,
        )


SIZES = {"P8": Sizes(16, 8192), "B8": Sizes(16, 8192), "P32": Sizes(4, 32768)}
SIZES |= {f"{name}c": replace(SIZES[name], compiled="inductor") for name in ("P8", "P32")}
SIZES |= {"F2": Sizes(12, 8192), "F4": Sizes(12, 8192), "PP2": Sizes(1, 16384)}
SHARDED = "F2", "F4"
SMALL = {"hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "vocabulary": 128}


class Layers(nn.Module):
    """Layers one after the other, with neither embedding nor head, each called in some way."""

    def __init__(self, sizes: Sizes, way: Way) -> None:
        super().__init__()
        config = sizes.config
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, layer_idx=k) for k in range(sizes.layers)])
        self.rotary, self.way = LlamaRotaryEmbedding(config), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = self.way.call(layer, x, position_embeddings=angles)
        return x


def _model(sizes: Sizes, way: Way, seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    with DEVICE:  # billions of weights are slow to make on the host
        model = Layers(sizes, way).to(sizes.dtype)
    if sizes.compiled:
        for layer in model.layers:
            layer.compile(backend=sizes.compiled)
    return model


def _train(sizes: Sizes, shard: bool, way: Way, recorder: Recorder) -> None:
    model: Any = _model(sizes, way)
    if shard:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    torch.manual_seed(dist.get_rank() if shard else 0)

    batch = partial(torch.randn, 1, sizes.tokens, sizes.hidden, device=DEVICE, dtype=sizes.dtype, requires_grad=True)
    plain_steps(way, recorder, model, lambda: (batch(),), mean_square)


# Stages of an interleaved pipeline

STAGES = 2
"""Stages of each rank."""


@cache  # each mesh has communicators of its own, which take device memory
def _mesh(data: int) -> DeviceMesh:
    shape = dist.get_world_size() // data, data
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=("pipeline", "data"))


def ranks_of(data: int = 1) -> tuple[DeviceMesh, range]:
    """Return the mesh of pipelines with different data, and the numbers of the stages of this rank."""
    mesh = _mesh(data)
    ranks = mesh["pipeline"].size()
    return mesh, range(mesh.get_local_rank("pipeline"), STAGES * ranks, ranks)


def train_stages(
    way: Way,
    recorder: Recorder,
    mesh: DeviceMesh,
    modules: dict[int, nn.Module],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Train the stages of this rank, by their numbers, on inputs of a shape (microbatches, tokens, hidden).

    Gradients of plain weights are summed over the ranks with other data.
    """
    rank, ranks, data = mesh.get_local_rank("pipeline"), mesh["pipeline"].size(), mesh.get_group("data")
    group = mesh.get_group("pipeline")
    stages = [PipelineStage(m, number, STAGES * ranks, DEVICE, group=group) for number, m in modules.items()]
    schedule = ScheduleInterleaved1F1B(stages, shape[0], loss_fn=mean_square)
    recorder.handle = way.offload(schedule)
    torch.manual_seed(mesh.get_local_rank("data"))
    target = torch.zeros(shape[0], device=DEVICE)

    def step() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(torch.randn(shape, device=DEVICE, dtype=dtype))
        else:
            last = {"target": target, "losses": losses} if rank == ranks - 1 else {}
            schedule.step(**last)
        plain = [p.grad for m in modules.values() for p in m.parameters() if not isinstance(p, DTensor)]
        for grad in plain if dist.get_world_size(data) > 1 else ():
            dist.all_reduce(grad, group=data)
        return torch.stack(losses).sum() if losses else None

    while not recorder.done:
        recorder.begin()
        recorder.forward_ended(step())
        recorder.backward_ended(nn.ModuleList(modules.values()))
        for module in modules.values():
            module.zero_grad()
        recorder.step_ended()
    handle: Any = recorder.handle
    if handle is not None and handle.plan is not None:
        # By how much the plan lowers the peak of this rank in the simulation, from what the ranks measured.
        measured = handle._first.known
        costs = {stage: cost for each in measured for stage, cost in each.costs.items()}
        orders, link = [plan.order for plan in handle.plans], Link.slowest(each.link for each in measured)
        without = simulate_pipeline(orders, [costs[stage] for stage in sorted(costs)], link).ranks[rank]
        recorder.more = {"drop_bytes": without.device_peak_bytes - handle.plan.peak_bytes}


def _train_pipeline(sizes: Sizes, way: Way, recorder: Recorder) -> None:
    mesh, numbers = ranks_of()
    modules = {number: _model(sizes, way, number) for number in numbers}
    shape = sizes.microbatches, sizes.tokens, sizes.hidden
    train_stages(way, recorder, mesh, modules, shape, sizes.dtype)


def trainer(name: str, *, rehearse: bool) -> Train:
    """Return the function that trains the layers of a job."""
    sizes = SIZES[name]
    if rehearse:
        backend = "aot_eager" if sizes.compiled else ""
        more = {"compiled": backend, "layers": min(sizes.layers, 4), "tokens": 64, "microbatches": 4}
        sizes = replace(sizes, **SMALL, **more, dtype=torch.float32)
    return partial(_train_pipeline, sizes) if name == "PP2" else partial(_train, sizes, name in SHARDED)
