"""Copies of a model under `offload`, several threads that run one, and weights that are swapped."""

import copy
import pickle
import threading

import pytest
import torch
from helpers import in_threads, nothing_held
from torch import Tensor, nn
from torch.nn import functional
from whole_model import Transformer, Waves, data, equal, nothing_installed, offload, train
from wrappers import Two

import actoffload

# Copies of the model


def copies(model: nn.Module) -> dict[str, nn.Module]:
    pickled = pickle.dumps(model)
    assert b"actoffload" not in pickled
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickled),
    }


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
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


# Threads


@pytest.mark.parametrize("recompute", ["auto", True])
def test_two_threads_run_their_own_forwards(recompute):
    model = Transformer(6)
    reference = copy.deepcopy(model)
    handle = offload(model, recompute=recompute)
    got = {}
    barrier = threading.Barrier(2)

    def work(k):
        x = data(k).requires_grad_()
        for _ in range(5):
            barrier.wait(30)
            y = model(x)
            barrier.wait(30)
            got[k] = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        nothing_installed()

    in_threads(lambda: work(0), lambda: work(1))
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

    in_threads(lambda: work(0), lambda: work(1))
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


# Swapped weights


class Frozen(nn.Module):
    """A linear layer whose frozen weight is a wrapper subclass, as quantized weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Two(torch.randn(16, 16), torch.randn(16, 16)), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x * self.scale, self.weight.a))


def plain() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)])


def frozen() -> nn.Module:
    return nn.Sequential(*[Frozen() for _ in range(3)])


def step(model: nn.Module) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    model(torch.ones(32, 16, dtype=dtype).requires_grad_()).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


# Wrappers are swapped in any case.
@pytest.mark.parametrize(("make_model", "always"), [(plain, True), (frozen, False)])
@pytest.mark.parametrize("removed", [False, True])
def test_a_model_is_converted_by_swapping_its_weights(make_model, always, removed, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", always)
    torch.manual_seed(0)
    model = make_model()
    handle = actoffload.offload(model, num_layers=2, min_bytes=0)
    step(model)
    step(model)
    if removed:
        handle.remove()
    model.double()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    with_offload = step(model)
    assert removed or handle.statistics().bytes_offloaded
    handle.remove()
    assert all(map(torch.equal, with_offload, step(model)))
