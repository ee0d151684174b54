"""What is never replayed stays: replay of it would be wrong."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composing import each_step
from recomputing import COSTLY, ROWS, WIDTH, Applies, Linear, Net, batch, bytes_after_forward, check, clean, train, ways
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from whole_model import equal, offload

from actoffload.device import ReferenceDevice


def dropout(block, x, y):
    y = F.dropout(y, 0.5)
    return x + F.dropout(y.sin(), 0.2) * F.alpha_dropout(y, 0.1, training=True).exp()


def noise(block, x, y):
    """Random operators with outputs that only others read, and in place."""
    y = y + torch.rand_like(y) + torch.randn(y.shape).mul(0.1) + torch.empty_like(y).uniform_()
    y = y.sin() * torch.bernoulli(torch.sigmoid(y.detach())) + torch.randperm(len(y))[:, None]
    return (y + torch.normal(torch.zeros_like(y), 1.0)).sin() * torch.randint(0, 3, y.shape)


def own_generator(block, x, y):
    generator = vars(block).setdefault("generator", torch.Generator().manual_seed(3))
    return (y + torch.rand(x.shape, generator=generator)).sin().sin()


def attention(block, x, y):
    """Attention with dropout, whose mask nothing saves."""
    y = y.view(1, 4, -1, 8)
    return x + F.scaled_dot_product_attention(y, y, y.sin(), dropout_p=0.3).reshape(x.shape).sin()


@torch.library.custom_op("actoffload_replay_tests::noise", mutates_args=())
def untagged(x: Tensor) -> Tensor:
    """Return random numbers, which the operator's tags do not say."""
    return torch.rand_like(x)


def foreign_noise(block, x, y):
    return (y + untagged(x.detach())).sin().sin()


def factory(block, x, y):
    """Memory that a kernel fills that no operator shows."""
    for rows in (torch.empty(len(x), WIDTH), torch.zeros(len(x), WIDTH), torch.empty_like(y)):
        rows.detach().numpy()[:] = np.cos(x.detach().numpy())
        y = (y + rows).sin() * rows
    return y


def unseen(block, x, y):
    """Write to the result of an operator."""
    y.detach().numpy()[:] *= 1.5
    z = y + 1.0
    z.detach().numpy()[::2] += 1.0
    return (z * 2.0).sin() + y.detach().sin() * z.cos()


def out(block, x, y):
    """Outputs that an operator is given."""
    with torch.no_grad():
        scale = torch.empty(len(x), WIDTH)
        torch.exp(y, out=scale)
    return (y * scale).sin() * scale


def foreach(block, x, y):
    scales = [torch.ones(WIDTH), torch.ones(len(x), 1)]
    torch._foreach_mul_(scales, 1.5)
    return (y * scales[0] + scales[1]).sin() * torch._foreach_exp([y, x])[0]


def indexed(block, x, y):
    """Operators that add in any order on a GPU."""
    at = torch.arange(len(x)).flip(0) // 2
    one = torch.zeros_like(y).index_add(0, at, y.sin())
    two = torch.zeros_like(y).scatter_add(0, at[:, None].expand(-1, WIDTH), y.exp())
    three = torch.zeros_like(y).index_put((at,), y.cos(), accumulate=True)
    return (one + two).sin() * three.exp() + y.cumsum(0).sin()


def no_grad(block, x, y):
    """What runs without gradients may be edited before backward."""
    with torch.no_grad():
        scale = F.linear(y, block.weight).exp()
        kept = scale * 2.0
        scale.mul_(0.5)
    return (y * scale).sin() * kept


def without_dispatch(block, x, y):
    scale = torch.from_numpy(np.exp(y.detach().numpy()))
    return (y * scale).sin() * torch.tensor(y.detach().numpy().tolist()).exp()


def hidden(block, x, y):
    """Tensors in attributes that are no buffers, replaced and edited in each call."""
    block.mean = 0.9 * vars(block).setdefault("mean", torch.zeros(WIDTH)) + 0.1 * y.detach().mean(0)
    seen = vars(block).setdefault("seen", {"last": torch.ones(WIDTH)})
    z = (y - block.mean).sin() * (seen["last"] + y)
    seen["last"].mul_(0.9).add_(block.mean)
    return z.sin() + y * seen["last"].clone()


class Logged(Tensor):
    """A tensor subclass that does its own thing with each function."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def subclass(block, x, y):
    return torch.cos(y.as_subclass(Logged).exp().sin()).as_subclass(Tensor).sin()


def nested(block, x, y):
    """Nested tensors, whose sizes follow the data."""
    ragged = torch.nested.nested_tensor_from_jagged(y, torch.tensor([0, 3, len(x)]))
    return (ragged.sin() * ragged).values().sin()


KINDS = [dropout, noise, own_generator, attention, foreign_noise, factory, unseen, out, foreach]
KINDS += [indexed, no_grad, without_dispatch, hidden, nested, subclass]


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_what_would_be_wrong_stays(kind, policy, fraction):
    check(lambda: Net(partial(Applies, kind)), policy=policy, fraction=fraction, freed=-1.0)


@pytest.mark.parametrize("kind", [dropout, noise, factory, indexed, no_grad])
def test_the_rest_of_the_group_is_replayed(kind):
    check(lambda: Net(partial(Applies, kind)))


# What the program replaces or edits outside of the group


@ways
@pytest.mark.parametrize("between", [False, True], ids=["each step", "before backward"])
def test_tensors_of_the_program_that_are_replaced(policy, fraction, between):
    """A block reads two, one of which autograd saves."""
    outside: dict[str, Tensor] = {}

    def scaled(block, x, y):
        return (y * outside["scale"]).sin() + (y + outside["shift"]).sin().exp()

    def loss(model, k):
        outside.update(scale=batch(k), shift=batch(k + 1))
        y = model(batch(k))
        if between:
            outside.update(scale=batch(7), shift=batch(8))
        return y.square().sum()

    check(lambda: Net(partial(Applies, scaled)), each_step(loss, 5), policy=policy, fraction=fraction)


# Scripted and compiled code


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.linear = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())), Linear()

    def forward(self, x):
        return torch.sin(self.linear(torch.sin(self.part(x))))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@ways
def test_groups_with_scripted_code_run_again_as_a_whole(policy, fraction):
    with torch.jit.optimized_execution(False):  # which has other bits after some calls
        check(lambda: Net(Scripted), policy=policy, fraction=fraction, freed=0.5)


class Flexible(Linear):
    """Attention whose scores have a bias that is trained, and computed."""

    def __init__(self):
        super().__init__()
        self.bias_of_heads = nn.Parameter(torch.randn(4, ROWS))

    def forward(self, x):
        y = torch.sin(super().forward(x)).view(1, -1, 4, 8).transpose(1, 2)
        bias = self.bias_of_heads * 1.5
        y = flex_attention(
            y, y.cos(), y.exp(), score_mod=lambda score, b, h, q, k: score + bias[h, k] * self.weight[h, k]
        )
        return torch.tanh(y.transpose(1, 2).reshape(x.shape)).sin()


@pytest.mark.filterwarnings("ignore")
def test_a_higher_order_operator(monkeypatch):
    # It has no backward on the CPU; its eager implementation has one.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(Flexible)
    want = train(model)
    for policy, fraction in ((True, 0.0), (COSTLY, 1.0)):
        with offload(model, layers="blocks.?", recompute=policy, fraction=fraction):
            equal(train(model), want)
            clean()


class Reversible(nn.Module):
    """Frees the memory of its input, and makes that again in backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, linear):
            with torch.no_grad():
                one, two = x.chunk(2, -1)
                y = torch.cat([one, two + linear(one).tanh()], -1)
            ctx.linear, ctx.nbytes = linear, x.untyped_storage().nbytes()
            x = x.detach()
            x.untyped_storage().resize_(0)
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            x.untyped_storage().resize_(ctx.nbytes)
            one, two = y.chunk(2, -1)
            with torch.enable_grad():
                leaf = one.detach().requires_grad_()
                change = ctx.linear(leaf).tanh()
            torch.autograd.backward(change, grad[:, WIDTH // 2 :])
            with torch.no_grad():
                x.copy_(torch.cat([one, two - change], -1))
            return grad + torch.cat([leaf.grad, torch.zeros_like(leaf)], -1), None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x):
        return torch.sin(self.Function.apply(x * 1.0, self.linear)).exp()


@ways
def test_memory_that_the_program_frees_and_fills(policy, fraction):
    check(lambda: Net(Reversible), policy=policy, fraction=fraction, freed=-1.0)


@pytest.mark.parametrize("aside", [False, True])
def test_what_is_saved_on_another_stream_stays(aside):
    """Its backward runs on that stream, where nothing waits for what replay has made on the stream of the call."""
    device = ReferenceDevice()
    main, side = device.current_stream(torch.device("cpu")), device.new_stream(torch.device("cpu"))

    def branches(block, x, y):
        with device.on(side if aside else main):
            z = y * block.weight[0]
        return x + z + y.cos()

    model = Net(partial(Applies, branches))
    offload(model, device=device, layers="blocks.?", recompute=True, fraction=0.0)
    train(model)
    dropped = bytes_after_forward(Net(partial(Applies, branches))) - bytes_after_forward(model)
    assert dropped == 4 * ROWS * WIDTH * 4 * (1 if aside else 2), "the argument of the sine, and its result"
