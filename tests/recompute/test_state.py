"""Groups that change buffers or parameters in their forward are not recomputed; training and evaluation."""

from __future__ import annotations

import pytest
import torch
from composing import BLOCKS, WIDTH, Mlp, Net, Offload, batch, train
from recomputing import FIRST, Counted, check, counted, fractions, policies, simple
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from whole_model import offload

from actoffload._torch.autograd import metadata_of


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


STATEFUL = {
    "running mean": Counting,
    "replaced buffer": lambda: Counting(True),
    "BatchNorm": normed,
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "embedding that is renormed": Renormed,
}


@fractions
@pytest.mark.parametrize("kind", STATEFUL)
def test_groups_that_change_buffers_are_not_recomputed_and_the_plan_says_so(kind, fraction):
    def use(model):
        found = train(model)
        return [*found, *(b.clone() for b in model.buffers())]

    make = STATEFUL[kind]
    handle = check(simple(counted(make), use), recomputed=0, fraction=fraction)
    assert "because they change parameters or buffers in their forward: blocks.0 ... 5." in handle.plan.because
    assert "change parameters or buffers" in str(handle)


@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("kind", ["running mean", "BatchNorm"])
def test_moving_between_train_and_eval(kind, first):
    """In evaluation the groups change nothing and are recomputed; in training never, whatever came first."""

    def use(model):
        found = []
        for training in (True, False, True) if first == "train" else (False, True, False, True):
            model.train(training)
            found += train(model, 2)
            with torch.no_grad():
                found.append(model(batch(7)))
        return [*found, *(b.clone() for b in model.buffers())]

    def program(offload: Offload) -> list[Tensor]:
        model = counted(STATEFUL[kind])().train(first == "train")
        offload(model)
        return use(model)

    evaluations = 1 if first == "train" else 2
    check(program, recomputed=2 * evaluations * BLOCKS - 1)


def test_what_checkpointing_compares_is_one_object_for_equal_tensors():
    tensor = torch.randn(2, 3)
    seen = metadata_of(tensor)
    assert metadata_of(torch.ones(2, 3)) is seen
    assert seen == {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
    assert all(metadata_of(other) != seen for other in (tensor.t(), tensor.double(), tensor.to("meta")))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:  # a shape of symbols, which has no hash
        symbolic = mode.from_tensor(tensor)
        assert metadata_of(symbolic)["shape"] == symbolic.shape


class Wavering(Mlp):
    """Saves a tensor of another shape after its forwards, by what nothing sees: an attribute that is no flag."""

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
        block.rows = 2
    with pytest.raises(
        torch.utils.checkpoint.CheckpointError, match=r"saved metadata: {'shape': torch.Size\(\[3, 32\]\)"
    ):
        loss.backward()
    handle.remove()


def test_a_buffer_that_changes_against_expectation_is_an_error_and_never_a_wrong_gradient():
    class Sometimes(Counting):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.requires_grad_(False)
            if self.calls == 3:
                return super().forward(x)
            return Mlp.forward(self, x) - self.mean

    model = counted(Sometimes)()
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
    model = Net(normed)
    handle = offload(model, recompute=True, layers="blocks.?", fraction=0.0)
    train(model, 2)
    assert handle.plan.recomputed == ()
    assert "yes" not in str(handle.plan)
    assert str(handle.plan).count("Not recomputed") == 1
    handle.remove()
    handle = offload(model.eval(), recompute=True, layers="blocks.?", fraction=0.0)
    train(model, 2)
    assert len(handle.plan.recomputed) == BLOCKS
    handle.remove()
