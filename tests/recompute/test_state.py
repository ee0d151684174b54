"""Groups that change buffers or parameters in their forward; training and evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composing import BLOCKS, STEPS, WIDTH, Mlp, Net, Offload, batch, train
from recomputing import ANY, FIRST, Counted, check, counted, fractions, policies, simple
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from whole_model import equal, offload

from actoffload.recompute.checkpoint import described
from actoffload.recompute.watch import CHANGES, RANKS, Watch


class Counting(Mlp):
    """Counts its calls in a buffer, which its output depends on."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) - self.mean
        if self.training:
            new = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.replaces:
                self.mean = new
            else:
                self.mean.copy_(new)
        return y


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Renormed(nn.Module):
    """Writes to its parameter in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.embedding(torch.arange(len(x)) % 7))


class Statistics(nn.Module):
    """Normalizes with running statistics that nothing counts."""

    def __init__(self, registered: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, of in (("mean", torch.zeros(WIDTH)), ("variance", torch.ones(WIDTH))):
            self.register_buffer(name, of) if registered else setattr(self, name, of)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.batch_norm(self.linear(x), self.mean, self.variance, training=self.training))


class Shared(nn.Module):
    """Two modules that write to one buffer, which their outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(), Counting()
        self.second.mean = self.first.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


STATEFUL = {
    "running mean": Counting,
    "replaced buffer": lambda: Counting(True),
    "shared buffer": Shared,
    "BatchNorm": normed,
    "no counter": Statistics,
    "spectral norm": spectral,
}
OTHERS = {
    "embedding that is renormed": Renormed,
    "statistics that are no buffers": lambda: Statistics(registered=False),
}


def state_of(model: nn.Module) -> list[Tensor]:
    plain = (of for each in model.modules() for of in (getattr(each, "mean", None), getattr(each, "variance", None)))
    return [of.clone() for of in (*model.buffers(), *(of for of in plain if of is not None))]


@fractions
@policies
@pytest.mark.parametrize("kind", STATEFUL)
def test_groups_that_write_to_buffers_are_recomputed_and_buffers_are_as_after_one_forward(kind, policy, fraction):
    def use(model):
        return [*train(model), *state_of(model)]

    # A parametrized module has a class of its own, so each is watched.
    calls = (FIRST if kind != "spectral norm" else 0) + STEPS * BLOCKS
    check(simple(counted(STATEFUL[kind]), use), policy, recomputed=calls, fraction=fraction)


@pytest.mark.parametrize("kind", ["running mean", "shared buffer", "replaced buffer"])
def test_a_graph_that_is_recomputed_twice_gets_the_buffers_of_its_forward_each_time(kind):
    def use(model):
        found = []
        for k in range(3):
            one, other = model(batch(k)).square().sum(), model(batch(k + 1)).square().sum()
            one.backward(retain_graph=True)
            (one + other).backward()
            found.append(one.detach())
        return [*found, *(weight.grad for weight in model.parameters()), *state_of(model)]

    check(simple(counted(STATEFUL[kind]), use), recomputed=ANY)


@pytest.mark.filterwarnings("ignore")  # Dynamo reads attributes that warn
@pytest.mark.parametrize("kind", ["BatchNorm", "no counter"])
def test_buffers_of_compiled_groups(kind):
    def make() -> nn.Module:
        block = STATEFUL[kind]()
        block.compile(backend="aot_eager")
        return block

    def program(offload: Offload) -> list[Tensor]:
        model = counted(make)()
        offload(model, min_bytes=2**20)
        return [*train(model), *state_of(model)]

    check(program, recomputed=ANY, fraction=0.0)


@pytest.mark.parametrize("kind", OTHERS)
def test_groups_that_change_what_cannot_be_restored_are_not_recomputed_and_the_plan_says_so(kind):
    def use(model):
        return [*train(model), *state_of(model)]

    handle = check(simple(counted(OTHERS[kind]), use), recomputed=0)
    assert "because they change parameters in their forward, or running statistics that cannot be" in str(handle)
    assert ": blocks.0 ... 5." in handle.plan.because


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:`torch.jit.script` is:DeprecationWarning")
def test_buffers_of_scripted_modules_are_not_restored():
    watch = Watch(block := torch.jit.script(nn.BatchNorm1d(WIDTH)))
    watch(block, batch())
    assert watch.reason == CHANGES


def test_norms_over_several_ranks_are_not_recomputed():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH)).train()
    watch = Watch(block)
    watch(lambda x: block[1].num_batches_tracked.add_(1) + block[0](x), batch())  # SyncBatchNorm needs a GPU
    assert watch.reason == RANKS


def test_an_error_in_a_recomputation_leaves_the_buffers_as_they_are():
    class Failing(Counting):
        fails = 0

        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(1)
            if self.fails:
                raise ValueError("fails")
            return super().forward(x)

    model = Net(Failing)
    handle = offload(model, recompute=True, layers="blocks.?", fraction=0.0)
    train(model, 2)
    buffers, loss = list(model.buffers()), model(batch()).square().sum()
    before = [of.clone() for of in buffers]
    for block in model.blocks:
        type(block).fails = 1
    with pytest.raises(ValueError, match="fails"):
        loss.backward()
    handle.remove()
    assert all(map(torch.equal, model.buffers(), before))
    assert [*map(id, model.buffers())] == [*map(id, buffers)]


@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("kind", ["running mean", "BatchNorm"])
def test_moving_between_train_and_eval(kind, first):
    """The first call in each of them is watched."""

    def use(model):
        found = []
        for training in (True, False, True) if first == "train" else (False, True, False, True):
            model.train(training)
            found += train(model, 2)
            with torch.no_grad():
                found.append(model(batch(7)))
        return [*found, *state_of(model)]

    def program(offload: Offload) -> list[Tensor]:
        model = counted(STATEFUL[kind])().train(first == "train")
        offload(model)
        return use(model)

    steps = 2 * (3 if first == "train" else 4)
    check(program, recomputed=steps * BLOCKS - 2)


def test_what_checkpointing_compares_is_one_object_for_equal_tensors():
    tensor = torch.randn(2, 3)
    seen = described(tensor)
    assert described(torch.ones(2, 3)) is seen
    assert seen == (tensor.shape, tensor.dtype, tensor.device)
    assert all(described(other) != seen for other in (tensor.t(), tensor.double(), tensor.to("meta")))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:  # a shape of symbols, which has no hash
        symbolic = mode.from_tensor(tensor)
        assert described(symbolic)[0] == symbolic.shape


class Remembering(Mlp):
    """Keeps something from call to call in an attribute, which is no buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.mean, self.losses = how, torch.zeros(WIDTH), list[Tensor]()
        self.inside: Any = [torch.zeros(WIDTH)] if how == "in a list" else {"mean": torch.zeros(WIDTH)}
        self.number = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        mean = y.detach().mean(0)
        if self.how == "replaced":
            self.mean = 0.9 * self.mean + 0.1 * mean
        elif self.how == "edited":
            self.mean.mul_(0.9).add_(0.1 * mean)
        elif self.how in ("in a list", "in a dictionary"):
            key = 0 if self.how == "in a list" else "mean"
            self.inside[key] = 0.9 * self.inside[key] + 0.1 * mean
            return torch.tanh(y - self.inside[key])
        elif self.how == "a number":
            self.number = 0.9 * self.number + 0.1 * float(mean.mean())
            return torch.tanh(y - self.number)
        elif self.how == "cached":
            self.inside.setdefault(len(x), torch.arange(float(WIDTH)))
            return torch.tanh(y - self.inside[len(x)])
        elif self.how == "overwritten":  # with what does not depend on it
            self.mean = mean
        else:
            self.losses.append(mean.sum())
        return torch.tanh(y - self.mean)


@policies
@pytest.mark.parametrize("how", ["replaced", "edited", "appended", "in a list", "in a dictionary"])
def test_attributes_that_are_no_buffers_are_changed_once(how, policy):
    handle = check(simple(counted(lambda: Remembering(how))), policy, recomputed=0)
    assert "attributes of modules and no buffers: blocks.0 ... 5" in handle.plan.because


@policies
@pytest.mark.parametrize(("how", "first"), [("overwritten", FIRST), ("cached", -1), ("a number", FIRST)])
def test_an_attribute_that_a_call_overwrites_may_be_overwritten_twice(how, first, policy):
    """A first call that adds to a dictionary shows of no other one what it does; the second one is watched for all."""
    check(simple(counted(lambda: Remembering(how))), policy, recomputed=first + STEPS * BLOCKS)


@policies
def test_an_attribute_that_becomes_a_tensor_is_looked_at_again(policy):
    """The first call of all sets it; from the second one on it is computed from what it was."""

    class Lazy(Mlp):
        mean: Any

        def __init__(self) -> None:
            super().__init__()
            self.mean = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            mean = y.detach().mean(0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
            return torch.tanh(y - self.mean)

    model = counted(Lazy)()
    handle = offload(model, recompute=policy, fraction=1.0)
    train(model, 1)
    reference = copy.deepcopy(model)
    equal(train(model), train(reference))
    assert "attributes of modules and no buffers: blocks.0 ... 5" in handle.plan.because


@policies
@pytest.mark.parametrize("what", ["weight", "input", "buffer", "foreach"])
def test_writes_past_a_version_counter(what, policy):
    """As clipping and quantization write them."""

    class Writing(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if what == "weight":
                self.up.weight.data.mul_(0.9)
            elif what == "input":
                x.data.mul_(0.9)
            elif what == "buffer":
                self.scale.data.mul_(0.9)
            else:
                torch._foreach_mul_([self.scale], 0.9)
            return super().forward(torch.sin(x)) * self.scale

    class Fresh(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x * 1.0)

    restored = what in ("buffer", "foreach")
    times = FIRST + STEPS * BLOCKS if restored else 0
    check(simple(lambda: Fresh(lambda: Counted(Writing()))), policy, recomputed=times)


@policies
def test_parameters_that_are_replaced_before_backward_are_an_error(policy):
    """Without recomputation the gradients are those of the parameters of the forward."""
    model = counted(Mlp)()
    offload(model, recompute=policy, fraction=1.0)
    loss = model(batch()).square().sum()
    model.load_state_dict({name: of * 2.0 for name, of in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="parameter, buffer or attribute of a Counted that is recomputed"):
        loss.backward()


class Wavering(Mlp):
    """Saves a tensor of another shape after its forwards, by what nothing sees: an attribute of the class."""

    rows = 3

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(x[: self.rows]).sum()
        return super().forward(x) * kept


def test_other_shapes_than_those_saved_are_an_error_and_never_a_wrong_gradient():
    model = Net(Wavering)
    handle = offload(model, recompute=(), layers="blocks.?")
    train(model, 2)
    assert handle.plan.recomputed
    loss = model(batch()).square().sum()
    for block in model.blocks:
        type(block).rows = 2
    with pytest.raises(
        RuntimeError, match=r"of shape \(3, 32\) and torch.float32 on cpu, and now one of shape \(2, 32\)"
    ):
        loss.backward()
    handle.remove()


@pytest.mark.parametrize("replaces", [False, True], ids=["written to", "replaced"])
def test_a_buffer_that_changes_against_expectation_is_an_error_and_never_a_wrong_gradient(replaces):
    class Sometimes(Counting):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.requires_grad_(False)
            if self.calls == 3:
                return super().forward(x)
            return Mlp.forward(self, x) - self.mean

    model = counted(lambda: Sometimes(replaces))()
    handle = offload(model, recompute=True, layers="*blocks.?", fraction=1.0)
    train(model, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(model, 2)
    model.zero_grad()
    assert handle.statistics().resident_bytes == 0


@policies
def test_evaluation_and_no_grad_recompute_nothing(policy):
    def use(model):
        found = []
        with torch.no_grad():
            found.append(model(batch()))
        with torch.inference_mode():
            found.append(model(batch()).clone())
        assert Counted.backward_calls in (0, FIRST)
        return [torch.cat(found), *train(model, 1)]

    check(simple(counted(Mlp), use), policy, recomputed=FIRST + BLOCKS)


def test_a_plan_does_not_call_recomputed_what_is_not():
    model = Net(Renormed)
    handle = offload(model, recompute=True, layers="blocks.?", fraction=0.0)
    train(model, 2)
    assert handle.plan.recomputed == ()
    assert "yes" not in str(handle.plan)
    assert str(handle.plan).count("Not recomputed") == 1
    handle.remove()
    model = Net(normed)
    handle = offload(model, recompute=True, layers="blocks.?", fraction=0.0)
    train(model, 2)
    assert len(handle.plan.recomputed) == BLOCKS
    handle.remove()
