"""Several contexts at once, other ways to enter one, and outputs of any form."""

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from helpers import forward, make, make_manual, nothing_held, plain, same_bits
from torch import Tensor, nn

from actoffload.device.reference import ReferenceStream

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


@pytest.fixture
def layers():
    torch.manual_seed(5)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)])


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def gradients(layers, loss):
    return torch.autograd.grad(loss, list(layers.parameters()))


def check(layers, seed, loss):
    want = gradients(layers, plain(list(layers), data(seed)).square().sum())
    got = gradients(layers, loss)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


def test_two_contexts_nested(layers):
    outer, outer_sync = make(1, 3)
    inner, inner_sync = make(1, 3)

    def block(x):
        for layer in list(layers)[:3]:
            with inner:
                x = layer(x)
            x = inner_sync(x)
        return torch.sin(x)

    want = gradients(layers[:3], torch.relu(torch.tanh(torch.sin(plain(list(layers)[:3], data())))).sum())
    y = forward([block, torch.tanh, torch.relu], data(), outer, outer_sync)
    assert inner.statistics().tensors_saved == 4  # the first input and each output
    assert outer.statistics().tensors_saved == 3  # of sin, tanh and relu
    got = gradients(layers[:3], y.sum())
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    del y
    nothing_held(outer)
    nothing_held(inner)


def test_context_as_a_decorator(layers):
    context, sync = make(3, 5)

    @context
    def run(layer, x):
        """Run one layer."""
        return layer(x)

    assert run.__doc__ == "Run one layer."
    x = data()
    for layer in layers:
        x = sync(run(layer, x))
    check(layers, 0, x.square().sum())
    assert context.statistics().passes == 1


def test_a_model_that_holds_its_context_can_be_copied_and_pickled():
    """Each copy has passes and host memory of its own, and a sync function that goes with them."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
            self.context, self.sync = make(1, 3)

        def forward(self, x):
            for layer in self.layers:
                with self.context:
                    x = layer(x)
                x = self.sync(x)
            return x

    model = Model()
    x = torch.randn(64, 64)
    expected = model(x * 1.0)
    for other in (copy.deepcopy(model), _pickled(model.context)):
        context = other.context if isinstance(other, Model) else other
        assert context is not model.context
        assert context.plan == model.context.plan
        assert context.statistics().passes == 0
    other = copy.deepcopy(model)
    assert torch.equal(other(x * 1.0), expected)
    assert (other.context.statistics().passes, other.context.statistics().tensors_offloaded) == (1, 1)


def _pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def test_a_context_with_a_stream_of_the_program_cannot_be_pickled():
    context, _, _ = make_manual(3, offload_stream=ReferenceStream("mine"))
    with pytest.raises(TypeError, match="with an offload_stream cannot be copied or pickled"):
        pickle.dumps(context)


# What the synchronization function takes and returns


@dataclass
class Output:
    hidden: Tensor
    cache: object = None
    scale: float = 1.0


class ModelOutput(OrderedDict):
    """As Hugging Face has them: a mapping whose entries are attributes too."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


FORMS = {
    "tensor": (lambda t: t, lambda o: o),
    "tuple": (lambda t: (t, None), lambda o: o[0]),
    "nested": (lambda t: ((None, [t]), {"x": 3}), lambda o: o[0][1][0]),
    "dict": (lambda t: {"hidden": t, "loss": 0.5}, lambda o: o["hidden"]),
    "dataclass": (lambda t: Output(t, cache={"k": [t]}), lambda o: o.hidden),
    "model output": (lambda t: ModelOutput(hidden=t, attentions=None), lambda o: o.hidden),
    "with a leaf": (lambda t: (torch.ones(3, requires_grad=True), t), lambda o: o[1]),
    "one of which is not used": (lambda t: (t, t + 1.0), lambda o: o[0]),
    "with integers": (lambda t: (torch.arange(4), t), lambda o: o[1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_any_form(form):
    wrap, unwrap = FORMS[form]
    context, sync = make(2, 4)
    leaf = torch.randn(64, 64, requires_grad=True)
    x = leaf
    for k in range(4):
        with context:
            out = wrap(torch.sin(x * 1.0) * 2.0)
        assert len(context.current_pass.layers) == k + 1
        assert sync(out) is out
        x = unwrap(out)
    assert context.statistics().resident_bytes == 2 * 64 * 64 * 4
    x.sum().backward()
    # Each reload was asked for in time, so backward was seen to come to each layer.
    assert context.statistics().reloaded_ahead == 2
    assert context.statistics().reloaded_on_demand == 0
    want = leaf.detach().clone().requires_grad_()
    x = want
    for _ in range(4):
        x = torch.sin(x * 1.0) * 2.0
    x.sum().backward()
    assert same_bits(leaf.grad, want.grad)
    del out, x
    nothing_held(context)
