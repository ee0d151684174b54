"""Unmodified Hugging Face Llama layers, each in the context."""

from __future__ import annotations

import pytest
import torch
from helpers import make, nothing_held, same_bits

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def config(attention: str):
    made = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        attention_dropout=0.0,
    )
    made._attn_implementation = attention
    return made


def mask(tokens: int, attention: str) -> torch.Tensor | None:
    if attention == "sdpa":
        return None
    return torch.full((1, 1, tokens, tokens), torch.finfo(torch.float32).min).triu(1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("num", [2, 3])
def test_decoder_layers(attention, num):
    from transformers.models.llama import modeling_llama

    torch.manual_seed(0)
    made = config(attention)
    layers = torch.nn.ModuleList([modeling_llama.LlamaDecoderLayer(made, k) for k in range(5)])
    rotary = modeling_llama.LlamaRotaryEmbedding(made)
    tokens = 16
    inputs = torch.randn(2, tokens, 64)
    positions = torch.arange(tokens)[None]

    def run(step):
        hidden = leaf = inputs.clone().requires_grad_()
        embeddings = rotary(hidden, positions)
        for layer in layers:
            hidden = step(layer, hidden * 1.0, embeddings)
        loss = hidden.square().mean()
        return loss.detach(), torch.autograd.grad(loss, [leaf, *layers.parameters()])

    def plain(layer, hidden, embeddings):
        out = layer(
            hidden,
            attention_mask=mask(tokens, attention),
            position_ids=positions,
            position_embeddings=embeddings,
        )
        return out[0] if isinstance(out, tuple) else out

    context, sync = make(num, 5)

    def offloaded(layer, hidden, embeddings):
        with context:
            out = plain(layer, hidden, embeddings)
        return sync(out)

    want_loss, want = run(plain)
    for _ in range(2):
        loss, got = run(offloaded)
        assert same_bits(want_loss, loss)
        assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
        nothing_held(context)
    statistics = context.statistics()
    assert statistics.passes == 2
    assert statistics.reloaded_on_demand == 0
    # A pass moves at least what each layer's norms, projections, attention and MLP save.
    assert statistics.tensors_offloaded >= 2 * num * 8
    weights = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    assert sum(statistics.bytes_kept.values()) >= 4 * weights
