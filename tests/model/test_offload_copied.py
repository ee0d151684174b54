"""A copy of an offloaded model is a plain model: it trains, compiles as one graph, and can be offloaded itself."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from whole_model import Transformer, data, equal, nothing_installed, offload, train

import actoffload


def by_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_is_compiled_as_one_graph(copied):
    model = Transformer(4)
    want = train(copy.deepcopy(model))
    handle = offload(model)
    train(model, steps=1)
    other = copied(model)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    try:
        other.compile(backend=backend, fullgraph=True)
        equal(train(other), want)
    finally:
        torch._dynamo.reset()
    assert len(graphs) == 1
    assert actoffload.OffloadHandle.of(other) is None
    moved = handle.statistics().bytes_offloaded
    other(data())
    assert handle.statistics().bytes_offloaded == moved > 0
    handle.remove()
    nothing_installed(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_is_offloaded_by_a_handle_of_its_own(copied):
    model = Transformer(5)
    want = train(copy.deepcopy(model))
    handle = offload(model)
    other = copied(copied(model))
    mine = offload(other)
    equal(train(other), want)
    assert mine.statistics().bytes_offloaded > 0 == handle.statistics().bytes_offloaded


def test_a_model_of_hugging_face_is_saved_while_it_is_offloaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 8}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4))
    handle = offload(model)
    tokens = torch.tensor([[1, 2, 3]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.save_pretrained(tmp_path)
    handle.remove()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model) is transformers.LlamaForCausalLM
    equal(list(model.state_dict().values()), list(again.state_dict().values()))
    assert list(again.state_dict()) == list(model.state_dict())
