"""The default groups of models cover nearly all that a forward saves, and are recomputed bit by bit."""

import inspect
import warnings
from collections import Counter
from typing import Any

import designs
import pytest
import torch
from recomputing import whole_model
from whole_model import offload

from actoffload._text import name_pattern
from actoffload.model.groups import BLOCK, Names, block_type, choose


def check(model, *args, **kwargs):
    """Return the names of the groups, with how many there are of each, and check what they cover."""
    torch.manual_seed(0)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs = {**kwargs, "use_cache": False}
    report = whole_model(model, lambda: model(*args, **kwargs))
    assert report.coverage >= 0.8
    assert 4 <= len(report.groups) <= 128
    assert "they change" not in report.because
    return dict(Counter(name_pattern(group.name) for group in report.groups))


def test_blocks_of_lists_of_layers():
    check(designs.VisionTransformer(ff=designs.feed_forward), torch.randn(2, 3, 32, 32))


def test_the_blocks_of_a_model_whose_blocks_are_pairs():
    found = check(designs.VisionTransformer(), torch.randn(2, 3, 32, 32))
    assert found["transformer.layers.*.*"] == 12
    assert not any(name.startswith("transformer.layers.*.*.") for name in found)


def unet():
    return library("diffusers").UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
        norm_num_groups=8,
    )


def test_the_blocks_of_a_unet():
    found = check(unet(), torch.randn(2, 3, 16, 16), 0)
    assert found["up_blocks.*.resnets.*"] == 6


def test_the_second_pass_of_a_unet_runs_in_the_order_of_the_first():
    model, x = unet(), torch.randn(2, 3, 16, 16)
    handle = offload(model, min_bytes=64)
    for _ in range(2):
        model(x, 0).sample.square().mean().backward()
        assert handle.report().totals.reloaded_on_demand == 0
    handle.remove()


def test_lists_of_norm_block_and_residual():
    found = check(designs.Decoder(), torch.randint(0, 64, (2, 16)))
    assert found["layers.*.*"] == 2 * 8  # blocks and residuals


def library(name: str):
    """Skip where a library is missing, or does not load beside this torch: a wheel for CUDA beside torch for CPU."""
    return pytest.importorskip(name, exc_type=(ImportError, RuntimeError), reason=f"{name} is not installed or broken")


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
TEXT = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2}
TOKENS = {"input_ids": torch.randint(0, 64, (2, 32))}
IMAGES = {"pixel_values": torch.randn(1, 3, 64, 64)}
MODELS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], dict[tuple[str, str], int]]] = {
    # Its first layer has no experts.
    "DeepseekV3ForCausalLM": (
        {**TEXT, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
        | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        TOKENS,
        {("model.layers.*", "DeepseekV3DecoderLayer"): 4},
    ),
    "T5ForConditionalGeneration": (
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
        {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]},
        {("encoder.block.*", "T5Block"): 2, ("decoder.block.*", "T5Block"): 2},
    ),
    "JambaForCausalLM": (
        {**TEXT, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "use_mamba_kernels": False},
        TOKENS,
        {("model.layers.*", "JambaMambaDecoderLayer"): 3, ("model.layers.*", "JambaAttentionDecoderLayer"): 1},
    ),
    # Their names are those of stages, and of parts of a block.
    "SwinModel": (
        {"embed_dim": 12, "depths": [2, 2, 2, 2], "image_size": 64, "window_size": 2},
        IMAGES,
        {("encoder.layers.*.blocks.*", "SwinLayer"): 8},
    ),
    "MobileViTModel": (
        {},
        IMAGES,
        {("encoder.layer.*", "MobileViTMobileNetLayer"): 2, ("encoder.layer.*", "MobileViTLayer"): 3},
    ),
    # A stem of convolutions, and no names.
    "Wav2Vec2Model": (
        {**SMALL, "num_hidden_layers": 3},
        {"input_values": torch.randn(1, 4000)},
        {
            ("feature_extractor.conv_layers.*", "Wav2Vec2GroupNormConvLayer"): 1,
            ("feature_extractor.conv_layers.*", "Wav2Vec2NoLayerNormConvLayer"): 6,
            ("encoder.layers.*", "Wav2Vec2EncoderLayer"): 3,
        },
    ),
    # One block for all layers.
    "AlbertModel": (
        {**SMALL, "num_hidden_layers": 6, "embedding_size": 16},
        TOKENS,
        {("encoder.albert_layer_groups.*", "AlbertLayerGroup"): 1},
    ),
}


def make(name: str) -> torch.nn.Module:
    transformers = library("transformers")
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**MODELS[name][0]))


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face(name):
    _, inputs, want = MODELS[name]
    model = make(name)
    blocks = [each for each in choose(Names(model), [...]) if each.kind == BLOCK]
    assert Counter((name_pattern(each.name), block_type(each.module).__name__) for each in blocks) == want
    check(model, **inputs)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "T5ForConditionalGeneration", "JambaForCausalLM"])
def test_layers_that_write_to_a_cache_are_replayed(name):
    """No layer runs again, so keys and values are appended once; the cache refers to some of them."""
    model = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole_model(model, lambda: model(**MODELS[name][1], use_cache=True))
