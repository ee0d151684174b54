"""Programs of all kinds have the bits of the program without offload, with replay and offloaded besides."""

import pytest
import torch
from composing import Block, autocast, dropping, gradients
from recomputing import HELD, WIDTH, Mlp, Net, all_policies, all_ways, batch, check, fractions, policies, train, ways
from torch import nn
from whole_model import offload

from actoffload.device import ReferenceDevice
from actoffload.device.reference import CreatedStorages


@pytest.mark.usefixtures("place")
@all_policies
@fractions
@pytest.mark.parametrize("block", [Mlp, Block, dropping])
def test_steps(block, policy, fraction):
    check(lambda: Net(block), policy=policy, fraction=fraction, freed=0.45 if policy in (True, HELD) else 0.2)


@pytest.mark.parametrize(("policy", "calls"), [(True, 4), (HELD, 2)])
def test_held_values_are_made_once(policy, calls):
    """Otherwise the norm and the activation of a block are made again each time that backward comes to them."""
    counted = []

    def use(model):
        found = train(model, 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found += train(model, 1, 4)
        counted.append(sum(event.name in ("aten::native_layer_norm", "aten::gelu") for event in profile.events()))
        return found

    check(lambda: Net(Block), use, policy=policy)
    without, replayed = counted
    assert replayed - without == 4 * calls


@all_ways
def test_gradients_of_a_part_of_the_inputs(policy, fraction):
    def use(model):
        found = []
        for k in range(4):
            x = batch(k).requires_grad_()
            loss = model(x).square().sum()
            block = model.blocks[1]
            for part in ([x], [block.up.weight], [block.down.weight, model.inp.weight], list(model.parameters())):
                found += torch.autograd.grad(loss, part, retain_graph=True)
            del loss
        return found

    check(lambda: Net(dropping), use, policy=policy, fraction=fraction)


@ways
@pytest.mark.parametrize("how", ["no cache", "cache", "switched between steps"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast(policy, fraction, how, inside):
    class Twice(Net):
        """Calls each block twice, so that the second call finds the cast weights of the first one."""

        def call(self, block, x):
            return block(block(x))

    def use(model):
        found = []
        for k in range(6):
            enabled = how != "switched between steps" or k % 3 > 0
            with torch.autocast("cpu", torch.bfloat16, enabled, cache_enabled=how != "no cache"):
                loss = model(batch(k)).float().square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            found += gradients(model)
        return found

    check(lambda: Twice(dropping), use, policy=policy, fraction=fraction)


@policies
def test_autocast_inside_of_a_group(policy):
    class Cast(Mlp):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return y.float() + super().forward(x)

    check(lambda: Net(Cast), policy=policy)


class Containers(nn.Module):
    """Takes and returns nested containers, and changes the lists that it is given."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Mlp(), Mlp()

    def forward(self, x, skips, *, more, scale=1.0):
        y = self.one(x) + skips.pop() * scale
        z = self.two(torch.tanh(y * more["inner"][0]))
        more["seen"].append(z)
        return {"x": z, "none": None, "text": "a", "sizes": [y.shape[0], (y.sum(),)]}


@ways
def test_containers_keywords_and_outputs_that_are_no_tensors(policy, fraction):
    class Model(Net):
        def forward(self, x):
            x, total = self.inp(x), 0.0
            more = {"inner": (x.sin(),), "seen": []}
            skips = [x.cos() * k for k in range(len(self.blocks))]
            for block in self.blocks:
                out = block(x, skips, more=more, scale=0.5)
                assert (out["none"], out["text"]) == (None, "a")
                x, total = out["x"], total + out["sizes"][1][0] * out["sizes"][0]
            assert not skips
            assert len(more["seen"]) == len(self.blocks)
            return self.head(x) + total * 1e-3 + more["seen"][2]

    check(lambda: Model(Containers), policy=policy, fraction=fraction)


@ways
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_the_program_inside_of_a_group(policy, fraction, reentrant):
    class Checkpointing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = dropping(), Mlp()

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.one, x, use_reentrant=reentrant)
            return torch.tanh(self.two(torch.tanh(x)))

    check(lambda: Net(Checkpointing), policy=policy, fraction=fraction)


def test_the_report_says_what_was_proven():
    model = Net(Mlp)
    with offload(model, recompute=True, fraction=0.0) as handle:
        for k in range(4):
            model(batch(k)).square().mean().backward()
        report = handle.report()
        assert report.proven_bytes > 0
        assert report.samples > 0
        assert "computed again have the same bits, and samples of" in str(report)
    with offload(model, recompute=False, fraction=0.0) as handle:
        model(batch(0)).square().mean().backward()
        assert "computed again" not in str(handle.report())


class Chunks(ReferenceDevice):
    """Takes tensors apart to copy them, as an accelerator does with large ones."""

    def to_host(self, pairs, stream):
        for _, device in pairs:
            torch.empty(0, dtype=device.dtype).set_(device.untyped_storage())
        super().to_host(pairs, stream)


def test_what_the_engine_copies_while_a_call_is_traced_is_no_part_of_it():
    """It seemed to write to the input of the call, so nothing that reads that was replayed."""
    found = []
    for device in (ReferenceDevice(), Chunks()):
        model = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        )
        handle = offload(model, device=device, recompute=True, fraction=1.0)
        for k in range(3):
            model(batch(k).requires_grad_()).sum().backward()
        found.append([(group.name, group.recomputed, group.bytes_saved) for group in handle.report().groups])
    assert found[0] == found[1]


# Casts of weights under autocast, which are made again, whoever made them


SIZES = (16, 24, 16)
CASTS = 4 * 2 * 32 * 64 * 2
"""Bytes of the casts of the weights in the blocks."""


def microbatches(model: nn.Module):
    """Run microbatches of several sizes in one context: the later ones find the casts in the cache of autocast."""
    found = []
    for step in range(5):
        with autocast():
            for k, rows in enumerate(SIZES):
                y = model(batch(step + k, rows)).float()
                y.square().sum().backward()
        found += [y.detach(), *gradients(model)]
    return found


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_gradients_of_microbatches_in_one_context(fraction):
    check(Net, microbatches, fraction=fraction)


@pytest.mark.parametrize("rows", SIZES[:2])
def test_no_cast_of_a_weight_is_kept_when_autocast_has_ended(rows):
    def left(model: nn.Module) -> tuple[int, int]:
        with CreatedStorages() as created:
            with autocast():
                y = model(batch(0, rows))
                inside = created.now
            after = created.now
            y.float().sum().backward()
        return inside, after

    torch.manual_seed(0)
    model = Net()
    _, without = left(model)
    handle = offload(model, layers="blocks.?", recompute=True, fraction=0.0)
    microbatches(model)
    replayed_inside, replayed = left(model)
    assert replayed_inside - replayed >= CASTS, "the cache of autocast has the casts until its context ends"
    assert without - replayed > CASTS
    activations = sum(rows * width * size for width, size in [(32, 4)] * 4)
    weights = [model.inp.weight, model.head.weight]
    outside = sum(2 * weight.numel() for weight in weights) + 4 * rows * 32 * 4
    assert replayed <= activations + outside
    handle.remove()
