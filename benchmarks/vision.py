"""A vision transformer of Hugging Face and a diffusion transformer, in a plain loop with autocast."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE, Recorder, Train, Way, mean_square, plain_steps
from torch import nn

__all__ = ["trainer"]

CLASSES = 1000


class Block(nn.Module):
    """Attention and an MLP, each scaled and shifted by the condition (adaLN-Zero)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU("tanh"), nn.Linear(4 * hidden, hidden))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(c)[:, None].chunk(6, dim=-1)
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1)
        query, key, value = qkv.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, hidden)
        x = x + gate1 * self.out(attended)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """DiT with patches of 2 × 2: predicts the noise of latents at given times."""

    def __init__(self, way: Way, layers: int = 28, hidden: int = 1152, heads: int = 16, latent: int = 64) -> None:
        super().__init__()
        self.way, self.hidden = way, hidden
        self.patches = nn.Conv2d(4, hidden, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(1, (latent // 2) ** 2, hidden))
        self.times = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.labels = nn.Embedding(CLASSES, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 16)

    def forward(self, latents: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(128, device=times.device) * (-math.log(10000) / 128))
        angles = times[:, None] * rates
        c = self.times(torch.cat((angles.cos(), angles.sin()), dim=-1)) + self.labels(labels)
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = self.way.call(block, x, c)
        return self.head(self.norm(x))


def _train_diffusion(sizes: dict[str, int], count: int, way: Way, recorder: Recorder) -> None:
    with DEVICE:
        model = DiffusionTransformer(way, **sizes)
    latent = sizes.get("latent", 64)

    def batch() -> tuple[torch.Tensor, ...]:
        labels = torch.randint(CLASSES, (count,), device=DEVICE)
        return torch.randn(count, 4, latent, latent, device=DEVICE), torch.rand(count, device=DEVICE), labels

    plain_steps(way, recorder, model, batch, mean_square, optimize=True)


def _train_vision(sizes: dict[str, int], count: int, way: Way, recorder: Recorder) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**sizes, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with DEVICE:
        model: Any = ViTForImageClassification(config).train()
    if way.checkpointed:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable(**({"offload": True} if way.arm == "checkpoint_offload" else {}))

    def batch() -> tuple[torch.Tensor]:
        return (torch.randn(count, 3, config.image_size, config.image_size, device=DEVICE),)

    loss = lambda output: F.cross_entropy(output.logits.float(), torch.arange(count, device=DEVICE) % CLASSES)  # noqa: E731
    plain_steps(way, recorder, model, batch, loss, optimize=True)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}


def trainer(name: str, *, rehearse: bool) -> Train:
    """Return the function that trains the model of a job."""
    if name == "ViT-L":
        return partial(_train_vision, SMALL, 4) if rehearse else partial(_train_vision, LARGE, 256)
    small = {"layers": 3, "hidden": 32, "heads": 2, "latent": 8}
    return partial(_train_diffusion, small, 4) if rehearse else partial(_train_diffusion, {}, 32)
