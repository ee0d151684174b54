"""The note on an out-of-memory error: what holds the memory, and what would help."""

import logging
import weakref

import pytest
import torch
from helpers import no_gc
from timed_device import Timed, TimedBlock, done, small, step
from torch import nn
from whole_model import UNIT, Wave, Waves, data, nothing_installed, offload

from actoffload._text import size
from actoffload.device import ReferenceDevice
from actoffload.model import reporting
from actoffload.replay.call import Slot

MIB = 2**20


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("none")


class Fails(Wave):
    fails = False

    def forward(self, x):
        y = super().forward(x)
        return fail() if self.fails else y


class Outside(Waves):
    """A model with a head outside of its groups."""

    fails = False

    def __init__(self) -> None:
        super().__init__(6)
        self.head = nn.Linear(32, 512)

    def forward(self, x):
        logits = self.head(super().forward(x)).exp()
        return fail() if self.fails else logits


class NoMemory(ReferenceDevice):
    """A device that has memory for some reloads."""

    left = 1000

    def empty_device(self, *args):
        self.left -= 1
        return super().empty_device(*args) if self.left else fail()


def note(error: BaseException) -> list[str]:
    (text,) = error.__notes__
    return text.splitlines()


def failing(model: nn.Module, x: torch.Tensor) -> list[str]:
    model.fails = True
    with pytest.raises(torch.OutOfMemoryError) as error:
        model(x)
    return note(error.value)


def test_in_forward_the_note_has_all_that_is_known():
    model = Waves(6, Fails)
    optimizer = torch.optim.Adam(model.parameters())
    offload(model, layers="blocks", num_layers=1)
    model(data()).sum().backward()
    optimizer.step()
    model.blocks[5].fails = True
    weights = sum(parameter.nbytes for parameter in model.parameters())
    states = 2 * weights + 6 * 4
    # The first of the blocks is offloaded; each of the others saves two storages.
    assert failing(model, data().requires_grad_() * 1.0) == [
        f"actoffload: {size(2 * weights + states + 10 * UNIT)} were in use in the forward of blocks.5:",
        f"  {size(weights)}: weights and buffers",
        f"  {size(weights)}: gradients",
        f"  {size(states)}: optimizer states",
        f"  {size(10 * UNIT)}: saved tensors of groups",
        f"    {size(2 * UNIT)} each: blocks.1 ... 5",
        "What would help:",
        f"- recompute=True: most of {size(10 * UNIT)} would not be saved, and backward runs the operators again.",
        f"- half the batch with twice the gradient accumulation: at least {size(5 * UNIT)} less, at some throughput.",
    ]
    nothing_installed(model)


@pytest.mark.parametrize("left", range(1, 9))
def test_a_reload_in_backward_fails(left):
    """Ahead and on demand."""
    device, model = NoMemory(), Waves(6)
    offload(model, device=device)
    model(data()).sum().backward()
    loss = model(data()).sum()
    device.left = left
    with pytest.raises(torch.OutOfMemoryError) as error:
        loss.backward()
    assert note(error.value)[0].endswith(" were in use in backward:")


def test_of_several_models_the_one_in_backward_is_described():
    device = NoMemory()
    models = [Waves(6), nn.Sequential(*Waves(6).blocks), Waves(6)]
    handles = [offload(model, device=device) for model in models]
    losses = [model(data()).sum() for model in models]
    device.left = 1
    with pytest.raises(torch.OutOfMemoryError) as error:
        losses[1].backward()
    assert f"    {size(2 * UNIT)}: 4" in note(error.value)
    assert len(handles) == 3


def test_values_that_are_computed_again_do_not_fit(monkeypatch):
    model = Waves(6)
    offload(model, recompute=True, num_layers=0)
    model(data()).sum().backward()
    loss = model(data()).sum()
    monkeypatch.setattr(Slot, "unpack", fail)
    with pytest.raises(torch.OutOfMemoryError) as error:
        loss.backward()
    assert "recompute=True" not in " ".join(note(error.value))


def test_with_a_measured_plan_the_note_has_the_cost_of_a_smaller_budget(monkeypatch):
    device, model, handle = small(memory=5 * MIB)
    done(handle, model, device)
    choice = handle.report().next_choice
    assert "memory_budget=" in choice
    monkeypatch.setattr(TimedBlock, "forward", fail)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as error:
        model(torch.zeros(4))
    assert not hasattr(error.value, "__notes__"), "a forward without a graph is not followed"
    lines = failing(model, torch.zeros(4, requires_grad=True))
    assert " of 5.0 MiB were in use in the forward of blocks.0" in lines[0]
    assert f"- {choice}" in lines


@pytest.mark.filterwarnings("ignore:A saved tensor stays on the device")
@pytest.mark.parametrize(("more", "advised"), [({}, False), ({"num_layers": 0}, True)], ids=["measured", "by hand"])
def test_a_first_pass_replays_already(more, advised):
    """What it saves besides, such as random numbers, is no reason to advise it."""

    class Noise(Wave):
        def forward(self, x):
            return super().forward(x) * torch.rand_like(x)

    model = Waves(6, Noise)
    device = Timed(2.5e6, 2.5e6, memory=5 * MIB)
    offload(model, layers="blocks", device=device, max_host_bytes=1, fraction=None, **more)
    model.blocks[5].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as error:
        model(data().requires_grad_() * 1.0)
    lines = note(error.value)
    assert any("saved tensors of groups" in line for line in lines)
    assert any(line.startswith("- recompute=True") for line in lines) is advised


def test_where_nothing_is_followed_the_plan_says_what_is_kept(monkeypatch):
    _device, model, handle = small(memory=100 * MIB)
    step(model, times=6)
    assert not handle.settling
    assert not handle.plan.offloaded
    monkeypatch.setattr(TimedBlock, "forward", fail)
    lines = failing(model, torch.zeros(4, requires_grad=True))
    assert "    1.0 MiB each: blocks.0 ... 5" in lines


def test_what_lies_outside_of_groups_can_be_checkpointed_and_logits_avoided():
    model = Outside()
    offload(model, layers="blocks")
    model(data()).sum().backward()
    lines = failing(model, data())
    assert "34.0 KiB: saved tensors outside of groups" in " ".join(lines)
    assert any("the logits of `head` may be the peak" in line and "use_liger_kernel=True" in line for line in lines)
    assert any(line.startswith("- torch.utils.checkpoint") and "34.0 KiB less" in line for line in lines)


def test_host_memory_that_was_missing():
    model = Waves(6, Fails)
    offload(model, layers="blocks", max_host_bytes=1)
    model.blocks[5].fails = True
    with pytest.warns(UserWarning, match="stays on the device"):
        lines = failing(model, data().requires_grad_() * 1.0)
    assert f"no page-locked memory for {size(8 * UNIT)}: a larger max_host_bytes" in " ".join(lines)


def test_the_note_keeps_nothing_alive_and_never_fails(monkeypatch):
    model = Waves(6, Fails)
    offload(model, layers="blocks")
    model.blocks[5].fails = True
    x = data().requires_grad_() * 1.0
    with no_gc():
        try:
            model(x)
        except torch.OutOfMemoryError as error:
            caught, alive = error, weakref.ref(x)
        del x
        caught.__traceback__ = None
        assert alive() is None
        assert note(caught)
    monkeypatch.setattr(reporting, "on_device", lambda layer: 1 / 0)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(data())
    assert not hasattr(raised.value, "__notes__")


def test_after_an_error_in_backward_the_log_says_that_plans_are_leaner(caplog):
    device, model, handle = small()
    done(handle, model, device)
    device.failed += 1
    with caplog.at_level(logging.WARNING, "actoffload"):
        step(model)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("The device ran out of memory with the plan of TimedModel: plans leave ")
