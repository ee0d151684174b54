"""Stages of a mixture-of-experts model, with a dispatcher that makes the host wait and one that does not.

Experts may be spread over a pair of ranks that have different data.  Then each rank of the pair gathers the tokens of
both, runs its own experts, and each gets back the sums of its tokens.  Their weights are distributed tensors, so that
`offload` finds the pair, and both ranks follow one plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, Recorder, Train, Way
from stack import ranks_of, train_stages
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from actoffload.moe import GroupedMLP, grouped_mlp, indices_to_multihot

__all__ = ["MixtureSettings", "MixtureStage", "trainer"]


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
    microbatches: int = 12


SIZES = {"E4": MixtureSettings(2, (1, 8192, 4096), "bfloat16", heads=32, ffn=2048, experts=8)}
SMALL = {"layers": 1, "shape": (1, 32, 32), "dtype": "float32", "heads": 2, "ffn": 48, "experts": 4, "microbatches": 4}


class _Exchange(torch.autograd.Function):
    """Gather the rows of all ranks, or sum them and return the own part; the gradient is exchanged the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Any, gathers: bool) -> Tensor:
        ctx.pair, ctx.gathers = pair, gathers
        return _gathered(x, pair) if gathers else _scattered(x, pair)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], ctx.pair) if ctx.gathers else _gathered(grads[0], ctx.pair), None, None


def _gathered(x: Tensor, pair: Any) -> Tensor:
    parts = x.new_empty(dist.get_world_size(pair) * len(x), *x.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns
    gather(parts, x.contiguous(), group=pair)
    return parts


def _scattered(x: Tensor, pair: Any) -> Tensor:
    part = x.new_empty(len(x) // dist.get_world_size(pair), *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, x.contiguous(), group=pair)
    return part


def masked_multihot(indices: Tensor, probs: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Do what `indices_to_multihot` does by indexing with a mask: the host waits for the sizes of the results."""
    here = indices != -1
    rows = torch.arange(len(indices), device=indices.device).repeat_interleave(here.sum(dim=1))
    routing_map = torch.zeros(len(indices), experts, dtype=torch.bool, device=indices.device)
    table = torch.zeros(len(indices), experts, dtype=probs.dtype, device=indices.device)
    routing_map[rows, indices[here]] = True
    table[rows, indices[here]] = probs[here]
    return routing_map, table


class Attention(nn.Module):
    """Causal self-attention behind a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
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
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in (self.fc1_weight, self.fc2_weight))
        return grouped_mlp(x, counts, *weights, padded=padded)


class Mixture(nn.Module):
    """Some of the experts for each token, behind a norm."""

    def __init__(self, settings: MixtureSettings, pair: DeviceMesh | None, *, waits: bool = False) -> None:
        super().__init__()
        hidden, self.topk, self.waits = settings.shape[-1], settings.topk, waits
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
            rows, probs = _Exchange.apply(rows, self.pair, True), _Exchange.apply(probs, self.pair, True)
            indices = _gathered(indices, self.pair) - self.first
            indices = indices.where((indices >= 0) & (indices < self.local), -1)
        tokens, counts, weights = (self._dispatch_waiting if self.waits else self._dispatch)(indices, probs)
        padded = self.pair is not None and not self.waits
        y = self.experts(rows[tokens], counts, padded=padded) * weights.unsqueeze(1)
        y = torch.zeros_like(rows).index_add(0, tokens, y)
        return (y if self.pair is None else _Exchange.apply(y, self.pair, False)).view(shape)

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

    def _dispatch_waiting(self, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same without the tokens behind the last expert, by masks."""
        routing_map, table = masked_multihot(indices, probs, self.local)
        by_expert = routing_map.T.contiguous()
        tokens = torch.arange(len(indices), device=indices.device).expand(self.local, -1).masked_select(by_expert)
        return tokens, routing_map.sum(dim=0), table.T.masked_select(by_expert)


class Block(nn.Module):
    """Attention and a mixture, each with a residual connection."""

    def __init__(self, settings: MixtureSettings, pair: DeviceMesh | None, *, waits: bool = False) -> None:
        super().__init__()
        self.attention = Attention(settings.shape[-1], settings.heads)
        self.mixture = Mixture(settings, pair, waits=waits)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mixture(x)


class MixtureStage(nn.Module):
    """The blocks of one stage, whose experts are spread over a mesh of ranks if there is one."""

    def __init__(self, settings: MixtureSettings, pair: DeviceMesh | None = None, way: Way | None = None) -> None:
        super().__init__()
        self.way = way or Way()
        self.layers = nn.ModuleList(
            [Block(settings, pair, waits=self.way.arm == "waiting") for _ in range(settings.layers)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.way.call(layer, x)
        return x


def _train(settings: MixtureSettings, way: Way, recorder: Recorder) -> None:
    mesh, numbers = ranks_of(data=2)
    modules = {}
    for number in numbers:
        torch.manual_seed(number)
        with DEVICE:
            modules[number] = MixtureStage(settings, mesh["data"], way).to(getattr(torch, settings.dtype))
    shape = settings.microbatches, *settings.shape[1:]
    train_stages(way, recorder, mesh, modules, shape, getattr(torch, settings.dtype))


def trainer(name: str, *, rehearse: bool) -> Train:
    """Return the function that trains the stages of a job."""
    settings = replace(SIZES[name], **SMALL) if rehearse else SIZES[name]
    return partial(_train, settings)
