"""A Llama-type stack in plain PyTorch, and what autograd saves in it.

The layers do what those of Hugging Face's Llama do, operation by operation, as far as autograd sees it: the RMS norm
is written out and works in float32, the rotary embedding is worked out once in a forward and handed to every layer,
attention is `scaled_dot_product_attention` with grouped queries, the MLP is SwiGLU with three projections.  There is
no embedding and no head.  Nothing here knows of offloading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

MIB = 2**20
THETA = 500000.0
"""Base of the rotary embedding of Llama 3."""


@dataclass(frozen=True)
class LlamaSettings:
    """What a stack is made of, and how it is measured.

    The other sizes are those of Llama 3 8B.  With them a layer saves 196 KiB for each token, and has 0.8 GiB of weights
    and gradients.  So twelve layers at 8k tokens take 28 GiB without offload, and eight at 32k tokens 56 GiB; ten would
    still fit into 80 GB, but take longer.

    Parameters
    ----------
    tokens, layers : int
        Length of the only sequence of the batch, and number of layers.
    min_bytes : int
        Smaller tensors stay.  The default is that of `actoffload.offload`.  At 8k tokens attention's sums of
        exponentials are exactly as large, so they leave.
    steps : int
        Steps in one measurement.
    seconds : float
        For all rounds of measurements together, from which the number of repeats follows.
    """

    tokens: int
    layers: int
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"
    min_bytes: int = MIB
    steps: int = 1
    seconds: float = 60.0

    def to_json(self) -> dict[str, object]:
        """Return what is written into the results."""
        return asdict(self)


class RMSNorm(nn.Module):
    """Normalizes in float32, and weighs in the dtype of the input."""

    def __init__(self, hidden: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(hidden)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is normalized, in the shape and dtype of the input."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn (batch, heads, tokens, size of a head) by angles of (batch, tokens, size of a head)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class Attention(nn.Module):
    """Causal attention with grouped queries: several query heads share a key head and a value head."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.size = hidden // settings.heads
        narrow = settings.kv_heads * self.size
        self.q_proj, self.k_proj = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, narrow, bias=False)
        self.v_proj, self.o_proj = nn.Linear(hidden, narrow, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the attended and projected input, (batch, tokens, hidden), with the angles of `Llama.angles`."""
        heads = (*x.shape[:-1], -1, self.size)
        query, key, value = (p(x).view(heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, *angles), rotate(key, *angles)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).reshape(x.shape).contiguous())


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        hidden, inner = settings.hidden, settings.intermediate
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output in the shape of the input, (batch, tokens, hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(settings.hidden), Attention(settings)
        self.post_attention_layernorm, self.mlp = RMSNorm(settings.hidden), MLP(settings)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the layer's output; input and output are (batch, tokens, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The stack."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(settings) for _ in range(settings.layers)])
        self.size = settings.hidden // settings.heads

    @torch.no_grad()
    def angles(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the rotary embedding, (1, tokens, size of a head) each."""
        rates = 1.0 / THETA ** (torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size)
        angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[None, :, None] * rates
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer; input and output are (batch, tokens, hidden)."""
        angles = self.angles(x)
        for layer in self.layers:
            x = layer(x, angles)
        return x


class Stack:
    """One set of weights in two models: one for `actoffload.offload`, and a twin whose modules never see a hook.

    Parameters
    ----------
    settings : LlamaSettings
        Of both.
    device : torch.device
        Where the weights are made.
    """

    def __init__(self, settings: LlamaSettings, device: torch.device) -> None:
        torch.manual_seed(0)
        self.settings, self.device = settings, device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        with device:  # made on the device: billions of weights take their time on the host
            self.model = Llama(settings).to(self.dtype)
        self.twin = copy.deepcopy(self.model, {id(weight): weight for weight in self.model.parameters()})

    def input(self) -> torch.Tensor:
        """Return activations that require a gradient, as those of an embedding do."""
        shape = (1, self.settings.tokens, self.settings.hidden)
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True)

    def step(self, model: Llama, between: Callable[[], object] | None = None) -> None:
        """Run forward and backward; gradients accumulate in the same tensors, step after step.

        Parameters
        ----------
        model : Llama
            One of the two.
        between : callable, optional
            Called when the forward of all layers has been queued.
        """
        x = model(self.input())
        if between is not None:
            between()
        x.float().square().mean().backward()


@dataclass
class SavedStorage:
    """One storage that autograd saved in layers, and the tensor on it that was saved first.

    Parameters
    ----------
    module : str
        The module of its layer that saved it.
    dtype : str
        Of that tensor.
    shape : tuple of int
        Of that tensor.
    nbytes : int
        Size of the storage in bytes.
    tensor_nbytes : int
        Size of the largest saved tensor on it in bytes.
    layers : set of int
        The layers that saved it.
    """

    module: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tensor_nbytes: int
    layers: set[int] = field(default_factory=set)

    def to_json(self) -> dict[str, object]:
        """Return what is written into the results."""
        return {**asdict(self), "layers": sorted(self.layers)}


class _Saved:
    """The hooks that list what is saved.  What they return shares memory with the tensor, and nothing else."""

    def __init__(self, model: Llama) -> None:
        self.storages: dict[int, SavedStorage] = {}
        self._weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        self._running: list[str] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if name.startswith("layers."):
                self._handles += [
                    module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)),
                    module.register_forward_hook(lambda *_: self._running.pop() and None),
                ]

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._running and storage._cdata not in self._weights:
            layer, _, module = self._running[-1].removeprefix("layers.").partition(".")
            found = self.storages.get(storage._cdata)
            if found is None:
                dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
                found = SavedStorage(module, dtype, shape, storage.nbytes(), 0)
                self.storages[storage._cdata] = found
            found.tensor_nbytes = max(found.tensor_nbytes, tensor.nbytes)
            found.layers.add(int(layer))
        return tensor.detach()


def saved_storages(stack: Stack) -> list[SavedStorage]:
    """Return what autograd saves in the layers in one step without offload, weights apart, in order of saving.

    This is autograd's own account, by hooks that know nothing of the library.
    """
    saved = _Saved(stack.twin)
    try:
        with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            output = stack.twin(stack.input())
        output.float().square().mean().backward()
    finally:
        saved.remove()
    return list(saved.storages.values())


def absent_bytes(saved: list[SavedStorage], num_layers: int, min_bytes: int) -> int:
    """Return the bytes that are not on the device, at the end of forward, if the first `num_layers` layers leave.

    That is where a step has its peak.  A storage that a layer which stays has saved as well is not among them.
    """
    return sum(s.nbytes for s in saved if max(s.layers) < num_layers and s.tensor_nbytes >= min_bytes)
