"""A module runs once: counters, running statistics and hooks see one forward; other libraries' hooks see all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composing import each_step, gradients
from recomputing import WIDTH, Mlp, Net, batch, check, policies, train, ways
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


class Normed(nn.Module):
    """Updates running statistics in each forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(torch.sin(self.norm(torch.sin(self.linear(x)))))


class Spectral(nn.Module):
    """Its power iteration writes to buffers before they are read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.other = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.other(torch.sin(self.linear(torch.sin(x))))


class Averaging(Mlp):
    """Reads a buffer before it is written to, and after that."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = torch.sin(super().forward(x)) - self.mean
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.calls += 1
        return (y.sin() + self.mean.clone()).sin() * (1.0 + 1.0 / (1 + self.calls))


class Replacing(Averaging):
    def forward(self, x):
        y = torch.sin(super().forward(x))
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean).sin().exp()


STATES = [Normed, Spectral, Averaging, Replacing]


@pytest.mark.usefixtures("place")
@ways
@pytest.mark.parametrize("kind", STATES)
def test_buffers_are_written_to_once(kind, policy, fraction):
    """`train` returns the buffers at the end, the numbers of batches included."""
    check(lambda: Net(kind), policy=policy, fraction=fraction, freed=-1.0)


@policies
@pytest.mark.parametrize("kind", [Normed, Replacing])
def test_buffers_of_several_passes_in_flight(kind, policy):
    def use(model):
        found = []
        for _ in range(4):
            losses = [model(batch(k)).square().sum() for k in range(3)]
            for loss in losses:
                loss.backward()
            found += gradients(model)
        return [*found, *model.buffers()]

    check(lambda: Net(kind), use, policy=policy, freed=-1.0)


@policies
def test_a_module_runs_once(policy):
    calls: list[str] = []

    class Counted(Mlp):
        def forward(self, x):
            calls.append("forward")
            self.losses.append(x.detach().mean())
            return super().forward(x)

    def use(model):
        calls.clear()
        model.losses = []
        for block in model.blocks:
            block.losses = model.losses
            block.up.register_forward_hook(lambda *given: calls.append("hook"))
            block.up.register_full_backward_hook(lambda *given: calls.append("backward"))
        found = train(model)
        assert {name: calls.count(name) for name in calls} == dict.fromkeys(calls, 5 * len(model.blocks))
        return [*found, torch.stack(model.losses)]

    check(lambda: Net(Counted), use, policy=policy)
    assert len(set(calls)) == 3


@policies
@pytest.mark.usefixtures("one_process")
def test_groups_that_communicate_do_so_once(policy):
    """Another rank may not recompute them, and would not take part in the collective."""
    counted = []

    class Adding(Mlp):
        def forward(self, x):
            y = torch.sin(super().forward(x))
            total = y.detach().sum(0) * 2.0
            dist.all_reduce(total)
            return (y * total).sin().exp()

    def use(model):
        found = train(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found += train(model, 1)
        counted.append(sum(event.name == "c10d::allreduce_" for event in profile.events()))
        return found

    check(lambda: Net(Adding), use, policy=policy)
    assert counted == [len(Net().blocks)] * 2


@policies
@pytest.mark.parametrize("inside", [False, True])
def test_attention_backends_of_the_forward(policy, inside):
    class Attending(Mlp):
        def forward(self, x):
            y = torch.sin(super().forward(x)).view(1, 4, -1, 8)
            return F.scaled_dot_product_attention(y, y.sin(), y.cos()).reshape(x.shape).sin().exp()

    def use(model):
        found = []
        for k in range(9):
            backend = sdpa_kernel(SDPBackend.MATH if k % 3 else SDPBackend.FLASH_ATTENTION)
            with backend:
                loss = model(batch(k)).square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            found += gradients(model)
        return found

    check(lambda: Net(Attending), use, policy=policy)


# Beside other users of the same parts of PyTorch


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names += [] if operator is torch.ops.aten.detach.default else [str(operator)]
        return operator(*args, **(kwargs or {}))


@policies
def test_dispatch_modes_of_the_program(policy):
    def loss(model, k):
        with Counting() as mode:
            y = model(batch(k))
        names.append(mode.names)
        return y.square().sum()

    names: list[Any] = []
    check(Net, each_step(loss, 5), policy=policy)
    assert names[:5] == names[5:]


@policies
@pytest.mark.parametrize("around", [False, True])
def test_saved_tensor_hooks_of_the_program(policy, around):
    class Hooked(Mlp):
        def forward(self, x):
            y = torch.sin(x).exp()
            with torch.autograd.graph.save_on_cpu():
                y = super().forward(y)
            return (y.sin() * 2.0).sin().exp()

    class Around(Net):
        def call(self, block, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
                return block(x)

    check((lambda: Around(Mlp)) if around else (lambda: Net(Hooked)), policy=policy, freed=0.0 if around else None)
