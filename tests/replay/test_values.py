"""Saved tensors come back as the views that they were, of values that are made once."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recomputing import ROWS, WIDTH, Linear, Net, check, ways
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


class Strides(Linear):
    def forward(self, x):
        y = torch.tanh(super().forward(x))
        tall, part = y.mT, y[2:10:2, 1::3]
        return y + (Saved.apply(tall).mT.sin() + Saved.apply(part).sin().sum()) * Saved.apply(y.unfold(1, 8, 4)).sum()


class Expanded(Linear):
    def forward(self, x):
        row = torch.tanh(super().forward(x).mean(0, keepdim=True)).expand(len(x), -1)
        return x + Saved.apply(row).sin() * row.cos() * row[3:4].expand(len(x), -1)


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        image = x.view(4, 4, ROWS // 4, -1).to(memory_format=torch.channels_last)
        y = F.silu(self.two(torch.tanh(Saved.apply(self.one(image)))))
        return x + y.contiguous().view_as(x)


class OtherTypes(Linear):
    """A value whose bits are read as numbers of another type."""

    def forward(self, x):
        y = torch.tanh(super().forward(x))
        bits = (y.detach() * 1.0).view(torch.int32)
        kept = Saved.apply((bits & -65536).view(torch.float32) * 1.0 * y)
        return kept + (bits & 255).view(torch.uint8)[:, ::4] * y


class Complex(Linear):
    """Conjugate and negative bits, and parts of complex numbers."""

    def forward(self, x):
        y = torch.complex(torch.tanh(super().forward(x)), x.sin())
        conjugate = y.conj()
        negative = conjugate.imag
        assert conjugate.is_conj()
        assert negative.is_neg()
        return (conjugate * y * y.conj()).real + Saved.apply(negative).cos() + Saved.apply(conjugate).abs() * negative


class Inputs(Linear):
    """A view of the input, a reshaped one and the same storage twice."""

    def forward(self, x):
        one, two = x.chunk(2, -1)
        return super().forward(torch.cat([one.sin() * two, torch.tanh(two) * one], -1)) + Saved.apply(x[1:2]).exp()


class Empty(Linear):
    def forward(self, x):
        y = torch.sin(super().forward(x)) * 2.0
        nothing = y[:0].sin() * y[:0]
        return torch.cat([y.sin(), nothing]) + Saved.apply(y[:, :0].exp()).sum()


class Several(Linear):
    """Operators with several outputs, of which some are saved."""

    def forward(self, x):
        y = torch.tanh(super().forward(x))
        top, at = y.topk(4, -1)
        high, low = torch.aminmax(y, dim=-1, keepdim=True)
        q, r = torch.linalg.qr(y @ y.mT + 20 * torch.eye(len(y)))
        return y * top.sum() + y.gather(-1, at).exp().sum() + high * low + (q @ r.exp()).sum() * 1e-9


class Scalars(Linear):
    def forward(self, x):
        y = torch.tanh(super().forward(x))
        scale = y.square().mean().sqrt() + 1.0
        return y / scale * torch.exp(y - y.amax()) + scale * y.std(-1, keepdim=True)


class InPlace(Linear):
    """Operators that write to what another one has made: all of it, a part, in another type, and in another order."""

    def forward(self, x):
        y = super().forward(x).add_(x).relu_()
        part, mixed, turned = y.sin(), y.cos(), y.mT.clone()
        part[:, ::2].mul_(2.0)
        mixed.mul_(y.double())
        turned.addmm_(y.mT, y[:, : len(y)])
        return y * part.sin() + mixed.exp() + (Saved.apply(turned).sin() * y.mT).mT


class Turned(Linear):
    """Operators that give a tensor another shape or another memory, and write nothing."""

    def forward(self, x):
        y = torch.sin(super().forward(x))
        scale, turned = y.detach() * 2.0, y + 1.0
        scale.set_(torch.from_numpy(np.cos(y.detach().numpy())))
        turned.t_().unsqueeze_(0)
        short = (y.detach() + 1.0).resize_(len(x), 4)
        return (y * scale).sin() * turned[0].t().cos() + short.sum(-1, keepdim=True) * y


class Relu(Linear):
    """The end of a block of a ResNet."""

    def forward(self, x):
        y = super().forward(x)
        y += x
        return F.relu(y, inplace=True).sin().sin()


class EditedTwin(Linear):
    """Edits one of two equal values, which autograd has saved and does not need."""

    def forward(self, x):
        y = super().forward(x)
        one = y * 2.0
        sine = one.sin().detach()
        return x + sine + one.add_(1.0) + (y * 2.0).sin()


class AlmostTwins(Linear):
    """The same operator with arguments that compare equal and are not."""

    def forward(self, x):
        y = super().forward(x)
        return (
            x + (y * 0.0).atan2(y).sin() + (y * -0.0).atan2(y).sin() + torch.pow(y, 2).sin() + torch.pow(y, 2.0).sin()
        )


KINDS = [
    Chunks,
    Strides,
    Expanded,
    ChannelsLast,
    OtherTypes,
    Complex,
    Inputs,
    Empty,
    Several,
    Scalars,
    InPlace,
    Turned,
    Relu,
    EditedTwin,
    AlmostTwins,
]


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_views(kind, policy, fraction):
    check(lambda: Net(kind), policy=policy, fraction=fraction)


@pytest.mark.parametrize("kind", [Chunks, Strides, Expanded, ChannelsLast, Complex, Inputs, Empty, InPlace])
def test_saved_tensors_have_the_layout_of_the_forward(kind):
    def use(model: nn.Module) -> list[Tensor]:
        Saved.seen.clear()
        for k in range(4):
            model(torch.ones(ROWS, WIDTH) * k).sum().backward()
        layouts.append(list(Saved.seen))
        return [parameter.grad for parameter in model.parameters()]

    layouts: list[list[tuple[object, ...]]] = []
    check(lambda: Net(kind), use)
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
    check(lambda: Net(Relu), freed=0.5)


def test_nothing_is_dropped_that_is_smaller_than_min_bytes():
    check(Net, min_bytes=1 << 20, freed=0.0)


class Twins(Linear):
    """Makes a value three times, as autocast casts the input of three projections."""

    def forward(self, x):
        y = super().forward(x)
        return x + torch.exp(y) * torch.exp(y) * torch.exp(y)


def test_one_of_equal_values_is_kept_in_place_of_all():
    """What is saved of a block: its input, and three results of exp, of which one stays."""
    saves = [torch.ops.aten.exp.default, torch.ops.aten.addmm.default]
    check(lambda: Net(Twins), policy=saves, freed=0.4)
