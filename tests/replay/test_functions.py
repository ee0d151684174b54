"""Each `torch.autograd.Function` is one operator: its forward is called again, if it is proven to be pure."""

from typing import Any

import numpy as np
import pytest
import torch
from recomputing import ROWS, WIDTH, Net, all_ways, batch, check, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from whole_model import offload

from actoffload.moe import GroupedMLP, grouped_mlp


def kernel(x: Tensor) -> Tensor:
    """Return the sine, by a kernel that dispatch does not see."""
    y = torch.empty_like(x)
    np.sin(x.detach().numpy(), out=y.detach().numpy())
    return y


class OldStyle(torch.autograd.Function):
    """Saves its input, an intermediate value and its output."""

    calls = 0

    @staticmethod
    def forward(ctx, x, scale, name=None):
        OldStyle.calls += 1
        assert ctx.needs_input_grad[:2] == (True, False)
        middle = kernel(x)
        y = middle * scale
        ctx.save_for_backward(x, None, middle, y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, nothing, middle, y = ctx.saved_tensors
        assert nothing is None
        return gradient * ctx.scale * x.cos() + (middle + y).sin() * 1e-2, None, None


class SetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        middle = kernel(x)
        return middle * weight, middle.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight = inputs
        y, other = output
        ctx.mark_non_differentiable(other)
        ctx.save_for_backward(x, weight, y, other)

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight, y, other = ctx.saved_tensors
        slope = gradient * x.cos() * weight + other * 1e-2
        return slope, (gradient * (y / weight)).sum(0)


class Overwriting(torch.autograd.Function):
    """Writes its gradient over what it has saved, as kernels of Liger do."""

    @staticmethod
    def forward(ctx, x):
        y = kernel(x)
        ctx.save_for_backward(x, y)
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        slope = x.detach().numpy()
        np.cos(slope, out=slope)
        x.mul_(gradient).add_(y * 1e-2)
        y.zero_()
        return x


class Striding(torch.autograd.Function):
    """Its kernel uses the strides of the forward in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.stride = x.stride()
        return kernel(x.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.as_strided(x.size(), ctx.stride).cos()


class Scaling(torch.autograd.Function):
    """Scales two inputs in place, by a kernel that autograd does not see, as rotary embeddings of Liger do."""

    @staticmethod
    def forward(ctx, q, k, scale):
        q, k = q.mT, k.mT
        for each in (q, k):
            numbers = each.detach().numpy()
            numbers *= scale.numpy()
        ctx.save_for_backward(scale)
        return q.mT, k.mT

    @staticmethod
    def backward(ctx, one, other):
        (scale,) = ctx.saved_tensors
        return one * scale[:, None], other * scale[:, None], None


class Outer(torch.autograd.Function):
    """Calls another function, and computes with gradients in its forward."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = OldStyle.apply(leaf, 0.5)
            (slope,) = torch.autograd.grad(y.square().sum(), leaf)
        ctx.save_for_backward(slope)
        return y.detach()

    @staticmethod
    def backward(ctx, gradient):
        (slope,) = ctx.saved_tensors
        return gradient * slope


class Held:
    """An object with a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Packed(nn.Parameter):
    """A weight whose class holds what it is unpacked with, as that of bitsandbytes does."""

    def __new__(cls, data: Tensor, scale: Tensor) -> "Packed":
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = Held(scale)
        return made

    def __deepcopy__(self, memo: Any) -> "Packed":
        return Packed(self.data.clone(), self.state.x.clone())


class OfPacked(torch.autograd.Function):
    """A matrix product with a packed weight, of which nothing is saved through hooks."""

    @staticmethod
    def forward(ctx, x, weight, state):
        ctx.kept = weight, state
        return x @ (weight.T.float() * state.x)

    @staticmethod
    def backward(ctx, gradient):
        weight, state = ctx.kept
        return gradient @ (weight.T.float() * state.x).T, None, None


class Applies(nn.Linear):
    """Applies functions in its middle."""

    def __init__(self, functions: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.packed = Packed(torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8), torch.rand(WIDTH) / 8.0)
        self.functions = functions

    def forward(self, x):
        return torch.sin(self.functions(self, torch.sin(super().forward(x)))).sin()


def net(functions: Any) -> Net:
    return Net(lambda: Applies(functions))


def strides(block: Applies, y: Tensor) -> Tensor:
    left, right = (Striding.apply(half) for half in torch.cat([y, y.exp()], -1).chunk(2, -1))
    return left * right + Striding.apply(y.mT).mT + Striding.apply(y[:1].expand(4, -1)).sum()


def old_style(block: Applies, y: Tensor) -> Tensor:
    return OldStyle.apply(OldStyle.apply(y, 1.5), block.scale[0].detach(), "a name")


def setup_context(block: Applies, y: Tensor) -> Tensor:
    one, two = SetupContext.apply(y, block.weight[0] + 3.0)
    return one * two


def scaling(block: Applies, y: Tensor) -> Tensor:
    q, k = (nn.functional.linear(y, weight) for weight in (block.weight, block.weight.mT))
    q, k = Scaling.apply(q.mT, k.mT, block.scale.detach())
    return (q * k).mT


def scaling_parts(block: Applies, y: Tensor) -> Tensor:
    q, k, v = nn.functional.linear(y, block.weight.repeat(3, 1)).chunk(3, -1)
    q, k = Scaling.apply(q.mT, k.mT, block.scale.detach())
    return (q * k).mT * v


PURE = {
    "old style": old_style,
    "setup_context": setup_context,
    "overwriting": lambda block, y: Overwriting.apply(y) + Overwriting.apply(y.exp() * 2.0),
    "packed weight": lambda block, y: OfPacked.apply(y, block.packed.t(), block.packed.state).cos(),
    "strides": strides,
    "scaling": scaling,
    "scaling parts": scaling_parts,
    "outer": lambda block, y: Outer.apply(y) * y,
}


@all_ways
@pytest.mark.parametrize("kind", PURE)
def test_functions(kind, policy, fraction):
    check(lambda: net(PURE[kind]), policy=policy, fraction=fraction)


def test_the_forward_is_called_again_once_in_a_settled_backward():
    model = net(old_style)
    offload(model, layers="blocks.?", recompute=True, fraction=0.0)
    train(model, 4)
    OldStyle.calls = 0
    loss = model(batch()).sum()
    assert OldStyle.calls == 2 * len(model.blocks)
    loss.backward()
    assert OldStyle.calls == 4 * len(model.blocks)


@pytest.mark.parametrize("kind", list(PURE)[:6])
def test_what_functions_save_is_freed(kind):
    check(lambda: net(PURE[kind]), freed=0.6)


class Experts(nn.Linear):
    """Experts whose tokens are counted on the device; or on the host, where each call may have other counts."""

    def __init__(self, counted: str, distributed: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.counted, self.mlp = counted, GroupedMLP(2, WIDTH, WIDTH)
        if distributed:
            for name, weight in list(self.mlp.named_parameters()):
                part = DTensor.from_local(weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
                setattr(self.mlp, name, nn.Parameter(part))

    def forward(self, x):
        y = torch.sin(super().forward(x))
        first = (y.detach().sum(-1) > 0.0).sum().clamp(max=ROWS - 2)
        counts = torch.stack([first, ROWS - 2 - first])  # two rows belong to no expert
        counts = counts.tolist() if self.counted == "on the host" else counts
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in self.mlp.parameters())
        return torch.sin(grouped_mlp(y, counts, *weights, padded=True))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("counted", "distributed", "freed"),
    [
        ("on the device", False, 0.5),
        ("on the device", True, 0.5),
        ("on the host", False, None),  # nothing in the call shows that the counts of the next one differ
    ],
)
def test_experts(counted, distributed, freed):
    check(lambda: Net(lambda: Experts(counted, distributed)), freed=freed)


# Functions that are not pure


class SavesResult(torch.autograd.Function):
    """Multiplies the gradient of its first argument, of up to three, with what it has saved."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


class Writing(SavesResult):
    """Writes to its input, by a kernel that dispatch does not see."""

    @staticmethod
    def forward(ctx, x, shift):
        y = kernel(x) + shift
        numbers = shift.detach().numpy()
        numbers += 1.0
        ctx.save_for_backward(y)
        return y


class Dirty(SavesResult):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx, x):
        numbers = x.detach().numpy()
        np.sin(numbers, out=numbers)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class Drawing(torch.autograd.Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x) if Drawing.torch else torch.from_numpy(np.random.rand(*x.shape)).float()
        y = x * mask
        ctx.save_for_backward(mask, y)
        return y

    torch = True

    @staticmethod
    def backward(ctx, gradient):
        mask, y = ctx.saved_tensors
        return gradient * mask + y * 1e-2


class OfObjects(SavesResult):
    """Gets tensors in objects."""

    @staticmethod
    def forward(ctx, x, held, more):
        y = kernel(x) * held.x + more["shift"] + more["list"][0][0]
        ctx.save_for_backward(y)
        return y


def write(block: Applies, y: Tensor) -> Tensor:
    shift = y.detach() * 2.0
    return Writing.apply(y, shift) * shift


def objects(block: Applies, y: Tensor) -> Tensor:
    x = y.detach()
    return OfObjects.apply(y, Held(x * 2.0), {"shift": x.exp(), "list": [(x.cos(),)]})


IMPURE = {
    "writing": write,
    "dirty": lambda block, y: Dirty.apply(y * 2.0) + y,
    "drawing": lambda block, y: Drawing.apply(y),
    "objects": objects,
}


@all_ways
@pytest.mark.parametrize("kind", IMPURE)
def test_functions_that_are_not_pure(kind, policy, fraction):
    check(lambda: net(IMPURE[kind]), policy=policy, fraction=fraction, freed=-1.0)


def test_the_random_state_of_the_program_stays():
    def use(model):
        torch.manual_seed(0)
        np.random.seed(0)
        found: list[Any] = []
        for k in range(5):
            Drawing.torch = k % 2 == 1
            loss = model(batch(k)).sum()
            found += [torch.rand(3), torch.from_numpy(np.random.rand(3))]
            loss.backward()
            found += [torch.rand(3), torch.from_numpy(np.random.rand(3)), model.inp.weight.grad.clone()]
        Drawing.torch = True
        return found

    check(lambda: net(IMPURE["drawing"]), use)
