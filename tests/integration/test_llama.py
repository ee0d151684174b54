"""Unmodified Hugging Face Llama layers, each in the context."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import forward, make, nothing_held, plain
from whole_model import equal

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
