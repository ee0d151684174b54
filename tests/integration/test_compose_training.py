"""Offload in training loops: mixed precision, accumulation, optimizers, several backwards, and several at once."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import helpers
import pytest
import torch
import torch.nn.functional as F
from composing import (
    OFFLOADED,
    ROWS,
    STEPS,
    STREAM,
    WIDTH,
    Mlp,
    Net,
    Offload,
    autocast,
    batch,
    both,
    checkpointing,
    copies,
    dropping,
    gradients,
    stepping_in_backward,
    train,
    training,
)
from test_compose_weights import adapted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload.moe import GroupedMLP, indices_to_multihot
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


@pytest.mark.usefixtures("place", "way")
def test_steps_inside_of_backward():
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is there, and frees it."""

    def loop(model: Net) -> list[Tensor]:
        stepping_in_backward(model)
        results = list(losses(model))
        assert all(parameter.grad is None for parameter in model.parameters())
        return results + copies(model)

    both(training(Net, loop))


@pytest.mark.usefixtures("way")
def test_a_weight_changed_before_its_backward_raises_as_without():
    def loop(model: Net) -> list[Tensor]:
        weight = model.blocks[0].out.weight

        @torch.no_grad()
        def change(*_: object) -> None:
            weight.add_(1.0)

        model.blocks[2].register_full_backward_hook(change)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch()).square().sum().backward()
        return copies(model)

    both(training(Net, loop))


# Several backwards


@pytest.mark.usefixtures("place", "way")
def test_a_retained_graph():
    times = 3

    def loop(model: Net) -> list[Tensor]:
        loss = model(batch()).square().sum()
        for k in range(times):
            loss.backward(retain_graph=k + 1 < times)
        return gradients(model)

    statistics = both(training(lambda: Net(dropping), loop)).statistics()
    assert statistics.bytes_reloaded == times * statistics.bytes_offloaded


def penalized(model: Net) -> list[Tensor]:
    """Run steps with a gradient with respect to the input, with a graph of its own, and the gradient of that."""
    results = []
    for k in range(STEPS):
        x = batch(k).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (slope.square().sum() + y.square().sum()).backward()
        results += [x.grad, *gradients(model)]
        del x, y, slope
    return results


@pytest.mark.usefixtures("place", "way")
def test_a_gradient_penalty():
    statistics = both(training(lambda: Net(Mlp), penalized)).statistics()
    assert statistics.passes == STEPS
    assert statistics.bytes_reloaded >= 2 * statistics.bytes_offloaded


def test_a_gradient_penalty_through_checkpointed_regions():
    statistics = both(training(lambda: checkpointing(Net(Mlp), use_reentrant=False), penalized)).statistics()
    assert statistics.bytes_reloaded == 2 * statistics.bytes_offloaded == 2 * STEPS * OFFLOADED * STREAM


class Forces(Mlp):
    """A block that returns forces: what its own backward saves belongs to it too."""

    def forward(self, x: Tensor) -> Tensor:
        energy = super().forward(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + 1e-2 * force


@pytest.mark.usefixtures("place", "way")
def test_a_gradient_inside_of_the_forward():
    statistics = both(training(lambda: Net(Forces))).statistics()
    assert statistics.passes == STEPS
    assert statistics.bytes_reloaded == statistics.bytes_offloaded


@pytest.mark.usefixtures("way")
def test_a_second_loss_on_the_middle_of_the_model():
    class Middle(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for k, block in enumerate(self.blocks):
                x = block(x)
                if k == 2:
                    self.middle = F.softmax(x, dim=-1).square().sum()
            return self.head(x)

    def loop(model: Net) -> list[Tensor]:
        y = model(batch())
        model.middle.backward(retain_graph=True)
        del model.middle
        y.square().sum().backward()
        return gradients(model)

    both(training(Middle, loop), in_time=False)


# Together


variants = pytest.mark.parametrize("reentrant", [False, True])


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def compiling(model: Net, whole: bool = False) -> Callable[[Tensor], Tensor]:
    """Compile each block, or the whole model."""
    torch._dynamo.reset()
    if whole:
        return torch.compile(model, backend="aot_eager")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def losses(run: Callable[[Tensor], Tensor], half: bool = False, steps: int = STEPS) -> Iterator[Tensor]:
    """Run steps, a backward each; yield each loss when its backward is done."""
    for k in range(steps):
        with autocast() if half else contextlib.nullcontext():
            y = run(batch(k))
        loss = y.float().square().mean()
        del y
        loss.backward()
        yield loss.detach()
        del loss


@variants
@pytest.mark.parametrize("lora", [False, True])
def test_checkpointing_and_steps_inside_of_backward(reentrant, lora):
    """A region is recomputed with the weights of its forward: those after it have changed, its own have not."""

    def program(offload: Offload) -> list[Tensor]:
        model = adapted() if lora else Net(dropping)
        model.inp.requires_grad_(True)  # the reentrant variant needs an input that requires a gradient
        offload(checkpointing(model, use_reentrant=reentrant))
        stepping_in_backward(model)
        before = copies(model)
        found = list(losses(model))
        assert any(not torch.equal(a, b) for a, b in zip(before, copies(model), strict=True))
        return found + copies(model)

    statistics = both(program).statistics()
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == STEPS * OFFLOADED * STREAM


@variants
@pytest.mark.filterwarnings("ignore", "error::actoffload.HostMemoryWarning")  # Dynamo's own
def test_checkpointing_and_compiled_blocks_under_autocast_with_accumulation(reentrant):
    def program(offload: Offload) -> list[Tensor]:
        model = checkpointing(Net(dropping), use_reentrant=reentrant)
        compiling(model)
        offload(model)
        results = []
        for k, loss in enumerate(losses(model, half=True, steps=4)):
            results.append(loss)
            if k % 2:
                results += gradients(model)
        return results

    statistics = both(program).statistics()
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == 4 * OFFLOADED * STREAM // 2


class Mixture(nn.Module):
    """A router and experts, each token to two of four."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4), GroupedMLP(4, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        probs, indices = self.router(h).softmax(dim=-1).topk(2)
        routing_map, table = indices_to_multihot(indices, probs, 4)
        order = indices.flatten().argsort(stable=True)
        y = self.experts(h[order // 2], routing_map.sum(dim=0)) * table.gather(1, indices).flatten()[order].unsqueeze(1)
        return x + torch.zeros_like(x).index_add(0, order // 2, y)


@pytest.mark.parametrize("how", ["plain", "steps inside of backward", "autocast"])
def test_experts_in_a_whole_model(how):
    """What the experts save is offloaded, and nothing of their weights."""

    def loop(model: Net) -> list[Tensor]:
        if how.startswith("steps"):
            stepping_in_backward(model)
        results = list(losses(model, half=how == "autocast"))
        return results + (copies(model) if how.startswith("steps") else gradients(model))

    statistics = both(training(lambda: Net(Mixture), loop)).statistics()
    # Each token twice: the input of FC1, that of the gated activation, that of FC2.
    saved = 2 * ROWS * (WIDTH + 2 * WIDTH + WIDTH) * (2 if how == "autocast" else 4)
    assert statistics.bytes_offloaded == statistics.bytes_reloaded > STEPS * OFFLOADED * saved
    assert statistics.bytes_kept[Reason.PARAMETER] > 0


@pytest.mark.parametrize("how", ["by keyword", "in a list"])
def test_a_tensor_that_checkpointing_itself_refers_to_is_kept(how):
    """Only tensors among the positional arguments of a region are saved by autograd; the guide says so."""

    class Held(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            if how == "in a list":
                return checkpoint(lambda several: block(several[0]), [x], use_reentrant=False)
            return checkpoint(lambda hidden: block(hidden), hidden=x, use_reentrant=False)

    assert both(training(lambda: Held(dropping)), offloads=False).statistics().bytes_offloaded == 0
