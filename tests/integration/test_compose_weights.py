"""Offload beside what people do with weights: frozen, low-rank, tied, computed, replaced for one call."""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from composing import (
    BLOCKS,
    OFFLOADED,
    STEPS,
    STREAM,
    WIDTH,
    Mlp,
    Net,
    Offload,
    autocast,
    batch,
    both,
    each_step,
    gradients,
    train,
    training,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrizations

from actoffload.report import Reason


class Lora(nn.Module):
    """A frozen linear beside two small ones that are trained."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(self.dropout(x)))


def adapted() -> Net:
    model = Net().requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Lora(getattr(block, name)))
    return model


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("around", [contextlib.nullcontext, autocast])
def test_lora_on_frozen_weights(around):
    """No frozen weight is offloaded; `both` checks each copy."""

    statistics = both(training(adapted, partial(train, around=around))).statistics()
    if around is contextlib.nullcontext:
        # Nothing before the first block's attention needs a gradient; from there on each linear saves its weight.
        assert statistics.bytes_kept[Reason.PARAMETER] > STEPS * (BLOCKS - 1) * 8 * WIDTH * WIDTH * 4
    assert statistics.bytes_offloaded > STEPS * OFFLOADED * STREAM


def test_what_a_frozen_layer_does_not_save_is_not_offloaded():
    """A frozen linear needs its weight for backward and not its input: there is less to offload, and no more copied."""

    def make(learns: bool) -> Net:
        model = Net(partial(nn.Linear, WIDTH, WIDTH))
        model.blocks.requires_grad_(learns)
        return model

    assert both(training(partial(make, True))).statistics().bytes_offloaded == STEPS * OFFLOADED * STREAM
    assert both(training(partial(make, False)), offloads=False).statistics().bytes_offloaded == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("what", ["weights", "blocks"])
def test_tied_weights_and_blocks_that_run_twice(what):
    def make() -> Net:
        model = Net()
        if what == "weights":
            model.head.weight = model.inp.weight
            model.blocks[3].up.weight = model.blocks[0].up.weight
        else:
            model.blocks[3] = model.blocks[0]
        return model

    both(training(make))


# Weights that are computed


COMPUTED: dict[str, Callable[..., nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("how", COMPUTED)
def test_parametrizations(how):
    """The originals are kept; the weight that is computed in a block belongs to its activations."""

    def program(offload: Offload) -> list[Tensor]:
        model = Net()
        for block in model.blocks:
            for linear in (block.qkv, block.up):
                COMPUTED[how](linear)
        offload(model)
        return train(model)

    plain, statistics = both(training(Net)).statistics(), both(program).statistics()
    computed = STEPS * OFFLOADED * (3 + 2) * WIDTH * WIDTH * 4
    assert statistics.bytes_offloaded >= plain.bytes_offloaded + computed


# Weights for one call


@pytest.mark.parametrize("kind", ["leaves", "computed"])
def test_functional_call(kind):
    """Weights that are passed for one call are kept like those of the module, unless other operations made them."""

    def loop(model: Net) -> list[Tensor]:
        results = []
        for k in range(STEPS):
            scale = torch.full((), 0.9 + 0.1 * k, requires_grad=True)
            weights = {name: parameter * scale for name, parameter in model.named_parameters()}
            if kind == "leaves":
                weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            y = functional_call(model, weights, (batch(k).requires_grad_(),)).square().sum()
            needed = [*weights.values()] if kind == "leaves" else [scale]
            results += [y.detach(), *torch.autograd.grad(y, needed)]
            del y, weights
        return results

    statistics = both(training(Net, loop), watch=kind != "computed").statistics()
    assert kind == "computed" or statistics.bytes_kept[Reason.LEAF] > STEPS * 4 * WIDTH * WIDTH
    assert statistics.passes == STEPS


def test_transforms_of_functions_offload_nothing_and_warn():
    def program(offload: Offload) -> list[Tensor]:
        model = Net(Mlp)
        handle = offload(model)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        slopes = torch.func.grad(lambda weights: functional_call(model, weights, (batch(),)).square().sum())(weights)
        assert handle is None or handle.statistics().passes == 0
        return [*slopes.values(), *train(model)]

    with pytest.warns(UserWarning, match=r"Nothing is offloaded .*torch\.func\.grad.*functional_call with"):
        assert both(program).statistics().passes == STEPS


def test_vmap_over_the_model():
    def loss(model: Net, k: int) -> Tensor:
        return torch.vmap(model)(torch.stack([batch(k), batch(k + 1)])).square().sum()

    statistics = both(training(lambda: Net(Mlp), each_step(loss))).statistics()
    assert statistics.bytes_offloaded == statistics.bytes_reloaded
    assert statistics.bytes_offloaded >= STEPS * OFFLOADED * 2 * 2 * STREAM


@pytest.mark.usefixtures("way")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own use
@pytest.mark.parametrize("how", ["dual numbers", "torch.func.jvp"])
def test_forward_mode(how):
    """A directional derivative in forward mode, and the gradient of it."""

    def loop(model: Net) -> list[Tensor]:
        results = []
        for k in range(STEPS):
            if how == "dual numbers":
                with forward_ad.dual_level():
                    y, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(batch(k), batch(k + 1))))
            else:
                y, slope = torch.func.jvp(model, (batch(k),), (batch(k + 1),))
            (y + slope).square().sum().backward()
            results += [y.detach(), slope.detach(), *gradients(model)]
            del y, slope
        return results + train(model)

    if how == "dual numbers":
        assert both(training(lambda: Net(Mlp), loop)).statistics().passes == 2 * STEPS
    else:
        with pytest.warns(UserWarning, match=r"torch\.func\.grad, jvp and other transforms"):
            assert both(training(lambda: Net(Mlp), loop)).statistics().passes == STEPS
