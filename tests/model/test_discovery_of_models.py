"""The groups of models without arguments cover nearly all that a forward saves, and are recomputed bit by bit."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter

import designs
import pytest
import torch
from recomputing import whole_model
from saving import default_groups, share_in
from test_stacks_of_models import BART, HUGGING_FACE, SMALL, library
from whole_model import offload

from actoffload._text import name_pattern
from actoffload.model.discovery import ENOUGH


def check(model, *args, **kwargs):
    """Return the names of the groups, with how many there are of each, and check what they cover."""
    torch.manual_seed(0)
    groups = default_groups(lambda: model(*args, **kwargs), model)
    assert share_in(lambda: model(*args, **kwargs), model, groups) >= ENOUGH
    assert 4 <= len(groups) <= 128
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs = {**kwargs, "use_cache": False}
    assert "they change" not in whole_model(model, lambda: model(*args, **kwargs))
    return dict(Counter(name_pattern(of.name) for of in groups))


def test_blocks_of_lists_of_layers():
    check(designs.VisionTransformer(ff=designs.feed_forward), torch.randn(2, 3, 32, 32))


def test_the_blocks_of_a_model_whose_blocks_are_pairs():
    found = check(designs.VisionTransformer(), torch.randn(2, 3, 32, 32))
    assert found["transformer.layers.*.*"] == 12
    assert not any(name.startswith("transformer.layers.*.*.") for name in found)


def test_the_blocks_of_a_unet():
    found = check(designs.UNet((16, 32)), torch.randn(2, 3, 16, 16))
    assert found["up_blocks.*.resnets.*"] == 6


def test_the_second_pass_of_a_unet_runs_in_the_order_of_the_first():
    """The first pass follows the parts of each block, and is reported by groups."""
    model, x = designs.UNet((16, 32)), torch.randn(2, 3, 16, 16)
    handle = offload(model, min_bytes=64)
    for _ in range(2):
        model(x).square().mean().backward()
        assert handle.report().totals.reloaded_on_demand == 0
    handle.remove()


def test_lists_of_norm_block_and_residual():
    found = check(designs.Decoder(), torch.randint(0, 64, (2, 16)))
    assert found["layers.*.*"] == 8


TOKENS = {"input_ids": torch.randint(0, 64, (2, 32))}
PIXELS = {"pixel_values": torch.randn(2, 3, 32, 32)}
BOTH = {**TOKENS, **PIXELS}
FRAMES = {"input_features": torch.randn(1, 80, 64), "decoder_input_ids": TOKENS["input_ids"][:1]}
INPUTS = {
    "WhisperForConditionalGeneration": FRAMES,
    "CLIPModel": BOTH,
    "BlipForConditionalGeneration": {**BOTH, "labels": TOKENS["input_ids"]},
    "SwinModel": {"pixel_values": torch.randn(1, 3, 64, 64)},
    "ResNetModel": PIXELS,
    "ConvNextModel": PIXELS,
    "MobileViTModel": {"pixel_values": torch.randn(1, 3, 64, 64)},
    "Wav2Vec2Model": {"input_values": torch.randn(1, 4000)},
    "T5ForConditionalGeneration": {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]},
}
# Smaller than the defaults, of which the structure is tested elsewhere without weights.
SMALLER = {
    "WhisperForConditionalGeneration": {**BART, "pad_token_id": 0, "max_source_positions": 32},
    "DeepseekV3ForCausalLM": {**HUGGING_FACE["DeepseekV3ForCausalLM"][0], "n_group": 2, "topk_group": 1}
    | {"num_experts_per_tok": 2},
    "SwinModel": {"embed_dim": 12, "depths": [2, 2, 2, 2], "image_size": 64, "window_size": 2},
    "ResNetModel": {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128]},
    "ConvNextModel": {"hidden_sizes": [8, 16, 32, 64]},
}


ALIKE = "LlamaForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "BartForConditionalGeneration", "SegformerModel"
"""Models whose blocks others have, too."""


@pytest.mark.parametrize("name", [name for name in HUGGING_FACE if name not in ALIKE])
def test_hugging_face(name):
    transformers = library("transformers")
    model_class = getattr(transformers, name)
    options = SMALLER.get(name, HUGGING_FACE[name][0])
    check(model_class(model_class.config_class(**options)), **INPUTS.get(name, TOKENS))


def test_the_one_shared_block_of_albert():
    transformers = library("transformers")
    options = {**SMALL, "num_hidden_layers": 6, "embedding_size": 16}
    groups = check(transformers.AlbertModel(transformers.AlbertConfig(**options)), **TOKENS)
    assert any("albert_layers" in name for name in groups)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "T5ForConditionalGeneration", "JambaForCausalLM"])
def test_layers_that_write_to_a_cache_are_replayed(name):
    """No layer runs again, so keys and values are appended once; the cache refers to some of them."""
    transformers = library("transformers")
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SMALLER.get(name, HUGGING_FACE[name][0])))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole_model(model, lambda: model(**INPUTS.get(name, TOKENS), use_cache=True))
