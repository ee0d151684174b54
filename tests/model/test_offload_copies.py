"""Copies of a model under `offload`, and several threads that run one."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from helpers import no_gc, nothing_held
from torch import nn
from whole_model import UNIT, Transformer, Waves, data, equal, nothing_installed, offload, train

import actoffload


def start() -> torch.Tensor:
    return data().requires_grad_() * 1.0


# Copies of the model


def copies(model: nn.Module) -> dict[str, nn.Module]:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(saved, weights_only=False),
    }


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_a_model_without_offload(how, removed):
    model = Transformer(6)
    want = train(copy.deepcopy(model))
    handle = offload(model, keep="*.norm1")
    train(model, steps=1)
    if removed:
        handle.remove()
    before = handle.statistics()
    other = copies(model)[how]
    equal(train(other), want)
    assert handle.statistics() == before
    second = offload(other)
    equal(train(other), want)
    assert second.statistics().bytes_offloaded > 0
    assert handle.statistics() == before
    again = copy.deepcopy(other)
    second.remove()
    equal(train(again), want)


def test_a_copy_of_a_part_and_a_part_in_another_model():
    model = Waves(6)
    handle = offload(model)
    part = copy.deepcopy(model.blocks[2])
    before = handle.statistics()
    part(start()).sum().backward()
    assert handle.statistics() == before
    # The block itself is followed wherever it runs.
    nn.Sequential(*model.blocks)(start()).sum().backward()
    assert handle.statistics().bytes_offloaded == 8 * UNIT


# Threads


def test_two_threads_run_their_own_forwards():
    model = Transformer(6)
    reference = copy.deepcopy(model)
    handle = offload(model)
    got, failed = {}, []
    barrier = threading.Barrier(2)

    def work(k):
        try:
            x = data(k).requires_grad_()
            for _ in range(5):
                barrier.wait()
                y = model(x)
                barrier.wait()
                got[k] = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
            nothing_installed()
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for k in range(2):
        x = data(k).requires_grad_()
        equal(list(got[k]), list(torch.autograd.grad(reference(x).square().sum(), [x, *reference.parameters()])))
    statistics = handle.statistics()
    assert statistics.passes == 10
    assert statistics.reloaded_on_demand == 0
    nothing_held(handle)


def test_replicas_in_threads_as_data_parallel_makes_them():
    """Replicas run as if nothing followed them."""
    model = Waves(6)
    handle = offload(model)

    def replica(module):
        other = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(other, name, parameter * 1.0)
        for name, child in module._modules.items():
            other._modules[name] = replica(child)
        return other

    outputs = {}
    with pytest.warns(UserWarning, match="replicas of torch.nn.DataParallel"):
        replicas = [replica(model) for _ in range(2)]

    def work(k):
        outputs[k] = replicas[k](data(k))

    def run():
        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run()
    sum(outputs.values()).sum().backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    with handle.paused():
        (model(data(0)) + model(data(1))).sum().backward()
    for a, b in zip(got, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(a, b)
    assert handle.statistics().passes == 0
    outputs.clear()
    nothing_held(handle)


def test_a_thread_that_ends_leaves_nothing():
    model = Waves(6)
    handle = offload(model)
    with no_gc():

        def work():
            y = start()
            for block in model.blocks[:3]:  # ended in the middle
                y = block(y)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        del thread
        nothing_held(handle)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_is_compiled_as_one_graph(how):
    model = Transformer(4)
    want = train(copy.deepcopy(model))
    handle = offload(model)
    train(model, steps=1)
    other = copies(model)[how]
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
