"""What a call of the model holds is named by the path in what it was given or returns, with what to do about it."""

from __future__ import annotations

import gc
import types

import pytest
import torch
from helpers import no_gc
from torch import nn
from whole_model import Waves, data, offload

from actoffload.report.advice import advise
from actoffload.report.held import HeldStorage, merge_held
from actoffload.report.holders import find_holders
from actoffload.report.report import GroupReport, Report

MIB = 2**20


class Box:
    pass


def make() -> torch.Tensor:
    return torch.ones(1000)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


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


@pytest.mark.parametrize("materialized", [False, True])
def test_what_the_model_returns_is_named_by_the_path_in_it(materialized):
    class Model(nn.Module):
        def forward(self, seed, *, options):
            cache = Cache()
            for layer in cache.layers if materialized else ():
                layer.__dict__.copy()  # it then lies between the object and its attributes
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
        ("`past.decoder.layers[1].keys` of what the model returns",),
        ("`args[0]` of what the model was called with",),
        ("`options['x']` of what the model was called with",),
    ]


def test_a_call_without_hooks_names_its_arguments_as_well_and_a_model_without_a_name_its_class():
    class Plain(nn.Module):
        def forward(self, x):
            where = address(x)
            del x
            return find_holders(where)

    lines = Plain()(make())
    assert lines == ("`args[0]` of what Plain was called with",)


def test_a_recorded_call_leaves_no_frame_to_the_collector():
    """Each holds the frame that called it, and so what the model was called with."""
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
        assert [code.co_qualname for code in frames if code.co_filename.endswith(("module.py", "reporting.py"))] == []
        assert [code.co_qualname for code in frames if "actoffload" in code.co_filename] == []


def test_the_cache_that_a_hugging_face_model_returns_by_default_is_one_line():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2))
    tokens = torch.randint(0, 64, (2, 16))
    handle = offload(model)
    with handle.recording():
        model(input_ids=tokens, labels=tokens).loss.backward()
    ((groups, _, holders),) = merge_held(handle.report().held)
    assert groups == ("model.layers.0", "model.layers.1")
    cache = "past_key_values.layers[*]"
    assert holders == (f"`{cache}.keys` and `{cache}.values` of what the model returns",)
    assert any(f"{holders[0]} hold references: pass use_cache=False" in words for words in handle.report().advice)
    with handle.recording():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert handle.report().held == ()  # as was said


# Lines that belong together


def test_what_one_cache_holds_is_one_line():
    def held(*lines: str) -> list[tuple[str, ...]]:
        return [holders for _, _, holders in merge_held([HeldStorage(f"a.{k}", 1, (x,)) for k, x in enumerate(lines)])]

    returns = "of what the model returns"
    assert held(f"`a.b[0].k` {returns}", f"`a.b[0].v` {returns}", f"`a.b[1].k` {returns}", f"`a.b[1].v` {returns}") == [
        (f"`a.b[*].k` and `a.b[*].v` {returns}",)
    ]
    assert held(f"`a.b[3].k` {returns}") == [(f"`a.b[3].k` {returns}",)]
    assert held(*(f"`a.{name}` {returns}" for name in "klmn")) == [(f"`a.k`, `a.l` and 2 more {returns}",)]
    assert held(f"`a.k` {returns}", f"`b.k` {returns}") == [(f"`a.k` {returns}",), (f"`b.k` {returns}",)]
    assert held("what the model returns", "what the model was called with") == [
        ("what the model returns",),
        ("what the model was called with",),
    ]
    assert held(
        "global `c['k'][0]` of module m", "global `c['v'][0]` of module m", "global `c['k'][1]` of module m"
    ) == [("global `c['k'][0]` and `c['v'][0]` of module m",)]
    assert len(held("attribute `a` of m", "attribute `b` of m")) == 2


# Advice


def returned(k: int, path: str, how: str = "returns") -> HeldStorage:
    return HeldStorage(f"layers.{k}", 30 * MIB, (f"`{path}` of what the model {how}",))


def advised(*held: HeldStorage) -> str:
    groups = []
    for k in range(4):
        left = 300 * MIB if k < 3 else 0
        not_freed = sum(storage.nbytes for storage in held if storage.group == f"layers.{k}")
        numbers = {"leaves": k < 3, "bytes_saved": 300 * MIB, "bytes_offloaded": left, "bytes_reloaded": left}
        groups.append(GroupReport(f"layers.{k}", **numbers, bytes_not_freed=not_freed))
    (sentence,) = advise(Report(tuple(groups), held=held))
    return sentence


def test_keys_and_values_that_the_model_returns_are_one_sentence_with_what_to_do():
    cache = [(k, f"past_key_values.layers[{k}].{name}") for k in range(3) for name in ("keys", "values")]
    assert advised(*(returned(k, path) for k, path in cache)) == (
        "20.0 % of the bytes of 3 groups (layers.0 … 2) (180.0 MiB of 900.0 MiB) are still on the device after their "
        "copy because `past_key_values.layers[*].keys` and `past_key_values.layers[*].values` of what the model "
        "returns hold references: pass use_cache=False to the model, or set model.config.use_cache = False, "
        "for training."
    )


@pytest.mark.parametrize(
    ("path", "how", "words"),
    [
        ("['inner'].past_key_values.layers[0].keys", "returns", "use_cache=False"),
        ("decoder_hidden_states[1]", "returns", "holds a reference: pass output_hidden_states=False"),
        ("attentions[0]", "returns", "output_attentions=False"),
        ("[1]['seen'][2]", "returns", "return only what the loss needs from forward while training"),
        ("input_ids", "was called with", "they go when that call ends"),
        ("past_key_values.layers[0].keys", "was called with", "they go when that call ends"),
    ],
)
def test_what_to_do_about_what_a_call_holds(path, how, words):
    assert words in advised(returned(1, path, how))


def test_what_is_held_by_the_call_as_a_whole():
    held = HeldStorage("layers.1", 30 * MIB, ("what the model returns",))
    assert "because what the model returns holds a reference: return only" in advised(held)
