"""Saved tensors come back as the views that they were, of values that are made once."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recomputing import ROWS, WIDTH, Applies, Net, check, ways
from torch import Tensor, nn

from actoffload.replay import proof


class Saved(torch.autograd.Function):
    """Saves its input, and shows in backward how it came back."""

    seen: list[tuple[object, ...]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        Saved.seen.append((x.size(), x.stride(), x.dtype, x.is_conj(), x.is_neg()))
        return gradient * (x.real if x.is_complex() else x).to(gradient.dtype)


class Chunks(nn.Linear):
    """Several saved views of one storage."""

    def __init__(self):
        super().__init__(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = torch.tanh(super().forward(x)).chunk(3, -1)
        return x + q.sin() * k.cos() + Saved.apply(v) * v.exp()


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        image = x.view(4, 4, ROWS // 4, -1).to(memory_format=torch.channels_last)
        y = F.silu(self.two(torch.tanh(Saved.apply(self.one(image)))))
        return x + y.contiguous().view_as(x)


# Of the input of a block, and of the output of its linear or the hyperbolic tangent of that


def strides(block, x, y):
    tall, part = y.mT, y[2:10:2, 1::3]
    return y + (Saved.apply(tall).mT.sin() + Saved.apply(part).sin().sum()) * Saved.apply(y.unfold(1, 8, 4)).sum()


def expanded(block, x, y):
    row = y.mean(0, keepdim=True).tanh().expand(len(x), -1)
    return x + Saved.apply(row).sin() * row.cos() * row[3:4].expand(len(x), -1)


def other_types(block, x, y):
    """A value whose bits are read as numbers of another type."""
    bits = (y.detach() * 1.0).view(torch.int32)
    kept = Saved.apply((bits & -65536).view(torch.float32) * 1.0 * y)
    return kept + (bits & 255).view(torch.uint8)[:, ::4] * y


def conjugates(block, x, y):
    """Conjugate and negative bits, and parts of complex numbers."""
    y = torch.complex(y, x.sin())
    conjugate = y.conj()
    negative = conjugate.imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    return (conjugate * y * y.conj()).real + Saved.apply(negative).cos() + Saved.apply(conjugate).abs() * negative


def inputs(block, x, y):
    """A view of the input, and the same storage twice."""
    one, two = x.chunk(2, -1)
    return y * torch.cat([one.sin() * two, torch.tanh(two) * one], -1) + Saved.apply(x[1:2]).exp()


def empty(block, x, y):
    nothing = y[:0].sin() * y[:0]
    return torch.cat([y.sin(), nothing]) + Saved.apply(y[:, :0].exp()).sum()


def several(block, x, y):
    """Operators with several outputs, of which some are saved."""
    top, at = y.topk(4, -1)
    high, low = torch.aminmax(y, dim=-1, keepdim=True)
    q, r = torch.linalg.qr(y @ y.mT + 20 * torch.eye(len(y)))
    return y * top.sum() + y.gather(-1, at).exp().sum() + high * low + (q @ r.exp()).sum() * 1e-9


def scalars(block, x, y):
    scale = y.square().mean().sqrt() + 1.0
    return y / scale * torch.exp(y - y.amax()) + scale * y.std(-1, keepdim=True)


def turned(block, x, y):
    """Operators that give a tensor another shape or another memory, and write nothing."""
    scale, row = y.detach() * 2.0, y + 1.0
    scale.set_(torch.from_numpy(np.cos(y.detach().numpy())))
    row.t_().unsqueeze_(0)
    short = (y.detach() + 1.0).resize_(len(x), 4)
    return (y * scale).sin() * row[0].t().cos() + short.sum(-1, keepdim=True) * y


def in_place(block, x, y):
    """Operators that write to what another one has made: all of it, a part, in another type, and in another order."""
    y = y.add_(x).relu_()
    part, mixed, other = y.sin(), y.cos(), y.mT.clone()
    part[:, ::2].mul_(2.0)
    mixed.mul_(y.double())
    other.addmm_(y.mT, y[:, : len(y)])
    return y * part.sin() + mixed.exp() + (Saved.apply(other).sin() * y.mT).mT


def relu(block, x, y):
    """The end of a block of a ResNet."""
    y += x
    return F.relu(y, inplace=True).sin().sin()


def edited_twin(block, x, y):
    """Edit one of two equal values, which autograd has saved and does not need."""
    one = y * 2.0
    sine = one.sin().detach()
    return x + sine + one.add_(1.0) + (y * 2.0).sin() + (y * 3.0).sin()


def almost_twins(block, x, y):
    """The same operator with arguments that compare equal and are not."""
    zeros = (y * 0.0).atan2(y).sin() + (y * -0.0).atan2(y).sin()
    return x + zeros + torch.pow(y, 2).sin() + torch.pow(y, 2.0).sin()


def unchanged(y):
    return y


OF_TANH = [strides, other_types, conjugates, inputs, empty, several, scalars, turned]
KINDS = {
    **{each.__name__: partial(Applies, each, torch.tanh) for each in OF_TANH},
    **{each.__name__: partial(Applies, each, unchanged) for each in (expanded, in_place, relu)},
    **{each.__name__: partial(Applies, each, unchanged) for each in (edited_twin, almost_twins)},
    "chunks": Chunks,
    "channels_last": ChannelsLast,
}


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_views(kind, policy, fraction):
    check(lambda: Net(KINDS[kind]), policy=policy, fraction=fraction)


SAVE = ["chunks", "strides", "expanded", "channels_last", "conjugates", "inputs", "empty", "in_place"]


@pytest.mark.parametrize("kind", SAVE)
def test_saved_tensors_have_the_layout_of_the_forward(kind):
    def use(model: nn.Module) -> list[Tensor]:
        Saved.seen.clear()
        for k in range(4):
            model(torch.ones(ROWS, WIDTH) * k).sum().backward()
        layouts.append(list(Saved.seen))
        return [parameter.grad for parameter in model.parameters()]

    layouts: list[list[tuple[object, ...]]] = []
    check(lambda: Net(KINDS[kind]), use)
    assert layouts[0] == layouts[1] != []


@pytest.mark.parametrize("size", [(3, 11), (1, 40, 2), (5,), (), (0, 4)], ids=str)
def test_large_values_are_compared_in_parts(monkeypatch, size):
    monkeypatch.setattr(proof, "COMPARED", 8)
    one = torch.rand(size)
    assert proof.same_bits(one, one.clone())
    assert proof.same_bits(one.mT if one.dim() > 1 else one, (one.mT if one.dim() > 1 else one).clone())
    for k in range(one.numel()):
        other = one.clone()
        other.flatten()[k] += 1.0
        assert not proof.same_bits(one, other)


def test_what_is_written_in_place_is_made_again():
    check(lambda: Net(KINDS["relu"]), freed=0.5)


def test_nothing_is_dropped_that_is_smaller_than_min_bytes():
    check(Net, min_bytes=1 << 20, freed=0.0)


def test_one_of_equal_values_is_kept_in_place_of_all():
    """What is saved of a block: its input, and three results of exp, of which one stays."""
    saves = [torch.ops.aten.exp.default, torch.ops.aten.addmm.default]
    three = partial(Applies, lambda block, x, y: x + y.exp() * y.exp() * y.exp(), unchanged)
    check(lambda: Net(three), policy=saves, freed=0.4)
