"""Inputs and outputs that a call refers to are named by their path, with what to do about it."""

import gc
import types

import pytest
import torch
from helpers import no_gc
from report_samples import Box, address, attribute, find_holders, input_, make, output
from torch import nn
from whole_model import Waves, data, offload

from actoffload.report import HeldStorage
from actoffload.report.holders import merge_held

# Names


class Cache:
    """Keys and values in objects in a list in an object, as transformers has them."""

    def __init__(self) -> None:
        self.layers = [Box(), Box()]
        for layer in self.layers:
            layer.keys, layer.values = make(), make()


class Output(dict):
    """A dict whose entries are attributes as well."""

    def __init__(self, **entries: object) -> None:
        super().__init__(entries)
        self.__dict__.update(entries)


def test_what_the_model_returns_is_named_by_the_path_in_it():
    class Model(nn.Module):
        def forward(self, seed, *, options):
            cache = Cache()
            outer = Box()
            outer.decoder = cache
            return Output(logits=torch.ones(1), past=outer)

    found = {}

    def look(module, args, kwargs, result):
        del module
        addresses = [
            address(tensor) for tensor in (result.past.decoder.layers[1].keys, args[0], kwargs["options"]["x"])
        ]
        del args, kwargs, result
        for where in addresses:
            found[where] = find_holders(where, {model: "the model"})

    model = Model()
    model.register_forward_hook(look, with_kwargs=True)
    model(make(), options={"x": make()})
    assert list(found.values()) == [
        ("output `past.decoder.layers[1].keys` of the model",),
        ("input `args[0]` of the model",),
        ("input `kwargs['options']['x']` of the model",),
    ]


def test_a_recorded_call_leaves_no_frame_to_the_collector():
    """Each refers to the frame that called it, and so to the arguments of the model."""
    model = Waves(6)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, y: seen.append(y))
    handle = offload(model)
    gc.collect()
    with no_gc():
        with handle.recording():
            model(data()).sum().backward()
        assert handle.report().held
        frames = [obj.f_code for obj in gc.get_objects() if type(obj) is types.FrameType]
        assert [code.co_qualname for code in frames if code.co_filename.endswith("module.py")] == []
        assert [code.co_qualname for code in frames if "actoffload" in code.co_filename] == []


def test_the_cache_that_a_hugging_face_model_returns_by_default_is_one_line():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2))
    tokens = torch.randint(0, 64, (2, 16))
    handle = offload(model, layers="model.layers")
    with handle.recording():
        model(input_ids=tokens, labels=tokens).loss.backward()
    ((groups, _, (holder,)),) = merge_held(handle.report().held)
    assert groups == ("model.layers.0", "model.layers.1")
    assert (holder.kind, holder.path) == ("output", "past_key_values.layers[0].keys")
    assert any(str(holder) in words and "use_cache=False" in words for words in handle.report().advice)
    with handle.recording():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert handle.report().held == ()  # as the advice said


# Lines that belong together


@pytest.mark.parametrize(
    ("holders", "lines"),
    [
        (
            [output(f"a.b[{k}].{name}") for k in range(2) for name in "kv"],
            ["output `a.b[0].k` of the model"],
        ),
        ([output("a.k"), output("b.k")], ["output `a.k` of the model", "output `b.k` of the model"]),
        ([output(""), input_("")], ["the output of the model", "the input of the model"]),
        ([attribute("a[0]", "m.0"), attribute("a[1]", "m.1")], ["attribute `a[0]` of m.0"]),
    ],
)
def test_the_tensors_of_one_cache_are_one_line(holders, lines):
    merged = merge_held([HeldStorage(f"a.{k}", 1, (holder,)) for k, holder in enumerate(holders)])
    assert [str(holder) for _, _, (holder,) in merged] == lines
