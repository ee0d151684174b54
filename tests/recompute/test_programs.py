"""Programs whose groups are recomputed have the bits of the program without us."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composing import BLOCKS, WIDTH, Mlp, Net, batch, dropping, gradients
from recomputing import ANY, FIRST, Counted, check, counted, fractions, policies, simple
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Several uses of a graph


@policies
@fractions
def test_steps(policy, fraction):
    check(simple(counted()), policy, recomputed=FIRST + 3 * BLOCKS, fraction=fraction)


@policies
@fractions
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "reversed"])
def test_two_passes_in_flight(policy, fraction, order):
    def use(model):
        losses = [model(batch(k)).square().sum() for k in range(2)]
        for k in order:
            losses[k].backward()
            losses[k] = None
        return gradients(model)

    check(simple(counted(), use), policy, recomputed=FIRST + 2 * BLOCKS, fraction=fraction)


@policies
@fractions
def test_accumulated_gradients(policy, fraction):
    def use(model):
        for k in range(3):
            model(batch(k)).square().sum().backward()
        return gradients(model)

    check(simple(counted(), use), policy, recomputed=FIRST + 3 * BLOCKS, fraction=fraction)


@policies
@fractions
def test_a_retained_graph(policy, fraction):
    def use(model):
        loss = model(batch()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    check(simple(counted(), use), policy, recomputed=FIRST + 2 * BLOCKS, fraction=fraction)


@policies
@fractions
def test_gradients_of_gradients(policy, fraction):
    def use(model):
        x = batch().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return [*gradients(model), x.grad]

    program = simple(counted(Mlp), use)
    check(program, policy, recomputed=Counted.backward_calls or ANY, fraction=fraction)


@policies
def test_a_gradient_inside_of_a_group(policy):
    class Energy(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            energy = torch.tanh(self.up(x)).square().sum()
            (force,) = torch.autograd.grad(energy, self.up.weight, create_graph=True)
            return x + x @ force

    check(simple(counted(Energy)), policy, recomputed=ANY)


@policies
@fractions
def test_input_gradients_first_and_weight_gradients_later(policy, fraction):
    def use(model):
        x = batch().requires_grad_()
        loss = model(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.autograd.backward(loss, inputs=list(model.parameters()))
        return [gradient, *gradients(model)]

    check(simple(counted(), use), policy, recomputed=FIRST + 2 * BLOCKS, fraction=fraction)


@policies
@fractions
def test_zero_bubble_backwards(policy, fraction):
    backward = pytest.importorskip("torch.distributed.pipelining._backward")

    def use(model):
        x = batch().requires_grad_()
        y = model(x)
        loss = [y.square().sum()]
        weights = [w for w in model.parameters() if w.requires_grad]
        found, groups = backward.stage_backward_input(loss, None, [x], iter(weights))
        backward.stage_backward_weight(iter(weights), groups)
        return [*(g for g in found if g is not None), *gradients(model)]

    check(simple(counted(Mlp), use), policy, recomputed=ANY, fraction=fraction)


# Random state and autocast


@policies
def test_a_generator_of_the_program(policy):
    class Noisy(Mlp):
        generator: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(x.shape, generator=Noisy.generator) * x

    def make():
        Noisy.generator = torch.Generator().manual_seed(5)
        return counted(Noisy)()

    handle = check(simple(make), policy, recomputed=0)
    assert "a generator of the program: blocks.0 ... 5" in handle.plan.because


@policies
def test_noise_that_autograd_saves_before_it_is_drawn(policy):
    """The gradient of `torch.utils.checkpoint` is wrong where RReLU is the last operator of a region."""

    def make():
        class Noisy(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return F.rrelu(super().forward(x), training=True)

        return Noisy(WIDTH, WIDTH)

    handle = check(simple(counted(make)), policy, recomputed=0, fraction=0.0)
    assert "noise of torch.nn.RReLU" in handle.plan.because


@policies
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "cache"])
def test_autocast(policy, inside, cache):
    class Twice(Net):
        """Calls each block twice, so that the second call finds the cast weights of the first one."""

        def call(self, block, x):
            return block(block(x))

    def use(model):
        found = []
        for k in range(2):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                loss = model(batch(k)).float().square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            found += gradients(model)
        return found

    program = simple(lambda: Twice(lambda: Counted(dropping())), use)
    check(program, policy, recomputed=2 * BLOCKS - 1 + 2 * 2 * BLOCKS)


@policies
def test_autocast_inside_of_a_group(policy):
    class Cast(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return y.float() + super().forward(x)

    check(simple(counted(Cast)), policy, recomputed=FIRST + 3 * BLOCKS)


@policies
@pytest.mark.parametrize("backward_inside", [False, True])
def test_attention_backends_of_the_forward(policy, backward_inside):
    """Recomputation runs the kernels of the forward, whichever backends are enabled in backward."""

    def use(model):
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(batch()).square().sum()
        with sdpa_kernel(SDPBackend.MATH) if backward_inside else nullcontext():
            loss.backward()
        return gradients(model)

    check(simple(counted(), use), policy, recomputed=FIRST + BLOCKS)


# Arguments and outputs


class Containers(nn.Module):
    """Takes and returns nested containers, and changes the lists that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Mlp(), Mlp()

    def forward(self, x: Tensor, skips: list[Tensor], *, more: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        y = self.one(x) + skips.pop() * scale
        z = self.two(y * more["inner"][0])
        more["seen"].append(z)
        return {"x": z, "none": None, "text": "a", "sizes": [y.shape[0], (y.sum(),)]}


@policies
@fractions
def test_containers_keywords_and_outputs_that_are_no_tensors(policy, fraction):
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, total = self.inp(x), 0.0
            more = {"inner": (x.sin(),), "seen": []}
            skips = [x.cos() * k for k in range(len(self.blocks))]
            for block in self.blocks:
                out = block(x, skips, more=more, scale=0.5)
                assert out["none"] is None
                assert out["text"] == "a"
                x, total = out["x"], total + out["sizes"][1][0] * out["sizes"][0]
            assert not skips
            assert len(more["seen"]) == len(self.blocks)
            return self.head(x) + total * 1e-3 + more["seen"][2]

    check(
        simple(lambda: Model(lambda: Counted(Containers()))), policy, recomputed=FIRST + 3 * BLOCKS, fraction=fraction
    )


def test_dropout_of_a_group_that_is_called_with_keywords_alone():
    class Keywords(Net):
        def call(self, block, x):
            return block(x=x)

    check(simple(lambda: Keywords(lambda: Counted(dropping()))), recomputed=FIRST + 3 * BLOCKS)


def test_arguments_made_in_inference_mode():
    class Masked(Mlp):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            with torch.no_grad():
                rows = mask.sum().item()
            return super().forward(x) * rows

    class Model(Net):
        def call(self, block, x):
            with torch.inference_mode():
                mask = torch.ones(3)
            return block(x, mask)

    check(simple(lambda: Model(lambda: Counted(Masked()))), recomputed=FIRST + 3 * BLOCKS)
