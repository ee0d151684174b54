"""Finding the repeated blocks of models of Hugging Face, torchvision and timm, with random weights or none at all."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from actoffload._text import name_pattern
from actoffload.model.select import Names, block_type, choose


def found(model: torch.nn.Module) -> dict[tuple[str, str], int]:
    chosen = choose(Names(model), None)
    return dict(Counter((name_pattern(each.name), block_type(each.module).__name__) for each in chosen))


def library(name: str):
    """Skip where a library is missing, or does not load beside this torch: a wheel for CUDA beside torch for CPU."""
    return pytest.importorskip(name, exc_type=(ImportError, RuntimeError), reason=f"{name} is not installed or broken")


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
TEXT = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2}
BART = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64} | {
    "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip

HUGGING_FACE = {
    "LlamaForCausalLM": (TEXT, {("model.layers.*", "LlamaDecoderLayer"): 4}),
    "MixtralForCausalLM": ({**TEXT, "num_local_experts": 8}, {("model.layers.*", "MixtralDecoderLayer"): 4}),
    # Experts of their own type in half of the layers.
    "Qwen2MoeForCausalLM": (
        {**TEXT, "num_experts": 16, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
        {("model.layers.*", "Qwen2MoeDecoderLayer"): 4},
    ),
    "DeepseekV3ForCausalLM": (
        {**TEXT, "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 1},
        {("model.layers.*", "DeepseekV3DecoderLayer"): 4},
    ),
    "GPT2LMHeadModel": (
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64},
        {("transformer.h.*", "GPT2Block"): 3},
    ),
    "BartForConditionalGeneration": (
        BART,
        {("model.encoder.layers.*", "BartEncoderLayer"): 3, ("model.decoder.layers.*", "BartDecoderLayer"): 2},
    ),
    "WhisperForConditionalGeneration": (
        {**BART, "pad_token_id": 0},
        {("model.encoder.layers.*", "WhisperEncoderLayer"): 3, ("model.decoder.layers.*", "WhisperDecoderLayer"): 2},
    ),
    "T5ForConditionalGeneration": (
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
        {("encoder.block.*", "T5Block"): 2, ("decoder.block.*", "T5Block"): 2},
    ),
    "BertForMaskedLM": ({**SMALL, "num_hidden_layers": 3}, {("bert.encoder.layer.*", "BertLayer"): 3}),
    "JambaForCausalLM": (
        {**TEXT, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "use_mamba_kernels": False},
        {("model.layers.*", "JambaMambaDecoderLayer"): 3, ("model.layers.*", "JambaAttentionDecoderLayer"): 1},
    ),
    "MambaForCausalLM": (
        {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 64},
        {("backbone.layers.*", "MambaBlock"): 3},
    ),
    "CLIPModel": (
        {
            "text_config": {**SMALL, "num_hidden_layers": 3},
            "vision_config": {**SMALL, "num_hidden_layers": 5, "image_size": 32, "patch_size": 8},
        },
        {
            ("text_model.encoder.layers.*", "CLIPEncoderLayer"): 3,
            ("vision_model.encoder.layers.*", "CLIPEncoderLayer"): 5,
        },
    ),
    # Their names are those of stages, and of parts of a block.
    "SwinModel": ({"embed_dim": 12, "depths": [2, 2, 6, 2]}, {("encoder.layers.*.blocks.*", "SwinLayer"): 12}),
    "ResNetModel": ({}, {("encoder.stages.*.layers.*", "ResNetBottleNeckLayer"): 16}),
    "ConvNextModel": ({}, {("encoder.stages.*.layers.*", "ConvNextLayer"): 18}),
    "SegformerModel": ({}, {("stages.*.blocks.*", "SegformerLayer"): 8}),
    "MobileViTModel": (
        {},
        {("encoder.layer.*", "MobileViTMobileNetLayer"): 2, ("encoder.layer.*", "MobileViTLayer"): 3},
    ),
    # A stem of convolutions, and no names.
    "Wav2Vec2Model": (
        {**SMALL, "num_hidden_layers": 3},
        {
            ("feature_extractor.conv_layers.*", "Wav2Vec2GroupNormConvLayer"): 1,
            ("feature_extractor.conv_layers.*", "Wav2Vec2NoLayerNormConvLayer"): 6,
            ("encoder.layers.*", "Wav2Vec2EncoderLayer"): 3,
        },
    ),
    # The text model within names no blocks, the vision model does.
    "BlipForConditionalGeneration": (
        {
            "text_config": {**SMALL, "num_hidden_layers": 3, "encoder_hidden_size": 32, "bos_token_id": 1},
            "vision_config": {**SMALL, "num_hidden_layers": 5, "image_size": 32, "patch_size": 8},
        },
        {
            ("vision_model.encoder.layers.*", "BlipEncoderLayer"): 5,
            ("text_decoder.bert.encoder.layer.*", "BlipTextLayer"): 3,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name):
    transformers = library("transformers")
    model_class = getattr(transformers, name)
    options, want = HUGGING_FACE[name]
    with torch.device("meta"):
        model = model_class(model_class.config_class(**options))
    assert found(model) == want


def test_one_shared_block_of_albert_is_found():
    transformers = library("transformers")
    options = {**SMALL, "num_hidden_layers": 6, "embedding_size": 16}
    with torch.device("meta"):
        model = transformers.AlbertModel(transformers.AlbertConfig(**options))
    assert found(model) == {("encoder.albert_layer_groups.*.albert_layers.*", "AlbertLayer"): 1}
