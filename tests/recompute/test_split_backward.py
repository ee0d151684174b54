"""Regions under a split backward: recomputed once for the inputs and the weights, equal bits, nothing left."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from actoffload import offload
from actoffload._torch.autograd import NO_BACKWARD, backward_id
from actoffload.recompute import Region, Reuse, State, Structure, Trace, never, recomputed, worth_saving

POLICIES = {"nothing": never, "products": worth_saving, "everything": lambda call: True}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
WIDTH = 16
AGAIN = Counter[nn.Module]()
"""Recomputations of each block; an attribute would be that of the forward again."""


class Counted(nn.Module):
    """Counts its recomputations, and refers weakly to what it makes in them."""

    def __init__(self):
        super().__init__()
        self.made = []

    def forward(self, x):
        if backward_id() != NO_BACKWARD:
            AGAIN[self] += 1
        return self.inner(x)

    def note(self, tensor):
        if backward_id() != NO_BACKWARD:
            self.made.append(weakref.ref(tensor.untyped_storage()))
        return tensor


class MLP(Counted):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)

    def inner(self, x):
        hidden = self.note(self.drop(torch.sin(self.note(self.up(self.norm(x))))))
        return x + self.drop(self.down(hidden))


class Block(Counted):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.25, batch_first=True, norm_first=True)

    def inner(self, x):
        return self.note(self.layer(x))


class Shared(Counted):
    """Three groups of parameters that share an input, and an activation without parameters."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def inner(self, x):
        q, k, v = self.q(x), self.k(x * self.gain), self.v(x)
        return x + (q @ k.transpose(-1, -2)).softmax(-1) @ (v * self.gain)


class Bare(Counted):
    """Has no parameters, so that the weights read nothing of it."""

    def inner(self, x):
        return self.note(torch.sin(self.note(torch.exp(x * 0.1)))).cos()


KINDS = {"mlp": MLP, "block": Block, "shared": Shared, "bare": Bare}


class Stage(nn.Module):
    """Blocks that are recomputed where `regions` is set."""

    def __init__(self, kind, policy=never, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(KINDS[kind]() for _ in range(layers))
        self.last = nn.LayerNorm(WIDTH)  # stages cannot return views, as linear layers do here
        self.policy, self.regions = policy, False
        self.reuses = [Reuse() for _ in range(layers)]
        self.traces = [Trace() for _ in range(layers)]

    def forward(self, x):
        for block, reuse, trace in zip(self.blocks, self.reuses, self.traces, strict=True):
            if self.regions:
                x = recomputed(
                    block, Region(self.policy, trace=trace, state=State(block, Structure(block)), reuse=reuse), x
                )
            else:
                x = block(x)
        return self.last(x)

    def weights(self):
        return list(self.parameters())


class Microbatch:
    """One microbatch of a stage, as `torch.distributed.pipelining` runs it."""

    def __init__(self, stage, number):
        self.stage = stage
        self.x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(number), requires_grad=True)
        self.y = (stage(self.x),)
        self.gradient = (torch.linspace(-1, 1, self.y[0].numel()).view_as(self.y[0]) * (number + 1),)

    def inputs(self):
        stage, self.stage = self.stage, None
        (found,), self.groups = stage_backward_input(self.y, self.gradient, (self.x,), iter(stage.weights()))
        return found

    def full(self):
        return stage_backward(self.y, self.gradient, (self.x,))[0]


def one_by_one(stage, count):
    for number in range(count):
        each = Microbatch(stage, number)
        yield each.inputs()
        stage_backward_weight(iter(stage.weights()), each.groups)


def in_flight(stage, count):
    """All forwards, then the backwards of the inputs, and then those of the weights."""
    each = [Microbatch(stage, number) for number in range(count)]
    yield from [of.inputs() for of in each]
    for of in each:
        stage_backward_weight(iter(stage.weights()), of.groups)


def steady(stage, count):
    """The weights of a microbatch after the inputs of the next one; the last has a full backward."""
    each = [Microbatch(stage, number) for number in range(count)]
    before = None
    for of in each[:-1]:
        yield of.inputs()
        if before is not None:
            stage_backward_weight(iter(stage.weights()), before.groups)
        before = of
    yield each[-1].full()
    if before is not None:
        stage_backward_weight(iter(stage.weights()), before.groups)


ORDERS = {"one by one": one_by_one, "in flight": in_flight, "steady": steady}


def gradients(stage, order, count=3, seed=1):
    torch.manual_seed(seed)
    stage.zero_grad()
    for block in stage.blocks:
        AGAIN[block] = 0
        block.made.clear()
    found = list(order(stage, count))
    return [*found, *(weight.grad.clone() for weight in stage.parameters()), torch.rand(1)]


def compare(stage, order, count=3):
    """Run without recomputation and with it; return how often each block was recomputed."""
    stage.regions = False
    want = gradients(stage, order, count)
    assert [AGAIN[block] for block in stage.blocks] == [0, 0]
    stage.regions = True
    found = gradients(stage, order, count)
    assert all(map(torch.equal, want, found))
    return [AGAIN[block] for block in stage.blocks]


def nothing_left(stage):
    gc.collect()
    return all(ref() is None for block in stage.blocks for ref in block.made)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@policies
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_once_with_equal_bits(kind, policy, order):
    stage = Stage(kind, policy)
    for _ in range(2):  # the first step shows what the weights read
        assert compare(stage, order) == [3, 3]
        assert nothing_left(stage)


@pytest.mark.parametrize("kind", KINDS)
def test_without_reuse_each_group_of_parameters_recomputes(kind):
    stage = Stage(kind)
    stage.reuses = [None, None]
    assert max(compare(stage, one_by_one)) > 3 or kind == "bare"


def between(stage):
    """Return the bytes alive of what blocks made, after the backward of the inputs."""
    each = Microbatch(stage, 0)
    each.inputs()
    alive = (ref() for block in stage.blocks for ref in block.made)
    size = sum(of.nbytes() for of in alive if of is not None)
    stage_backward_weight(iter(stage.weights()), each.groups)
    left = [ref for block in stage.blocks for ref in block.made if ref() is not None]
    assert not left
    for block in stage.blocks:
        block.made.clear()
    return size


def test_only_what_the_weights_read_is_kept_between_both_halves():
    """Of the two tensors that are noted, the weights read the second one."""
    gc.disable()  # reference counting alone frees all
    try:
        stage = Stage("mlp")
        stage.regions = True
        hidden = 2 * 4 * 2 * WIDTH * 4
        assert between(stage) == 2 * 2 * hidden
        assert between(stage) == 2 * hidden
        assert between(stage) == 2 * hidden
    finally:
        gc.enable()


def test_a_full_backward_keeps_nothing():
    stage = Stage("mlp")
    stage.regions = True
    each = Microbatch(stage, 0)
    alive = []
    stage.blocks[0].norm.weight.register_hook(lambda gradient: alive.extend(stage.blocks[0].made))
    each.full()
    assert [ref() for ref in alive] == [None, None]
    assert [reuse.late for reuse in stage.reuses] == [None, None]
    Microbatch(stage, 1)
    assert [reuse.late for reuse in stage.reuses] == [None, None]


def test_what_the_weights_read_against_expectation_is_recomputed_once_more():
    stage = Stage("block")
    frozen = [weight for block in stage.blocks for weight in block.layer.linear1.parameters()]
    for weight in frozen:
        weight.requires_grad_(False)
    stage.regions = True
    each = [Microbatch(stage, number) for number in (0, 1)]
    for of in each:
        of.inputs()
        # As a schedule: parameters without gradients are no weights.
        stage_backward_weight((of for of in stage.weights() if of.requires_grad), of.groups)
    del each, of
    Microbatch(stage, 0)
    before = [len(reuse.late) for reuse in stage.reuses]
    for weight in frozen:
        weight.requires_grad_(True)
    assert max(compare(stage, one_by_one)) > 3
    assert compare(stage, one_by_one) == [3, 3]
    assert all(len(reuse.late) > few for reuse, few in zip(stage.reuses, before, strict=True))


@pytest.mark.parametrize("learned", [False, True])
@policies
def test_a_step_that_ends_between_both_halves(policy, learned):
    gc.disable()
    try:
        stage = Stage("mlp", policy)
        stage.regions = True
        if learned:
            gradients(stage, one_by_one)
            gradients(stage, one_by_one)
        each = [Microbatch(stage, number) for number in (0, 1)]
        each[0].inputs()
        assert any(ref() is not None for block in stage.blocks for ref in block.made)
        del each
        assert not any(ref() is not None for block in stage.blocks for ref in block.made)
    finally:
        gc.enable()
    compare(stage, one_by_one)
    assert compare(stage, one_by_one) == [3, 3]


class FailedError(Exception):
    pass


def test_an_error_in_a_recomputation():
    stage = Stage("mlp")
    compare(stage, one_by_one)
    each = Microbatch(stage, 0)
    sin, calls = torch.sin, []

    def failing(x):
        calls.append(x.shape)
        raise FailedError

    torch.sin = failing
    try:
        with pytest.raises(RuntimeError, match="Failed to run stage backward input") as caught:
            each.inputs()
    finally:
        torch.sin = sin
    assert isinstance(caught.value.__cause__, FailedError)
    assert len(calls) == 1
    del each, caught
    assert nothing_left(stage)
    assert compare(stage, in_flight) == [3, 3]


@pytest.mark.parametrize("learned", [False, True])
def test_an_edit_between_both_halves_is_caught(learned):
    stage = Stage("mlp")
    stage.regions = True
    if learned:
        gradients(stage, one_by_one)
    each = Microbatch(stage, 0)
    each.inputs()
    with torch.no_grad():
        stage.blocks[1].norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage_backward_weight(iter(stage.weights()), each.groups)


def test_saved_outputs_are_dropped_when_they_have_been_returned():
    """Unless a retained graph may need them again."""
    for reuse, left in ((None, 2), (Reuse(), 0)):
        block = Block()
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        region = Region(worth_saving, trace=Trace(known=True), reuse=reuse)
        y = recomputed(block, region, x)
        assert len(region.saved) >= 4
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert (len(region.saved) > left) == (reuse is None)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SCHEDULES = [ScheduleZBVZeroBubble, ScheduleInterleavedZeroBubble]


@pytest.mark.filterwarnings("ignore::actoffload.ReferenceDeviceWarning")
@pytest.mark.parametrize("whole", [False, True], ids=["modules", "schedule"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda of: of.__name__)
@pytest.mark.usefixtures("alone", "offload_small_tensors")
def test_offloaded_stages_of_a_zero_bubble_schedule(schedule, whole):
    """Groups that `offload` recomputes, in stages that a real schedule runs."""

    def step(recompute):
        torch.manual_seed(0)
        modules = [nn.Sequential(Block(), MLP(), nn.LayerNorm(WIDTH)) for _ in range(2)]
        how = {"layers": ["0", "1"], "recompute": recompute, "min_bytes": 64}
        if recompute is not None and not whole:
            for module in modules:
                offload(module, **how)
        stages = [PipelineStage(module, k, 2, torch.device("cpu")) for k, module in enumerate(modules)]
        steps = schedule(stages, 4, loss_fn=lambda y, target: ((y - target) ** 2).mean())
        if recompute is not None and whole:
            offload(steps, **how)
        blocks = [block for module in modules for block in module[:2]]
        found, counts = [], []
        for _ in range(2):
            for block in blocks:
                AGAIN[block] = 0
                block.zero_grad()
            losses = []
            steps.step(torch.randn(8, 4, WIDTH), target=torch.randn(8, 4, WIDTH), losses=losses)
            counts.append([AGAIN[block] for block in blocks])
            found += [*losses, *(weight.grad.clone() for module in modules for weight in module.parameters())]
        gc.collect()
        assert [ref() for block in blocks for ref in block.made] == [None] * sum(len(of.made) for of in blocks)
        return found, counts

    want, counts = step(None)
    assert counts == [[0] * 4] * 2
    for recompute in ([], True):
        found, counts = step(recompute)
        assert all(map(torch.equal, want, found))
        assert counts == [[4] * 4] * 2
