"""The two models of the benchmarks: twelve linear layers, and twelve pre-norm GPT blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

LAYERS = 12


@dataclass(frozen=True)
class Settings:
    """What a model is made of.

    Parameters
    ----------
    name : str
        ``"linear"`` or ``"gpt"``.
    shape : tuple of int
        Of the input: (batch, sequence, hidden size).
    dtype : str
        Name of the torch dtype of weights and activations.
    heads : int
        Attention heads; 0 where there is no attention.
    counts : tuple of int
        Numbers of offloaded layers to measure.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: str
    heads: int
    counts: tuple[int, ...]
    layers: int = LAYERS

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def to_json(self) -> dict[str, object]:
        """Return what is written into the results."""
        return asdict(self)


FULL = {
    "linear": Settings("linear", (16, 1024, 1024), "float32", 0, (3, 6, 10)),
    "gpt": Settings("gpt", (1, 8192, 4096), "bfloat16", 32, (2, 3, 4, 6, 10)),
}
# The same models, small enough for the reference device: rehearsals of the scripts, never published.
REHEARSAL = {
    "linear": Settings("linear", (1, 512, 512), "float32", 0, (3, 6, 10)),
    "gpt": Settings("gpt", (1, 1024, 256), "float32", 4, (2, 3, 4, 6, 10)),
}


class Block(nn.Module):
    """A pre-norm GPT block: causal attention with the flash kernel, then a GELU MLP four times as wide."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; input and output are (batch, sequence, hidden)."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model:
    """One set of weights, and a step that runs them in whatever is put around each layer."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        torch.manual_seed(0)
        self.settings, self.device = settings, device
        hidden = settings.shape[-1]
        with device:  # made on the device: 2.4 billion weights take their time on the host
            layers = [
                Block(hidden, settings.heads) if settings.heads else nn.Linear(hidden, hidden)
                for _ in range(settings.layers)
            ]
        self.layers = nn.ModuleList(layers).to(settings.torch_dtype)

    def step(self, run: Callable[[int, nn.Module, torch.Tensor], torch.Tensor]) -> None:
        """Run forward and backward; gradients accumulate in the same tensors, step after step.

        Parameters
        ----------
        run : callable
            From the index of a layer, the layer and its input to its output.
        """
        x = torch.randn(self.settings.shape, device=self.device, dtype=self.settings.torch_dtype)
        for k, layer in enumerate(self.layers):
            x = run(k, layer, x)
        x.float().square().mean().backward()
