"""Offload beside back ends of scaled_dot_product_attention, masks, dropout, jagged sequences, and Llama layers."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composing import OFFLOADED, ROWS, STEPS, STREAM, WIDTH, Block, Net, both, training
from helpers import forward, make, nothing_held, plain
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from whole_model import equal

HEADS = 4
SCORES = HEADS * ROWS * ROWS * 4
"""Bytes of what a back end that is not fused saves: a number for each pair of positions."""


class Attending(Block):
    """A block with a back end, and options of attention."""

    def __init__(self, backend: SDPBackend, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(dropout)
        self.backend, self.options = backend, options

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, **self.options)


class Half(Net):
    """In bfloat16, which the kernels of accelerators need."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


class Packed(Block):
    """Attention over three sequences of different lengths in one tensor."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offsets = torch.tensor([0, 5, 20, ROWS], dtype=torch.int32, device=q.device)
        packed = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))  # [rows, heads, head width]
        return torch.nn.attention.varlen.varlen_attn(*packed, offsets, offsets, 20, 20).transpose(0, 1)[None]


def mask() -> Tensor:
    return torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(3)) > 0.2


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": mask()},
    "bias": {"attn_mask": mask().float()},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_back_ends(backend, options):
    make = functools.partial(Net, functools.partial(Attending, backend, 0.1, **OPTIONS[options]))
    statistics = both(training(make)).statistics()
    # A bias is saved in every block, also in kept ones, so what was copied of it is not reloaded.
    shared = STEPS * ROWS * ROWS * 4 if options == "bias" and backend is SDPBackend.FLASH_ATTENTION else 0
    assert statistics.bytes_reloaded == statistics.bytes_offloaded - shared > STEPS * OFFLOADED * 4 * STREAM
    if backend is SDPBackend.MATH:
        assert statistics.bytes_offloaded > STEPS * OFFLOADED * (4 * STREAM + SCORES)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("place", ["cuda"], indirect=True)
@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "varlen"])
def test_back_ends_of_an_accelerator(place, backend):
    if backend == "varlen":
        pytest.importorskip("torch.nn.attention.varlen")
    block = Packed if backend == "varlen" else functools.partial(Attending, SDPBackend.__members__[backend], 0.1)
    statistics = both(training(lambda: Half(block))).statistics()
    assert statistics.bytes_offloaded > STEPS * OFFLOADED * 4 * STREAM // 2


@pytest.mark.usefixtures("way")
def test_dropout_in_attention():
    """The mask of dropout is saved and offloaded like any other; random numbers are drawn as without offload."""
    make = functools.partial(Net, lambda: Attending(SDPBackend.MATH, 0.1, dropout_p=0.2))
    without = both(training(lambda: Net(lambda: Attending(SDPBackend.MATH)))).statistics()
    assert both(training(make)).statistics().bytes_offloaded > without.bytes_offloaded


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of attention on the CPU
def test_sequences_of_different_lengths():
    """Jagged tensors from block to block: their values are offloaded, their offsets are kept because they are small."""

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
            self.qkv = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            q, k, v = (linear(y).unflatten(-1, [HEADS, -1]).transpose(1, 2) for linear in self.qkv)
            return x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)))

    class Packed(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.nested.nested_tensor_from_jagged(self.inp(x), torch.tensor([0, 5, 20, ROWS]))
            for block in self.blocks:
                y = block(y)
            return self.head(y.values())

    statistics = both(training(lambda: Packed(Ragged))).statistics()
    # In each block: its input, what the norm, the three linears and attention return.
    assert statistics.bytes_offloaded >= STEPS * OFFLOADED * 6 * STREAM


# Unmodified layers of Hugging Face's Llama, each in the context


transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.usefixtures("offload_small_tensors")

TOKENS, HIDDEN, LAYERS = 16, 64, 5


@pytest.mark.parametrize(("attention", "number"), [("eager", 2), ("sdpa", 3)])
def test_decoder_layers(attention, number):
    from transformers.models.llama import modeling_llama

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, **sizes)
    config._attn_implementation = attention
    layers = torch.nn.ModuleList([modeling_llama.LlamaDecoderLayer(config, k) for k in range(LAYERS)])
    leaf, positions = torch.randn(2, TOKENS, HIDDEN, requires_grad=True), torch.arange(TOKENS)[None]
    mask = torch.full((1, 1, TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    more = {"attention_mask": mask if attention == "eager" else None, "position_ids": positions}
    more["position_embeddings"] = modeling_llama.LlamaRotaryEmbedding(config)(leaf, positions)

    def call(layer, hidden):
        output = layer(hidden * 1.0, **more)
        return output[0] if isinstance(output, tuple) else output

    def step(run):
        loss = run([partial(call, layer) for layer in layers], leaf).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, [leaf, *layers.parameters()])]

    context, sync = make(number, LAYERS)
    want = step(plain)
    for _ in range(2):
        equal(step(lambda calls, x: forward(calls, x, context, sync)), want)
        nothing_held(context)
    statistics = context.statistics()
    assert statistics.passes == 2
    assert statistics.reloaded_on_demand == 0
    # A pass moves at least what each layer's norms, projections, attention and MLP save.
    assert statistics.tensors_offloaded >= 2 * number * 8
    weights = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    assert sum(statistics.bytes_kept.values()) >= 4 * weights
