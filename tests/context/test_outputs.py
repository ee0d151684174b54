"""What the synchronization function takes and returns."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from helpers import forward, make, nothing_held, same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


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


Pair = namedtuple("Pair", "hidden rest")

FORMS = {
    "tensor": (lambda t: t, lambda o: o),
    "tuple": (lambda t: (t, None), lambda o: o[0]),
    "list": (lambda t: [1, t], lambda o: o[1]),
    "nested": (lambda t: ((None, [t]), {"x": 3}), lambda o: o[0][1][0]),
    "dict": (lambda t: {"hidden": t, "loss": 0.5}, lambda o: o["hidden"]),
    "namedtuple": (lambda t: Pair(t, "text"), lambda o: o.hidden),
    "dataclass": (lambda t: Output(t, cache={"k": [t]}), lambda o: o.hidden),
    "model output": (lambda t: ModelOutput(hidden=t, attentions=None), lambda o: o.hidden),
    "twice": (lambda t: (t, t), lambda o: o[1]),
    "with a leaf": (lambda t: (torch.ones(3, requires_grad=True), t), lambda o: o[1]),
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


@pytest.mark.parametrize("output", [None, 3, "text", (), [], {}, object()])
def test_outputs_without_tensors(output):
    context, sync = make(1, 3)
    for _ in range(3):
        with context:
            pass
        assert sync(output) is output


def test_an_output_that_is_the_input():
    context, sync = make(1, 3)
    leaf = torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        y = forward([lambda x: x, torch.sin, lambda x: x], leaf, context, sync)
        y.sum().backward()
    assert same_bits(leaf.grad, 2 * torch.cos(leaf))
    assert context.statistics().passes == 2


def test_only_one_of_two_outputs_is_used():
    context, sync = make(2, 4)
    x = leaf = torch.randn(64, 64, requires_grad=True)
    for _ in range(4):
        with context:
            x, other = torch.sin(x * 1.0), torch.cos(x)
        x, other = sync((x, other))
    del other
    x.sum().backward()
    want = leaf.detach().clone().requires_grad_()
    y = want
    for _ in range(4):
        y = torch.sin(y * 1.0)
    y.sum().backward()
    assert same_bits(leaf.grad, want.grad)
    assert context.statistics().reloaded_on_demand == 0
