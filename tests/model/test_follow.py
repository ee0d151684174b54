"""What `offload` adds to the modules that it follows, its removal, and the forwards of these modules."""

import warnings
import weakref

import pytest
import torch
from helpers import alive, no_gc
from plan_calls import copied
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_model import UNIT, Wave, Waves, data, measured, moved, nothing_installed, offload

import actoffload
from actoffload._torch.tensors import saved_tensor_hooks
from actoffload.engine.passes import ModelPass
from actoffload.model import follow
from actoffload.report import Reason
from actoffload.schedule import Plan


def test_a_module_of_two_handles_is_followed_until_both_are_removed():
    blocks = Waves(6)
    model = nn.Sequential(blocks)
    inner = offload(blocks)
    outer = offload(model, layers="0.blocks")
    outer.remove()
    assert moved(inner, model) == 8 * UNIT
    inner.remove()
    assert all("forward" not in vars(module) for module in model.modules())
    nothing_installed(model)


def test_an_interrupt_of_offload_leaves_the_model_as_it_was(monkeypatch):
    model = Waves(6)
    names = [set(vars(module)) for module in model.modules()]
    left = iter(range(4))

    def make_forward(*args, make=follow._make_forward):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return make(*args)

    monkeypatch.setattr(follow, "_make_forward", make_forward)
    with pytest.raises(KeyboardInterrupt):
        offload(model, layers="blocks")
    monkeypatch.undo()
    assert [set(vars(module)) for module in model.modules()] == names
    assert actoffload.OffloadHandle.of(model) is None
    assert moved(offload(model), model) == 8 * UNIT


# Forwards


def test_what_a_model_saves_while_it_handles_an_exception_is_kept():
    class Fails(Wave):
        def forward(self, x):
            super().forward(x)
            raise KeyError

    class Handles(Waves):
        def forward(self, x):
            try:
                x = self.blocks[0](x)
            except KeyError:
                x = torch.sin(x * 3.0)
            return self.blocks[2](self.blocks[1](x))

    model = Handles(3)
    model.blocks[0] = Fails()
    handle = offload(model, num_layers=2)
    model(data().requires_grad_()).sum().backward()
    assert handle.statistics().bytes_kept[Reason.OUTSIDE] == UNIT


def test_a_graph_outlives_the_model_and_the_handle_and_keeps_no_module():
    model = Waves(6)
    x = data().requires_grad_()
    want = torch.autograd.grad(model(x).sum(), x)
    handle = offload(model)
    with no_gc():
        y = model(x)
        refs = [weakref.ref(block) for block in model.blocks]
        engine = handle._engine
        handle.remove()
        del model, handle
        assert [ref() for ref in refs] == [None] * 6
        assert torch.equal(*torch.autograd.grad(y.sum(), x), *want)
        del y
        assert engine.statistics().host_bytes_used == 0


def test_offloading_is_enabled_in_a_forward_only():
    seen = []
    model = Waves(6)
    model.blocks[3].register_forward_hook(lambda *_: seen.append(actoffload.is_cpu_offload_enabled()))
    handle = offload(model)
    model(data())
    with handle.paused():
        model(data())
    assert seen == [True, False]
    assert not actoffload.is_cpu_offload_enabled()


def test_a_pass_is_freed_with_its_graph():
    model = Waves(6)
    offload(model)
    with no_gc():
        before = alive(ModelPass)
        y = model(data())
        assert alive(ModelPass) == before + 1
        y.sum().backward()
        del y
        assert alive(ModelPass) == before


def test_a_pass_whose_end_of_a_group_failed_is_not_continued(monkeypatch):
    """The next block of a loop begins a pass of its own."""
    model = Waves(6)
    handle = offload(model)
    ends = iter([KeyError])

    def forward_end(self, layer, end=ModelPass.forward_end):
        end(self, layer)
        for error in ends:
            raise error

    monkeypatch.setattr(ModelPass, "forward_end", forward_end)
    x = data()
    for block in model.blocks:
        try:
            x = block(x)
        except KeyError:
            x = x * 1.0
    x.sum().backward()
    assert handle.statistics().passes == 2


def test_a_recomputed_block_begins_no_pass():
    class Checkpointed(Waves):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed(6)
    handle = offload(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(data().requires_grad_()).sum().backward()
    assert handle.statistics().passes == 1


def test_saved_tensor_hooks_are_installed_in_the_groups_that_a_plan_offloads_alone():
    seen = []

    class Asking(Wave):
        def forward(self, x):
            seen.append(saved_tensor_hooks() is not None)
            return super().forward(x)

    model = Waves(6, Asking)
    calls = copied({k: (k + 1, k + 1) for k in (0, 1, 3)})
    names = tuple(f"blocks.{k}" for k in range(6))
    handle = offload(model, plan=Plan.of(6, calls, names=names, nbytes=(2 * UNIT,) * 6))
    want = [True] * 6, [True, True, False, True, False, False]  # the first forward shows what is saved between groups
    for hooks in want:
        seen.clear()
        statistics = measured(handle, lambda: model(data()).sum().backward())
        assert seen == hooks
        assert statistics.bytes_offloaded == 3 * Wave.SAVES * UNIT
    nothing_installed()
