"""Offload in training loops: mixed precision, accumulation, optimizers, frozen weights, several backwards."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from composing import (
    LEAVING,
    STEPS,
    STREAM,
    WIDTH,
    Block,
    Mlp,
    Net,
    Offload,
    batch,
    both,
    dropping,
    gradients,
    train,
    training,
)
from torch import Tensor, nn

from actoffload import Reason


def data(k: int) -> Tensor:
    return batch(k)


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# Mixed precision


def test_autocast():
    """Activations leave in the type that they are saved in; the casts of weights stay, as weights do."""

    def program(offload: Offload) -> list[Tensor]:
        model = Net(dropping)
        offload(model)
        results = []
        for k in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(batch(k))
            y.float().square().mean().backward()
            results += [y.detach(), *gradients(model)]
            del y
        return results

    statistics, exact = both(program).statistics(), both(training(lambda: Net(dropping))).statistics()
    # A cast weight stays from the second use on at the latest: autocast itself holds it until its region ends.
    assert statistics.tensors_kept[Reason.PARAMETER] >= STEPS
    assert 0.5 * exact.bytes_offloaded < statistics.bytes_offloaded < exact.bytes_offloaded
    assert statistics.bytes_reloaded == statistics.bytes_offloaded


@pytest.mark.parametrize("overflow", [False, True])
def test_gradient_scaler(overflow):
    """Scaling, unscaling, clipping; a step that overflows is skipped and the scale falls, as without offload."""

    def program(offload: Offload) -> list[Tensor]:
        model = Net(dropping)
        offload(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for k in range(4):
            with torch.autocast("cpu", torch.bfloat16):
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

    assert both(program).statistics().passes == 4


# Loops


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_accumulation_in_the_usual_loop_with_validation_between(make):
    def program(offload: Offload) -> list[Tensor]:
        model = Net(dropping)
        offload(model)
        optimizer, results = make(model.parameters(), lr=1e-2), []
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

    statistics = both(program).statistics()
    assert statistics.passes == 6
    assert statistics.reloaded_on_demand == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), "together"])
def test_several_forwards_before_their_backwards(order):
    def program(offload: Offload) -> list[Tensor]:
        model = Net(dropping)
        offload(model)
        losses = [model(batch(k)).square().sum() for k in range(3)]
        if order == "together":
            sum(losses).backward()
        else:
            for k in order:
                losses[k].backward()
        return gradients(model)

    statistics = both(program).statistics()
    assert statistics.passes == 3
    assert statistics.bytes_reloaded == statistics.bytes_offloaded


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_only_training_is_offloaded(mode):
    def program(offload: Offload) -> list[Tensor]:
        model = Net()
        handle = offload(model)
        with mode():
            before = model(batch()).clone()
        assert handle is None or handle.statistics().passes == 0
        return [before, *train(model)]

    assert both(program).statistics().passes == STEPS


def test_steps_inside_of_backward():
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is there, and frees it."""

    def program(offload: Offload) -> list[Tensor]:
        model = Net()
        offload(model)
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=1e-2)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        results = []
        for k in range(STEPS):
            y = model(batch(k))
            y.square().mean().backward()
            results.append(y.detach())
            del y
        assert all(parameter.grad is None for parameter in model.parameters())
        return results + copies(model)

    statistics = both(program).statistics()
    assert statistics.reloaded_on_demand == 0


def test_a_step_inside_of_backward_on_a_weight_that_is_still_needed_raises_as_without():
    def program(offload: Offload) -> list[Tensor]:
        model = Net()
        model.blocks[5].out.weight = model.blocks[0].out.weight
        offload(model)
        model.blocks[0].out.weight.register_hook(lambda grad: model.blocks[0].out.weight.data.add_(0))
        tied = model.blocks[0].out.weight
        model.blocks[2].register_full_backward_hook(lambda *_: tied.detach().add_(1.0) and None)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch()).square().sum().backward()
        model.zero_grad()
        return train(model, 1) if False else [tied.detach().clone()]

    both(program)


# Weights


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


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_lora_on_frozen_weights(around):
    """No frozen weight leaves, under autocast no cast of one that autocast holds; `both` looks at each copy."""

    def program(offload: Offload) -> list[Tensor]:
        model = adapted()
        offload(model)
        results = []
        for k in range(STEPS):
            with around():
                y = model(batch(k))
            y.float().square().sum().backward()
            results += [y.detach(), *gradients(model)]
            del y
        return results

    statistics = both(program).statistics()
    if around is contextlib.nullcontext:
        # In each block four linears save their frozen weight, and of eight small weights all but the first `a`
        # are needed; in the last block also. The first block's input needs no gradient.
        frozen, rank = WIDTH * WIDTH * (3 + 1 + 2 + 2) * 4, 4
        small = rank * (WIDTH + 3 * WIDTH + 2 * WIDTH + 3 * WIDTH + 2 * WIDTH + WIDTH) * 4
        assert statistics.bytes_kept[Reason.PARAMETER] >= STEPS * LEAVING * (frozen + small) * 0.8
    assert statistics.bytes_offloaded > STEPS * LEAVING * STREAM


class Counted(torch.autograd.graph.saved_tensors_hooks):
    """Sums up the bytes of what autograd saves and is no parameter."""

    def __init__(self) -> None:
        self.nbytes = 0
        super().__init__(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        self.nbytes += x.nbytes if not isinstance(x if x._base is None else x._base, nn.Parameter) else 0
        return x


def test_what_a_frozen_layer_does_not_save_does_not_leave():
    """A frozen linear needs its weight for backward and not its input: there is less to offload, and no more copied."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    def program(frozen: bool):
        def run(offload: Offload) -> list[Tensor]:
            model = Net(Plain)
            model.blocks.requires_grad_(not frozen)
            offload(model)
            return train(model)

        return run

    assert both(program(frozen=False)).statistics().bytes_offloaded == STEPS * LEAVING * STREAM
    assert both(program(frozen=True), leaves=False).statistics().bytes_offloaded == 0


@pytest.mark.parametrize("how", ["frozen weights", "no_grad"])
def test_a_frozen_backbone(how):
    class Backbone(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad() if how == "no_grad" else contextlib.nullcontext():
                x = self.inp(x)
                for block in self.blocks[:2]:
                    x = block(x)
            for block in self.blocks[2:]:
                x = block(x)
            return self.head(x)

    def make() -> Net:
        model = Backbone()
        model.inp.requires_grad_(False)
        model.blocks[:2].requires_grad_(False)
        return model

    whole, statistics = both(training(Net)).statistics(), both(training(make)).statistics()
    assert statistics.bytes_offloaded == pytest.approx(whole.bytes_offloaded / 2, rel=0.02)
    assert statistics.reloaded_on_demand == 0


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

    assert both(training(make)).statistics().reloaded_on_demand == 0


# Several backwards


@pytest.mark.parametrize("times", [2, 3])
def test_a_retained_graph(times):
    def program(offload: Offload) -> list[Tensor]:
        model = Net(dropping)
        offload(model)
        loss = model(batch()).square().sum()
        for k in range(times):
            loss.backward(retain_graph=k + 1 < times)
        return gradients(model)

    statistics = both(program).statistics()
    assert statistics.bytes_reloaded == times * statistics.bytes_offloaded


def test_a_gradient_penalty():
    """A gradient with respect to the input, with a graph of its own, and the gradient of that."""

    def program(offload: Offload) -> list[Tensor]:
        model = Net(Mlp)
        offload(model)
        results = []
        for k in range(STEPS):
            x = batch(k).requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (slope.square().sum() + y.square().sum()).backward()
            results += [x.grad, *gradients(model)]
            del x, y, slope
        return results

    statistics = both(program).statistics()
    assert statistics.passes == STEPS
    assert statistics.bytes_reloaded >= 2 * statistics.bytes_offloaded


def test_a_gradient_inside_of_the_forward():
    """A block that returns forces: what its own backward saves belongs to it too."""

    class Forces(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return x + 1e-2 * force

    assert both(training(lambda: Net(Forces))).statistics().passes == STEPS


def test_a_second_loss_on_the_middle_of_the_model():
    class Middle(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for k, block in enumerate(self.blocks):
                x = block(x)
                if k == 2:
                    self.middle = F.softmax(x, dim=-1).square().sum()
            return self.head(x)

    def program(offload: Offload) -> list[Tensor]:
        model = Middle()
        offload(model)
        y = model(batch())
        model.middle.backward(retain_graph=True)
        del model.middle
        y.square().sum().backward()
        return gradients(model)

    both(program)


def test_a_model_in_parts_with_a_handle_each():
    """Two models, as in adversarial training or distillation, each offloaded by itself."""

    def program(offload: Offload) -> list[Tensor]:
        student, teacher = Net(dropping), Net(Block)
        offload(student)
        results = []
        for k in range(STEPS):
            with torch.no_grad():
                wanted = teacher(batch(k))
            loss = F.mse_loss(student(batch(k)), wanted)
            loss.backward()
            results += gradients(student)
            del loss
        return results

    assert both(program).statistics().passes == STEPS
