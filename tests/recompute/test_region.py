"""Recomputed regions: equal bits, what is saved and what is run again, and nothing that is left."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from actoffload.recompute import Reads, Region, Trace, never, recomputed, worth_saving
from actoffload.recompute.policy import saveable

POLICIES = {
    "nothing": never,
    "products": worth_saving,
    "everything": lambda call: True,
    "first of each": lambda call: call.number == 0,
}


class Seen(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + F.dropout(self.two(F.dropout(F.gelu(self.one(x)), 0.3)), 0.3)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.one(x)
        y.mul_(2.0).relu_()
        z = self.two(y)
        z += x
        return z.sin()


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(x.shape[0], 3, 2, 4).unbind(1)
        scores = (q @ k.transpose(1, 2)).softmax(-1)
        return self.out((scores @ v).reshape(x.shape[0], 8)), q[:, 0].sum()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x[None])[0]


class Random(nn.Module):
    """Draws by the same operator twice."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.rand_like(x) * self.one(x)
        return (y * torch.rand_like(y)).sin()


MODELS = {"random": Random, "dropout": Dropped, "in place": InPlace, "views": Views, "attention": Attention}


def total(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((output.float() * torch.linspace(0.1, 1, output.numel()).view(output.shape)).sum() for output in outputs)


def run(model, call, times=1, autocast=False, **backward):
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(6, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = sum(total(call(x * (k + 1.0))) for k in range(times))
    value.backward(**backward)
    after = torch.rand(1)
    return [value, x.grad, after, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_equal_bits(kind, policy, times, autocast):
    torch.manual_seed(0)
    model = MODELS[kind]()
    want = run(model, model, times, autocast)
    trace = Trace()
    for _ in range(3):  # the first call is traced, and saves nothing; the last leaves operators out
        found = run(model, lambda x: recomputed(model, Region(POLICIES[policy], trace=trace), x), times, autocast)
        for a, b in zip(want, found, strict=True):
            assert torch.equal(a, b)


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def test_attention_is_saved_unless_it_drops():
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.ones(1, 1, 1, 8)
    assert saveable(attention, (query, query, query))
    assert saveable(attention, (query, query, query, 0.0, True))
    assert not saveable(attention, (query, query, query, 0.1))
    assert not saveable(attention, (query, query, query), {"dropout_p": 0.1})


def test_products_are_not_run_again():
    model = Attention().eval()
    names = {}
    for name, policy in POLICIES.items():
        value = total(recomputed(model, Region(policy, trace=Trace(known=True)), torch.randn(6, 8)))
        with Seen() as seen:
            value.backward()
        names[name] = seen.names
    forward = names["nothing"].count("addmm")
    assert forward >= 3
    assert names["products"].count("addmm") == 0
    assert names["nothing"].count(ATTENTION) == 1
    assert names["products"].count(ATTENTION) == 0
    assert names["products"].count("gelu") == names["nothing"].count("gelu")


def test_a_graph_may_be_used_twice_and_is_freed_with_all_that_was_saved():
    model = Views()
    region = Region(worth_saving)
    alive = weakref.ref(region)
    x = torch.randn(6, 8, requires_grad=True)
    value = total(recomputed(model, region, x))
    first = torch.autograd.grad(value, [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(value, [x, *model.parameters()])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    gc.disable()
    try:
        del region, value
        assert alive() is None
    finally:
        gc.enable()


def test_gradients_of_gradients():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    x = torch.randn(6, 8, requires_grad=True)

    def twice(call):
        first = torch.autograd.grad(total(call(x)).square(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(twice(lambda x: recomputed(model, Region(worth_saving), x)), twice(model))


def test_hooks_pack_what_the_policy_saves():
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor.clone()

    def unpack(held):
        unpacked.append(held.numel())
        return held

    region = Region(worth_saving, pack, unpack, trace=Trace(known=True))  # the first call is traced, and saves nothing
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    value = total(recomputed(model, region, torch.randn(6, 8)))
    assert packed == [96, 48]
    assert not unpacked
    value.backward()
    assert unpacked == [96]  # recomputation stops before it comes to the second product, which nothing needs
    assert len(region.used) == 1


def test_what_recomputation_does_not_read_is_not_saved_the_next_time():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    reads, saved, found = Reads(), [], []
    for _ in range(3):
        region = Region(worth_saving, reads=reads, trace=Trace(known=True))
        x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
        output = total(recomputed(model, region, x))
        saved.append(len(region.saved))
        output.backward()
        assert all(key not in region.saved for key in region.used), "what was returned is dropped"
        found.append(x.grad)
    assert saved == [2, 1, 1]
    assert torch.equal(found[0], found[1])
    # If the output of the last product is needed later on, the product is run again.
    x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
    model.append(nn.Tanh())
    total(recomputed(model, Region(worth_saving, reads=reads), x)).backward()
    want = x.grad.clone()
    x.grad = None
    total(model(x)).backward()
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_llama_layer_bit_by_bit(policy, autocast):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layers = nn.ModuleList([llama.LlamaDecoderLayer(config, k) for k in range(3)])
    rotary = llama.LlamaRotaryEmbedding(config)

    def call(how):
        layers.zero_grad()
        x = torch.linspace(-1, 1, 16 * 32).view(1, 16, 32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, angles = x, rotary(x, torch.arange(16)[None])
            for layer in layers:
                y = how(layer, y, position_embeddings=angles)
                y = y[0] if isinstance(y, tuple) else y
            total(y).backward()
        return [x.grad, *(p.grad.clone() for p in layers.parameters())]

    want, traces = call(lambda layer, *args, **more: layer(*args, **more)), {layer: Trace() for layer in layers}

    def again(layer, *args, **more):
        return recomputed(layer, Region(POLICIES[policy], trace=traces[layer]), *args, **more)

    for _ in range(3):
        for a, b in zip(call(again), want, strict=True):
            assert torch.equal(a, b)


def test_what_a_region_returns_may_be_edited_outside():
    """The last product is the output, and written to: it is run again instead of being taken from what was saved."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def call(how):
        model.zero_grad()
        x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
        y = how(x)
        y.mul_(2.0)
        total(y.sin()).backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters())]

    for policy in POLICIES.values():
        trace = Trace()
        for _ in range(3):
            found = call(lambda x, policy=policy, trace=trace: recomputed(model, Region(policy, trace=trace), x))
            for a, b in zip(found, call(model), strict=True):
                assert torch.equal(a, b)


def test_outputs_that_are_read_now_and_then_are_saved():
    reads = Reads()
    for used in (["one"], [], ["one"], []):
        reads.learn(["one", "two"], used)
        assert "one" in reads
        assert "two" not in reads


class Experts(nn.Module):
    """Two experts, whose tokens lie one behind the other; the products take bfloat16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))

    def forward(self, x):
        ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
        return x + F.gelu(F.grouped_mm(x, self.weight, offs=ends))


class Scaled(torch.autograd.Function):
    """A product in float8, as libraries write it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        one, kind = torch.ones((), device=x.device), torch.float8_e4m3fn
        return torch._scaled_mm(x.to(kind), weight.to(kind).t(), one, one, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Float8(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16))

    def forward(self, x):
        return x + F.gelu(Scaled.apply(x, self.weight))


@pytest.mark.parametrize(
    ("make", "name", "in_backward"), [(Experts, "_grouped_mm", 2), (Float8, "_scaled_mm", 0)], ids=["experts", "float8"]
)
def test_products_of_experts_and_in_float8_are_worth_saving(make, name, in_backward):
    torch.manual_seed(0)
    module, x = make(), torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), [x, module.weight])
    trace = Trace()
    for _ in range(2):  # the first call shows what is read
        region = Region(worth_saving, trace=trace)
        loss = recomputed(module, region, x).sum()
    assert [operator.overloadpacket.__name__ for operator, _ in region.ran] == [name]
    seen = Seen()
    with seen:
        found = torch.autograd.grad(loss, [x, module.weight])
    assert all(map(torch.equal, found, expected))
    assert seen.names.count(name) == in_backward, "of the backward alone: none runs again"
