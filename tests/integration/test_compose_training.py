"""Offload in training loops: mixed precision, accumulation, optimizers, several backwards, and several at once."""

from functools import partial

import helpers
import pytest
import torch
from composing import (
    OFFLOADED,
    STEPS,
    STREAM,
    WIDTH,
    Mlp,
    Net,
    autocast,
    batch,
    both,
    checkpointing,
    copies,
    dropping,
    each_step,
    gradients,
    stepping_in_backward,
    train,
    training,
)
from test_compose_weights import adapted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload.report import Reason

# Mixed precision


half = training(lambda: Net(dropping), partial(train, around=autocast))


@pytest.mark.usefixtures("place")
def test_autocast():
    """Activations are offloaded in the type in which they are saved."""
    statistics, exact = both(half).statistics(), both(training(lambda: Net(dropping))).statistics()
    assert 0.5 * exact.bytes_offloaded < statistics.bytes_offloaded < exact.bytes_offloaded
    assert statistics.bytes_reloaded == statistics.bytes_offloaded


def test_casts_of_weights_are_kept():
    """Autocast holds them until its region ends: a copy would free nothing."""
    weights = sum(linear.weight.numel() * 2 for linear in Net().modules() if isinstance(linear, nn.Linear))
    # The first linear of all needs no weight for its backward: the data needs no gradient.
    assert both(half).statistics().bytes_kept[Reason.PARAMETER] >= STEPS * (weights - WIDTH * WIDTH * 2)


@pytest.mark.usefixtures("place", "way")
@pytest.mark.parametrize("overflow", [False, True])
def test_gradient_scaler(overflow):
    """Scaling, unscaling, clipping; a step that overflows is skipped and the scale falls, as without offload."""

    def loop(model: Net) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(helpers.PLACE.type, init_scale=2.0**10, growth_interval=2)
        scales = []
        for k in range(4):
            with autocast():
                loss = model(batch(k)).float().square().mean()
            if overflow and k == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            del loss
        return [torch.tensor(scales), *copies(model)]

    assert both(training(lambda: Net(dropping), loop)).statistics().passes == 4


# Loops


@pytest.mark.usefixtures("place", "way")
def test_accumulation_in_the_usual_loop_with_validation_between():
    def loop(model: Net) -> list[Tensor]:
        optimizer, results = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for k in range(6):
            loss = model(batch(k)).square().mean() / 2
            model.eval()
            with torch.no_grad():  # between a forward and its backward, where it hurts most
                results.append(model(batch(9)))
            model.train()
            loss.backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
            del loss
        return results + copies(model)

    statistics = both(training(lambda: Net(dropping), loop)).statistics()
    assert statistics.passes == 6


@pytest.mark.usefixtures("place", "way")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), "together"])
def test_several_forwards_before_their_backwards(order):
    def loop(model: Net) -> list[Tensor]:
        losses = [model(batch(k)).square().sum() for k in range(3)]
        if order == "together":
            sum(losses).backward()
        else:
            for k in order:
                losses[k].backward()
        return gradients(model)

    statistics = both(training(lambda: Net(dropping), loop)).statistics()
    assert statistics.passes == 3
    assert statistics.bytes_reloaded == statistics.bytes_offloaded


def stepping(model: Net) -> list[Tensor]:
    """Give each parameter an optimizer of its own, which steps as soon as the gradient is there, and frees it."""
    stepping_in_backward(model)
    losses = []
    for k in range(STEPS):
        loss = model(batch(k)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        del loss
    assert all(parameter.grad is None for parameter in model.parameters())
    return losses + copies(model)


@pytest.mark.usefixtures("place", "way")
def test_steps_inside_of_backward():
    both(training(Net, stepping))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_checkpointing_and_steps_inside_of_backward(reentrant, lora):
    """A region is recomputed with the weights of its forward: those after it have changed, its own have not."""

    def make() -> Net:
        model = adapted() if lora else Net(dropping)
        model.inp.requires_grad_(True)  # the reentrant variant needs an input that requires a gradient
        return checkpointing(model, use_reentrant=reentrant)

    statistics = both(training(make, stepping)).statistics()
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == STEPS * OFFLOADED * STREAM


# Several backwards


@pytest.mark.usefixtures("place", "way")
def test_a_gradient_penalty():
    """With a gradient with respect to the input, with a graph of its own, and the gradient of that."""

    def loss(model: Net, k: int) -> Tensor:
        x = batch(k).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().sum() + y.square().sum()

    statistics = both(training(lambda: Net(Mlp), each_step(loss))).statistics()
    assert statistics.passes == STEPS
    assert statistics.bytes_reloaded >= 2 * statistics.bytes_offloaded


@pytest.mark.parametrize("how", ["by keyword", "in a list"])
def test_a_tensor_that_checkpointing_itself_refers_to_is_kept(how):
    """Only tensors among the positional arguments of a region are saved by autograd; the guide says so."""

    class Held(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            if how == "in a list":
                return checkpoint(lambda several: block(several[0]), [x], use_reentrant=False)
            return checkpoint(lambda hidden: block(hidden), hidden=x, use_reentrant=False)

    assert both(training(lambda: Held(dropping)), offloads=False).statistics().bytes_offloaded == 0
