"""The workloads as data: linear layers, GPT blocks, and unmodified Llama decoder layers of Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

MIB = 2**20
THETA = 500000.0
"""Base of the rotary embedding of Llama 3."""

Run: TypeAlias = Callable[[int, nn.Module, torch.Tensor], torch.Tensor]
"""From the index of a layer, the layer and its input to its output."""


@dataclass(frozen=True)
class Settings:
    """A stack of layers: Llama's with `kv_heads`, GPT blocks with `heads` alone, else linear; and how it is measured.

    The `shape` of the input is (batch, tokens, hidden size); `counts` are the numbers of offloaded layers.  A
    measurement has `steps` steps; a round of measurements takes about `seconds`.
    """

    layers: int
    shape: tuple[int, int, int]
    dtype: str
    heads: int = 0
    kv_heads: int = 0
    intermediate: int = 0
    counts: tuple[int, ...] = ()
    min_bytes: int = MIB
    steps: int = 1
    seconds: float = 0.5

    def to_json(self) -> dict[str, object]:
        """Return what is written into the results."""
        return {**asdict(self), "tokens": self.shape[1], "hidden": self.shape[2]}

    def layer(self) -> nn.Module:
        """Return a new layer."""
        hidden = self.shape[-1]
        if not self.kv_heads:
            return Block(hidden, self.heads) if self.heads else nn.Linear(hidden, hidden)
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "attn_implementation": "sdpa"}
        config = LlamaConfig(hidden_size=hidden, intermediate_size=self.intermediate, **heads)
        return LlamaDecoderLayer(config, layer_idx=0)


def _llama(tokens: int, layers: int, counts: tuple[int, ...], **more: Any) -> Settings:
    """Return layers as wide as those of Llama 3 8B: 196 KiB saved for each token, 0.8 GiB of weights and gradients."""
    return Settings(layers, (1, tokens, 4096), "bfloat16", 32, 8, 14336, counts, **more)


def _small(settings: Settings, tokens: int, layers: int) -> Settings:
    sizes = {"shape": (1, tokens, 512), "heads": 4, "kv_heads": 1, "intermediate": 1792, "seconds": 0.5, "steps": 1}
    return replace(settings, layers=layers, counts=tuple(range(1, layers)), min_bytes=tokens * 16, **sizes)


# At 8k tokens the log-sum-exp of attention has exactly 1 MiB, so it is offloaded.
FULL = {
    "linear": Settings(12, (16, 1024, 1024), "float32", counts=(3, 6, 10), steps=4, seconds=8),
    "gpt": Settings(12, (1, 8192, 4096), "bfloat16", 32, counts=(4, 6, 10), steps=2, seconds=30),
    "8k": _llama(8192, 12, (1, 2, 3, 4, 6, 8, 11), steps=2, seconds=15),
    "32k": _llama(32768, 8, (1, 3, 4, 7), seconds=20),
    # As many tensors as at 8k tokens, because the limit is as much smaller, and kernels shorter than their launches.
    "host": _llama(256, 12, (1, 11), min_bytes=MIB * 256 // 8192),
}
REHEARSAL = {
    "linear": Settings(4, (1, 512, 512), "float32", counts=(2,), seconds=0.1),
    "gpt": Settings(4, (8, 256, 128), "float32", 2, counts=(2,), seconds=0.1),
    "8k": _small(FULL["8k"], 128, 4),
    "32k": _small(FULL["32k"], 256, 3),
    "host": _small(FULL["host"], 64, 4),
}
"""The same workloads, small enough for the reference device; never published."""


class Block(nn.Module):
    """A pre-norm GPT block: causal attention with the flash kernel, then a GELU MLP four times as wide."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; input and output are (batch, tokens, hidden)."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """The layers one after the other, with neither embedding nor head."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layers = nn.ModuleList([settings.layer() for _ in range(settings.layers)])
        self.size = settings.shape[-1] // max(1, settings.heads)

    @torch.no_grad()
    def angles(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the rotary embedding, (1, tokens, head size) each."""
        rates = 1.0 / THETA ** (torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size)
        angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[None, :, None] * rates
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last Llama layer; input and output are (batch, tokens, hidden)."""
        angles = self.angles(x)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return x


class Stack:
    """One set of weights in two models: one for `actoffload.offload`, and a twin whose modules never have a hook."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        torch.manual_seed(0)
        self.settings, self.device, self.whole = settings, device, bool(settings.kv_heads)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        with device:  # billions of weights are slow to make on the host
            self.model = Model(settings).to(self.dtype)
        self.twin = copy.deepcopy(self.model, {id(weight): weight for weight in self.model.parameters()})

    def input(self) -> torch.Tensor:
        """Return new activations; those of the Llama layers require a gradient, as those of an embedding do."""
        return torch.randn(self.settings.shape, device=self.device, dtype=self.dtype, requires_grad=self.whole)

    def step(
        self, model: Model | None = None, between: Callable[[], object] | None = None, run: Run | None = None
    ) -> None:
        """Run forward, `between`, and backward of the twin or `model`; `run` runs one linear layer or GPT block."""
        model = self.twin if model is None else model
        x = self.input()
        if self.whole:
            x = model(x)
        else:  # layer by layer: the call of a module would keep the input on the device
            for k, layer in enumerate(model.layers):
                x = layer(x) if run is None else run(k, layer, x)
        if between is not None:
            between()
        x.float().square().mean().backward()
