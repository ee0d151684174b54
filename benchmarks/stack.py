"""Llama layers in a plain loop: eager and compiled, sharded by FSDP2, and as stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE, Recorder, Train, Way, plain_steps
from stages import mean_square, ranks_of, train_stages
from torch import nn
from torch.distributed.fsdp import fully_shard

__all__ = ["SIZES", "Layers", "Sizes", "trainer"]


@dataclass(frozen=True)
class Sizes:
    """Llama layers, by default as wide as those of Llama 3 8B, and the tokens of a step or microbatch."""

    layers: int
    tokens: int
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    compiled: str = ""  # backend of torch.compile
    microbatches: int = 16
    dtype: torch.dtype = torch.bfloat16


SIZES = {"P8": Sizes(16, 8192), "B8": Sizes(16, 8192), "P32": Sizes(4, 32768)}
SIZES |= {f"{name}c": replace(SIZES[name], compiled="inductor") for name in ("P8", "P32")}
SIZES |= {"F2": Sizes(12, 8192), "F4": Sizes(12, 8192), "PP2": Sizes(1, 16384)}
SHARDED = "F2", "F4"
SMALL = {"hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "dtype": torch.float32}


class Layers(nn.Module):
    """Layers one after the other, with neither embedding nor head, each called in some way."""

    def __init__(self, sizes: Sizes, way: Way) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama as llama

        config = LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            max_position_embeddings=sizes.tokens,
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList([llama.LlamaDecoderLayer(config, layer_idx=k) for k in range(sizes.layers)])
        self.rotary, self.way = llama.LlamaRotaryEmbedding(config), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer; input and output are (batch, tokens, hidden)."""
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

    def batch() -> tuple[torch.Tensor]:
        shape = 1, sizes.tokens, sizes.hidden
        return (torch.randn(shape, device=DEVICE, dtype=sizes.dtype, requires_grad=True),)

    plain_steps(way, recorder, model, batch, mean_square)


def _train_pipeline(sizes: Sizes, profile: dict[str, int], way: Way, recorder: Recorder) -> None:
    mesh, numbers = ranks_of()
    modules = {number: _model(sizes, way, number) for number in numbers}
    shape = sizes.microbatches, sizes.tokens, sizes.hidden
    train_stages(way, recorder, mesh, modules, shape, sizes.dtype, profile)


def trainer(name: str, *, rehearse: bool) -> Train:
    """Return the function that trains the layers of a job."""
    sizes = SIZES[name]
    if rehearse:
        backend = "aot_eager" if sizes.compiled else ""
        sizes = replace(sizes, **SMALL, compiled=backend, layers=min(sizes.layers, 4), tokens=64, microbatches=4)
    return partial(_train_pipeline, sizes, {}) if name == "PP2" else partial(_train, sizes, name in SHARDED)
