"""Offload beside several parts of PyTorch at once: what works beside each of them works beside two or three."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
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
    training,
)
from test_compose_weights import adapted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload.moe import GroupedMLP, indices_to_multihot
from actoffload.report import Reason

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
    assert statistics.reloaded_on_demand == 0


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
    assert statistics.reloaded_on_demand == 0


def test_accumulation_over_living_graphs_and_steps_inside_of_backward():
    """Two forwards, then one backward through both graphs; each weight steps once both have added to its gradient."""

    def loop(model: Net) -> list[Tensor]:
        stepping_in_backward(model)
        for k in range(STEPS):
            sum(model(batch(2 * k + j)).square().mean() for j in range(2)).backward()  # type: ignore[union-attr]
        return copies(model)

    statistics = both(training(adapted, loop)).statistics()
    assert statistics.passes == 2 * STEPS
    assert statistics.bytes_offloaded == statistics.bytes_reloaded > 2 * STEPS * OFFLOADED * STREAM
    assert statistics.reloaded_on_demand == 0


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
    assert statistics.reloaded_on_demand == 0


@pytest.mark.parametrize("how", ["by keyword", "in a list"])
def test_a_tensor_that_checkpointing_itself_refers_to_is_kept(how):
    """Only tensors among the positional arguments of a region are saved by autograd; the guide says so."""

    class Held(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            if how == "in a list":
                return checkpoint(lambda several: block(several[0]), [x], use_reentrant=False)
            return checkpoint(lambda hidden: block(hidden), hidden=x, use_reentrant=False)

    assert both(training(lambda: Held(dropping)), offloads=False).statistics().bytes_offloaded == 0


def test_gradient_penalty_through_checkpointed_regions():
    def loop(model: Net) -> list[Tensor]:
        x = batch().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (slope.square().sum() + y.square().sum()).backward()
        return [x.grad, *gradients(model)]

    statistics = both(training(lambda: checkpointing(Net(Mlp), use_reentrant=False), loop)).statistics()
    assert statistics.bytes_reloaded == 2 * statistics.bytes_offloaded == 2 * OFFLOADED * STREAM
