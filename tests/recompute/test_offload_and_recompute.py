"""A model whose groups are recomputed and offloaded: equal bits, and what is saved."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from test_region import MODELS, total
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from whole_model import nothing_installed, offload


def make(kind):
    torch.manual_seed(0)
    return nn.Sequential(*[First(MODELS[kind]()) for _ in range(5)])


class First(nn.Module):
    """Returns the first output."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y[0] if isinstance(y, tuple) else y


def step(model):
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
    total(model(x * 1.0)).backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


POLICIES = {
    "nothing": [],
    "products": True,
    "operators": [torch.ops.aten.addmm.default],
    "function": lambda ctx, op, *args, **kwargs: CheckpointPolicy(len(args) % 6),
    "bool": lambda ctx, op, *args, **kwargs: "mm" in str(op),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_layers", [None, 0, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_equal_bits(kind, num_layers, policy):
    model = make(kind)
    want = step(model)
    handle = offload(model, recompute=POLICIES[policy], num_layers=num_layers, min_bytes=0)
    for _ in range(3):
        for a, b in zip(step(model), want, strict=True):
            assert torch.equal(a, b)
    statistics = handle.statistics()
    assert (statistics.bytes_offloaded > 0) == (num_layers != 0)
    assert statistics.resident_bytes == statistics.host_bytes_used == 0
    handle.remove()
    nothing_installed(model)


def test_saved_outputs_of_operators_are_more_objects_for_the_garbage_collector():
    """So it traverses all objects more often; the same holds for checkpointing in PyTorch."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    model = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(6)])

    def checkpointed(x, **more):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, **more)
        return x

    def alive(forward):
        for _ in range(3):
            forward(torch.ones(1, 4, 16)).sum().backward()
        gc.collect()
        before = len(gc.get_objects())
        output = forward(torch.ones(1, 4, 16))
        found = len(gc.get_objects()) - before
        output.sum().backward()
        return found

    objects = {}
    for name in "nothing", "products":
        with offload(model, recompute=POLICIES[name], num_layers=0, min_bytes=0):
            objects[name] = alive(model)
    assert 0 < objects["nothing"] < objects["products"]
    selective = partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, products))
    assert 0 < alive(checkpointed) < alive(selective)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("sometimes", r"recompute is 'sometimes'; expected 'auto', True, False, operators"),
        (3, "recompute is 3; expected"),
        (torch.ops.aten.mm, r"recompute is <OpOverloadPacket.*; expected 'auto', True"),
        (torch.ops.aten.mm.default, r"recompute is <OpOverload.*; expected 'auto', True"),
        (lambda op: True, r"function <lambda>\(op\), which cannot be called as the policy \(ctx, op, \*args, \*\*kw"),
        ([torch.ops.aten.mm], "recompute has aten.mm of type OpOverloadPacket; expected 'auto', True"),
    ],
)
def test_what_is_no_policy(given, says):
    with pytest.raises(TypeError, match=says):
        offload(make("views"), recompute=given)


def test_a_policy_that_returns_something_else():
    model = make("views")
    handle = offload(model, recompute=lambda ctx, op, *args, **kwargs: "save", min_bytes=0)
    step(model)  # finds the groups
    with pytest.raises(TypeError, match="The policy for recompute returned 'save' for aten"):
        step(model)
    handle.remove()
    nothing_installed(model)


@pytest.mark.parametrize("policy", ["nothing", "products", "operators", "function"])
def test_a_plan_that_was_given_by_hand_says_what_is_recomputed_and_is_repeated(policy, tmp_path):
    model = make("views")
    want = step(model)
    handle = offload(model, recompute=POLICIES[policy], num_layers=2, min_bytes=0)
    for _ in range(2):
        step(model)
    assert len(handle.plan.recomputed) == 5
    assert str(handle.plan).splitlines()[0].split()[-1] == "recomputed"
    assert "yes" in str(handle.plan).splitlines()[2]
    moved = handle.statistics().bytes_offloaded
    handle.plan.save(tmp_path / "plan.json")
    handle.remove()
    handle = offload(model, plan=tmp_path / "plan.json", min_bytes=0)
    for _ in range(2):
        for a, b in zip(step(model), want, strict=True):
            assert torch.equal(a, b)
    assert len(handle.plan.recomputed) == 5
    handle.reset_statistics()
    step(model)
    assert handle.statistics().bytes_offloaded <= moved
