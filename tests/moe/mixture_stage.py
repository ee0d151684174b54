"""Stages of a mixture-of-experts model.

Experts may be spread over a pair of ranks that have different data.  Then each rank of the pair gathers the tokens of
both, runs its own experts, and each gets back the sums of its tokens.  Their weights are distributed tensors, so that
`offload` finds the pair, and both ranks follow one plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from actoffload.moe import GroupedMLP, grouped_mlp, indices_to_multihot

__all__ = ["MixtureSettings", "MixtureStage"]


@dataclass(frozen=True)
class MixtureSettings:
    """The layers of a stage: `layers` of attention and a mixture, for inputs (batch, tokens, hidden) of `shape`."""

    layers: int
    shape: tuple[int, int, int]
    dtype: str
    heads: int
    ffn: int
    experts: int
    topk: int = 2
    min_bytes: int = 2**20

    def stage(self, pair: DeviceMesh | None = None) -> nn.Module:
        """Return the module of a stage, whose experts are spread over a mesh of ranks if there is one."""
        return MixtureStage(self, pair)


# Newer names first; the older ones warn where these exist.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """Gather the rows of all ranks; the gradient is scattered and summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Any) -> Tensor:
        ctx.pair = pair
        return _gathered(x, pair)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.pair), None


class _Scatter(torch.autograd.Function):
    """Sum the rows of all ranks and return the own part; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Any) -> Tensor:
        ctx.pair = pair
        return _scattered(x, pair)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.pair), None


def _gathered(x: Tensor, pair: Any) -> Tensor:
    parts = x.new_empty(dist.get_world_size(pair) * len(x), *x.shape[1:])
    _all_gather(parts, x.contiguous(), group=pair)
    return parts


def _scattered(x: Tensor, pair: Any) -> Tensor:
    size = len(x) // dist.get_world_size(pair)
    if x.device.type == "cpu":  # gloo has no reduce_scatter_tensor
        x = x.clone()
        dist.all_reduce(x, group=pair)
        return x.narrow(0, size * dist.get_rank(pair), size).clone()
    part = x.new_empty(size, *x.shape[1:])
    _reduce_scatter(part, x.contiguous(), group=pair)
    return part


class Attention(nn.Module):
    """Causal self-attention behind a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Experts(GroupedMLP):
    """The experts of one rank, out of those of a mesh if there is one."""

    def __init__(self, settings: MixtureSettings, pair: DeviceMesh | None) -> None:
        ranks = 1 if pair is None else pair.size()
        super().__init__(settings.experts // ranks, settings.shape[-1], settings.ffn)
        for name, weight in list(self.named_parameters()) if pair is not None else ():
            setattr(self, name, nn.Parameter(DTensor.from_local(weight.detach(), pair, [Shard(0)])))

    def forward(self, x: Tensor, counts: Tensor, *, padded: bool) -> Tensor:
        """Apply the experts of this rank to tokens that are sorted by expert."""
        weights = (of.to_local() if isinstance(of, DTensor) else of for of in (self.fc1_weight, self.fc2_weight))
        return grouped_mlp(x, counts, *weights, padded=padded)


class Mixture(nn.Module):
    """Some of the experts for each token, behind a norm."""

    def __init__(self, settings: MixtureSettings, pair: DeviceMesh | None) -> None:
        super().__init__()
        hidden, self.topk = settings.shape[-1], settings.topk
        self.pair = None if pair is None else pair.get_group()
        self.local = settings.experts // (1 if pair is None else pair.size())
        self.first = 0 if pair is None else self.local * pair.get_local_rank()
        self.norm = nn.RMSNorm(hidden)
        self.router = nn.Linear(hidden, settings.experts, bias=False)
        self.experts = Experts(settings, pair)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each token."""
        shape, rows = x.shape, self.norm(x).flatten(0, 1)
        probs, indices = self.router(rows).softmax(dim=-1).topk(self.topk)
        if self.pair is not None:
            rows, probs = _Gather.apply(rows, self.pair), _Gather.apply(probs, self.pair)
            indices = _gathered(indices, self.pair) - self.first
            indices = indices.where((indices >= 0) & (indices < self.local), -1)
        tokens, counts, weights = self._dispatch(indices, probs)
        y = self.experts(rows[tokens], counts, padded=self.pair is not None) * weights.unsqueeze(1)
        y = torch.zeros_like(rows).index_add(0, tokens, y)
        return (y if self.pair is None else _Scatter.apply(y, self.pair)).view(shape)

    def _dispatch(self, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens sorted by expert, the number of each expert, and the weights.

        Behind the tokens of the last expert are those that belong to no expert of this rank.
        """
        routing_map, table = indices_to_multihot(indices, probs, self.local)
        experts = indices.where(indices >= 0, self.local).flatten()
        order = experts.argsort(stable=True)
        tokens, chosen = order // self.topk, experts[order]
        weights = table[tokens, chosen.clamp(max=self.local - 1)] * (chosen < self.local)
        return tokens, routing_map.sum(dim=0), weights


class Block(nn.Module):
    """Attention and a mixture, each with a residual connection."""

    def __init__(self, settings: MixtureSettings, pair: DeviceMesh | None) -> None:
        super().__init__()
        self.attention = Attention(settings.shape[-1], settings.heads)
        self.mixture = Mixture(settings, pair)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = x + self.attention(x)
        return x + self.mixture(x)


class MixtureStage(nn.Module):
    """The blocks of one stage."""

    def __init__(self, settings: MixtureSettings, pair: DeviceMesh | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(settings, pair) for _ in range(settings.layers)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block."""
        for layer in self.layers:
            x = layer(x)
        return x
