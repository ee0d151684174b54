"""Operators that recomputation leaves out: which ones, with equal bits, and not where something else may read them."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actoffload.recompute import Reads, Region, State, Structure, Trace, recomputed, saving
from actoffload.recompute.trace import shapes, without_memory


def attention(x, weight, angles):
    """Return what a rotated projection gives: the rotation reads nothing but the projection."""
    queries = F.linear(x, weight)
    one, two = queries.chunk(2, -1)
    rotated = queries * angles.cos() + torch.cat((-two, one), -1) * angles.sin()
    return F.scaled_dot_product_attention(rotated[None, None], x[None, None], x[None, None])[0, 0]


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("angles", torch.rand(4, 8))

    def forward(self, x):
        return attention(x, self.weight, self.angles)


class Cosine(nn.Module):
    def forward(self, x):
        return x.cos()


class Moody(Rotated):
    """Runs other operators when its mood changes."""

    mood = 0

    def forward(self, x):
        return super().forward(x.sin() if self.mood % 2 else x.cos())


class Program:
    """A module that is recomputed, call after call, and the operators that its recomputations left out."""

    def __init__(self, module, *names):
        self.module, self.policy, self.trace, self.reads = module, saving(names), Trace(), Reads()
        self.region = self.timed = None

    def forward(self, x):
        state = State(self.module, Structure(self.module))
        self.region = Region(self.policy, reads=self.reads, trace=self.trace, state=state, timed=self.timed)
        return recomputed(self.module, self.region, x)

    def step(self, seed=0):
        """Check the gradients of a step; return the names of the operators that were left out."""
        torch.manual_seed(seed)
        x = torch.randn(4, 8, requires_grad=True)
        want = self.gradients(self.module, x)
        got = self.gradients(self.forward, x)
        assert all(map(torch.equal, want, got))
        places = self.region.left_out
        return sorted(self.trace.sequence[place]._schema.name.removeprefix("aten::") for place in places)

    def gradients(self, function, x):
        x.grad = None
        self.module.zero_grad()
        function(x).square().sum().backward()
        return [x.grad, *(of.grad for of in self.module.parameters() if of.grad is not None)]

    def steps(self, number=4):
        return [self.step(seed) for seed in range(number)]


ROTATED = "aten.add.Tensor#0"
ROTATION = ["cat", "mm", "mul", "mul", "neg"]


def test_what_only_the_rotated_queries_read_is_left_out_from_the_second_call_on():
    program = Program(Rotated(), ROTATED)
    assert program.steps() == [[], ROTATION, ROTATION, ROTATION]


def test_nothing_is_left_out_if_nothing_is_saved_that_makes_it_unnecessary():
    program = Program(Rotated(), "aten.mm.default#0")
    assert program.steps() == [[], [], [], []]


def test_an_output_that_nothing_reads_is_not_saved():
    program = Program(Rotated(), "aten.mm.default#0", ROTATED)
    assert program.steps()[-1] == ROTATION
    program.forward(torch.randn(4, 8, requires_grad=True))
    assert [operator._schema.name for operator, _ in program.region.saved] == ["aten::add"]


def test_another_policy_has_its_own_set():
    program = Program(Rotated(), ROTATED)
    program.steps()
    program.policy = saving(["aten.mm.default#0"])
    assert program.steps(2) == [[], []]
    program.policy = saving(["aten.mm.default#0", ROTATED])
    assert program.steps(2)[-1] == ROTATION


def test_another_length():
    class Sliced(Rotated):
        def forward(self, x):
            return attention(x, self.weight, self.angles[: len(x)])

    program = Program(Sliced(), ROTATED)
    program.steps(3)
    for rows in (2, 3, 4):
        x = torch.randn(rows, 8, requires_grad=True)
        want, got = program.gradients(program.module, x), program.gradients(program.forward, x)
        assert all(map(torch.equal, want, got))
        assert program.region.left_out


def test_a_retained_graph_and_half_a_backward():
    program = Program(Rotated(), ROTATED)
    program.steps(3)
    x = torch.randn(4, 8, requires_grad=True)
    want = torch.autograd.grad(program.module(x).square().sum(), [x, program.module.weight])
    loss = program.forward(x).square().sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], want[0])
    for retain in (True, False):
        got = torch.autograd.grad(loss, [x, program.module.weight], retain_graph=retain)
        assert all(map(torch.equal, got, want))


def test_a_policy_that_saves_what_was_saved_for_nothing():
    """The products of frozen weights, and the cosine that they read, are left out one after the other."""
    module = nn.Sequential(Cosine(), nn.Linear(8, 8, bias=False), nn.Sigmoid(), nn.Sigmoid())
    module[1].requires_grad_(False)
    program = Program(module, "aten.mm.default#0", "aten.sigmoid.default#0")
    assert program.steps()[-1] == ["cos", "mm"]
    program.policy = saving(["aten.mm.default#0"])
    assert program.steps() == [[], ["cos"], ["cos"], ["cos"]]


def test_two_halves_of_a_backward():
    """What the first half drops is run again in the second."""

    class Both(nn.Module):
        def forward(self, x):
            return [(x.cos() * (k + 1.0)).sigmoid().sin() for k in range(2)]

    module = Both()
    program = Program(module, "aten.sigmoid.default#0", "aten.sigmoid.default#1")

    def step(function):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        one, two = function(x)
        one.sum().backward()
        two.sum().backward()
        return x.grad

    for _ in range(4):
        assert torch.equal(step(program.forward), step(module))
    assert program.region.left_out


def test_what_was_saved_stays_as_long_as_the_graph_is_retained():
    module, region = Rotated(), Region(saving([ROTATED]), trace=Trace(known=True))
    loss = recomputed(module, region, torch.randn(4, 8, requires_grad=True)).sum()
    for retain in (True, True, False):
        assert len(region.saved) == 1
        loss.backward(retain_graph=retain)
    assert not region.saved


@pytest.mark.parametrize("other", [False, True])
def test_a_recomputation_on_another_stream_drops_nothing(other):
    streams = iter([0, int(other)])
    module, trace = Rotated(), Trace(known=True)
    region = Region(saving([ROTATED]), trace=trace, stream=lambda: next(streams))
    recomputed(module, region, torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert bool(region.saved) == other


def test_a_second_order_gradient():
    program = Program(Rotated(), ROTATED)
    program.module.forward = lambda x: x * F.linear(x, program.module.weight).sin() * program.module.angles
    program.policy = saving(["aten.mul.Tensor#0"])
    program.steps(3)

    def second(function):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(second(program.forward), second(program.module))


# What may be read by something that the dispatch mode does not see


class Negated(torch.autograd.Function):
    """Its node holds a tensor that autograd does not know of."""

    @staticmethod
    def forward(ctx, x):
        ctx.held = x
        return -x

    @staticmethod
    def backward(ctx, grad):
        return -grad + 0.0 * ctx.held


class Functions(Rotated):
    def forward(self, x):
        return super().forward(Negated.apply(x.sin()))


class WithoutGradients(Rotated):
    def forward(self, x):
        with torch.no_grad():
            scale = x.square().mean()
        return super().forward(x) * scale


class InPlace(Rotated):
    def forward(self, x):
        return super().forward(x).sin().add_(1.0)


class Asking(Rotated):
    """Asks the host for a value."""

    def forward(self, x):
        return super().forward(x * (1.0 if x.sum().item() > 0 else -1.0))


class Zeroed(Rotated):
    """Gets memory that a kernel of its own may fill."""

    def forward(self, x):
        torch.zeros_like(x)
        return super().forward(x)


class Filled(Rotated):
    def forward(self, x):
        rows = torch.empty(4, 8)
        rows.detach().numpy()[:] = 2.0
        return super().forward(x) * rows


@pytest.mark.parametrize("kind", [Functions, WithoutGradients, InPlace, Filled, Zeroed, Asking])
def test_nothing_is_left_out_where_not_all_is_seen(kind):
    program = Program(kind(), ROTATED)
    assert program.steps() == [[], [], [], []]
    assert program.trace.sequence == ()


@pytest.mark.parametrize("how", ["an index", "a tensor without a graph"])
def test_what_numpy_reads_is_made_again(how):
    """Nothing else reads it in the recomputed graph, and ``numpy`` runs no operator that a mode sees."""

    class Reading(Rotated):
        def forward(self, x):
            queries = F.linear(x, self.weight)
            read = queries.argmax(-1) if how == "an index" else queries.add(1.0).detach()
            factor = float(read.numpy().sum())
            return torch.tanh(attention(x, self.weight, self.angles) * factor).square()

    module = Reading()
    x = torch.randn(4, 8, requires_grad=True)
    wanted = torch.autograd.grad(module(x).square().sum(), x)[0]
    program = Program(module, ROTATED, "aten.mm.default#1")
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(program.forward(x).square().sum(), x)[0], wanted)
    assert program.region.left_out


def test_what_something_refers_to_is_needed():
    class Kept(Rotated):
        def forward(self, x):
            self.queries = F.linear(x, self.weight)
            return attention(x, self.weight, self.angles)

    module = Kept()
    program = Program(module, ROTATED, "aten.mm.default#1")
    program.steps()
    assert program.region.left_out
    assert torch.isfinite(module.queries).all(), "the first product is kept by the module"


def test_a_new_hook_may_keep_anything():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Sigmoid())
    program = Program(module, "aten.sigmoid.default#0")
    assert program.steps()[-1] == ["addmm"]
    seen = []
    module[0].register_forward_hook(lambda module, args, output: seen.append(output))
    assert program.steps() == [[], [], [], []]
    assert all(torch.isfinite(of).all() for of in seen)


def test_a_mode_of_the_program_sees_real_tensors():
    class Finite(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            outputs = operator(*args, **(kwargs or {}))
            assert all(of.isfinite().all() for of in tree_leaves(outputs) if isinstance(of, torch.Tensor))
            return outputs

    program = Program(Rotated(), ROTATED)
    program.steps()
    output = program.forward(torch.randn(4, 8, requires_grad=True))
    assert program.region.left_out
    with Finite():
        output.sum().backward()


def test_a_weight_that_gets_gradients_from_now_on():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid(), nn.Sigmoid())
    module[2].requires_grad_(False)
    program = Program(module, "aten.sigmoid.default#1")
    assert program.steps()[-1] == ["addmm"]
    module[2].requires_grad_(True)
    assert program.steps()[-1] == []


def test_random_numbers_are_drawn_again():
    class Dropping(Rotated):
        def forward(self, x):
            return super().forward(x * torch.rand_like(x)) * torch.rand_like(x)

    program = Program(Dropping(), ROTATED)

    def step(function, seed):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, requires_grad=True)
        return program.gradients(function, x)

    for seed in range(4):
        want, got = step(program.module, seed), step(program.forward, seed)
        assert all(map(torch.equal, want, got))
    assert program.region.left_out


def test_autocast():
    class Cast(Rotated):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    program = Program(Cast(), ROTATED)
    assert "mul" in program.steps()[-1]


def test_a_call_whose_operators_are_timed_leaves_out_the_same_ones():
    seen = []

    def timed(operator, number, run):
        seen.append(operator._schema.name.removeprefix("aten::"))
        return run()

    class Cast(Rotated):
        def forward(self, x):
            queries = F.linear(x, self.weight)
            angles = self.angles.double()  # a cast, which has no place, behind a product that is left out
            one, two = queries.chunk(2, -1)
            rotated = queries * angles.cos().float() + torch.cat((-two, one), -1) * angles.sin().float()
            return F.scaled_dot_product_attention(rotated[None, None], x[None, None], x[None, None])[0, 0]

    program = Program(Cast(), ROTATED)
    program.steps(2)
    expected = program.region.left_out
    program.timed = timed
    program.steps(2)
    assert expected
    assert program.region.left_out == expected
    assert seen.count("_to_copy") >= seen.count("mm") > 0, "casts take time too, and have no place"


def test_recomputation_that_runs_other_operators_is_an_error(monkeypatch):
    program = Program(Moody(), ROTATED)
    program.steps()
    output = program.forward(torch.randn(4, 8, requires_grad=True))
    assert program.region.left_out
    monkeypatch.setattr(Moody, "mood", 1)
    with pytest.raises(RuntimeError, match="ran other operators than in its forward"):
        output.sum().backward()


def test_a_call_that_runs_other_operators_leaves_nothing_out():
    program = Program(Moody(), ROTATED)
    assert program.steps()[-1] == ROTATION
    program.module.mood += 1
    assert program.steps()[-1] == []
    program.module.mood += 1
    assert program.steps()[-1] == ROTATION


def test_an_output_that_was_edited_is_an_error():
    program = Program(Rotated(), ROTATED)
    program.steps()
    output = program.forward(torch.randn(4, 8, requires_grad=True))
    (held,) = program.region.saved.values()
    held.held[0].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_output_of_the_region_may_be_edited_behind_it():
    class Both(Rotated):
        def forward(self, x):
            rotated = F.linear(x, self.weight).sin() * self.angles
            return rotated, rotated * self.angles

    module = Both()

    def step(function):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        one, two = function(x)
        total = two.sum()
        one.detach().mul_(0.0)
        total.backward()
        return x.grad

    program = Program(module, "aten.mul.Tensor#0")
    for _ in range(4):
        assert torch.equal(step(program.forward), step(module))


def test_a_trace_keeps_no_memory():
    program = Program(Rotated(), ROTATED)
    program.steps()
    queries = []
    program.module.register_forward_hook(lambda module, args, output: queries.append(weakref.ref(output)))
    program.steps()
    program.region = None
    assert all(of() is None for of in queries)


@pytest.mark.parametrize("of", [torch.empty(3, 4), torch.empty(4, 3).t(), torch.empty(0, 2), torch.empty(())])
def test_tensors_without_memory(of):
    found = without_memory(shapes(of))
    assert (found.shape, found.stride(), found.dtype) == (of.shape, of.stride(), of.dtype)
    if of.numel():
        with pytest.raises(RuntimeError, match="invalid python storage"):
            found.untyped_storage().data_ptr()
    assert found.untyped_storage().nbytes() == of.untyped_storage().nbytes()


# Casts of weights


class Casts(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator is torch.ops.aten._to_copy.default
        return operator(*args, **(kwargs or {}))


class Casting(nn.Module):
    """Two layers under autocast; with `times`, the first one twice."""

    def __init__(self, times=1):
        super().__init__()
        self.one, self.two, self.times = nn.Linear(8, 8), nn.Linear(8, 8), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.one(x).sigmoid()
        return self.two(x).sigmoid()


@pytest.mark.parametrize(("times", "once"), [(1, True), (2, False)])
def test_autocast_keeps_no_casts_of_weights_that_are_read_once(times, once):
    torch.manual_seed(0)
    module, trace = Casting(times), Trace()
    kept = []

    def step(how):
        module.zero_grad()
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = how(x)
            with Casts() as casts:
                F.linear(x, module.one.weight)
            kept.append(casts.number == 1)
            y.float().sum().backward()
        return [x.grad, *(of.grad for of in module.parameters())]

    def again(x):
        return recomputed(module, Region(saving(["aten.addmm.default#0"]), trace=trace, alone=True), x)

    want = step(module)
    for _ in range(4):
        assert all(map(torch.equal, step(again), want))
    assert trace.casts_once == once
    assert kept == [True, True, *[not once] * 3]
