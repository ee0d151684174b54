"""The largest inputs that would train: as promised from the costs of other inputs, and as trained then."""

import warnings

import pytest
import torch
from timed_device import Timed, TimedModel, offload, seconds, settle, started, step
from torch import nn

import actoffload
from actoffload.tune.meter import count_tokens

MIB = 2**20


def trained(elements: int = 4, memory: int = 2**40, link: float = 1e6, **options) -> tuple:
    """Return a device, a model and its handle, whose plan stands, and the largest peak of all passes."""
    device, model, handle = started(link, memory=memory, **options)
    device.forget_peak()
    settle(model, handle, elements)
    step(model, elements)
    return device, model, handle, device.peak()


@pytest.mark.parametrize("options", [{"memory_budget": 20 * MIB}, {"memory": 20 * MIB}, {"memory": 80 * MIB}])
def test_the_prediction_for_the_measured_inputs_is_that_of_the_plan(options):
    _, _, handle, _ = trained(**options)
    fit = handle.fits(tokens=4)
    assert fit.fits
    assert (fit.factor, fit.plan) == (1.0, handle.plan)
    assert (fit.peak_bytes, fit.seconds) == (handle.plan.peak_bytes, handle.plan.seconds)
    assert fit.limit_bytes >= fit.peak_bytes


@pytest.mark.parametrize(("link", "limit"), [(3e5, 12 * MIB), (1e7, 30 * MIB)])
def test_the_largest_inputs_train_within_the_limit_in_the_time_that_was_predicted(link, limit):
    _, _, handle, _ = trained(link=link, memory_budget=20 * MIB)
    fit, more = handle.fits(memory=limit), handle.fits(tokens=200, memory=limit)
    handle.remove()
    assert fit.fits
    assert not more.fits
    assert more.peak_bytes > limit
    assert "do not fit" in str(more)
    device, model, handle, peak = trained(fit.tokens, link=link, memory_budget=limit)
    assert peak <= limit, "in all passes"
    device.forget_peak()
    assert seconds(model, device, fit.tokens) == pytest.approx(fit.seconds, rel=0.05)
    assert device.peak() <= limit
    handle.remove()
    with pytest.warns(UserWarning, match="smallest peak"):
        trained(round(1.4 * fit.tokens), link=link, memory_budget=limit)[2].remove()


def test_a_model_that_fits_may_have_larger_inputs():
    _, _, handle, _ = trained(memory=40 * MIB, count=4)
    assert not handle.plan.offloaded
    fit = handle.fits()
    handle.remove()
    assert fit.factor > 3.0
    assert fit.plan.recomputed
    _, _, handle, peak = trained(fit.tokens, memory=40 * MIB, count=4)
    assert peak <= 40 * MIB


def void(tensor: torch.Tensor) -> None:
    """Return nothing."""


class Weighted(TimedModel):
    """Blocks whose weights have gradients that count as memory of the device."""

    def __init__(self, device: Timed, nbytes: int) -> None:
        super().__init__(device, 4, nbytes=MIB)
        for block in self.blocks:
            block.bias = nn.Parameter(torch.zeros(nbytes // 4))
            block.bias.register_post_accumulate_grad_hook(lambda weight: void(device.count(weight.grad)))
            block.register_forward_hook(lambda block, args, y: y + block.bias.sum())


def test_gradients_do_not_grow_with_the_inputs():
    device = Timed(1e6, 1e6, memory=2**40)
    model = Weighted(device, 4 * MIB)
    handle = offload(model, device, memory_budget=24 * MIB)
    for _ in range(8):
        model.zero_grad()
        step(model)
    fit = handle.fits(tokens=8, memory=24 * MIB)
    assert fit.fits, "16 MiB of gradients stay the same"
    assert fit.peak_bytes < 24 * MIB


def test_host_memory_is_a_limit():
    _, _, handle, _ = trained(link=1e7, memory_budget=20 * MIB, recompute=False, max_host_bytes=64 * MIB)
    fit = handle.fits(memory=60 * MIB)
    assert fit.fits
    assert fit.plan.offloaded_bytes <= 64 * MIB
    assert handle.fits(tokens=6, memory=100 * MIB).plan.offloaded_bytes <= 64 * MIB
    assert not handle.fits(tokens=100, memory=100 * MIB).fits


def test_tokens_are_the_largest_input_of_whole_numbers():
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 1, 3, 3, dtype=torch.bool)
    assert count_tokens([ids, mask, torch.zeros(100)]) == 6
    assert count_tokens([mask, torch.zeros(2, 3)]) == 18
    assert count_tokens([]) == 0


def test_what_is_not_known_is_said():
    device, model, handle = started(count=6)
    with pytest.raises(RuntimeError, match="not known yet"):
        handle.fits()
    handle.remove()
    with pytest.raises(RuntimeError, match="removed"):
        handle.fits()
    with offload(model, device, num_layers=2) as handle:
        for unknown in (handle.fits, handle.frontier):
            with pytest.raises(RuntimeError, match="Nothing is measured"):
                unknown()
    device.memory = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = offload(model, device)
        settle(model, handle)
    with pytest.raises(RuntimeError, match="pass memory="):
        handle.fits()
    assert handle.fits(memory="1GiB").fits


@pytest.mark.parametrize(
    ("arguments", "error"), [({"tokens": 0}, ValueError), ({"tokens": 1.5}, TypeError), ({"memory": "24"}, ValueError)]
)
def test_wrong_arguments(arguments, error):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    with actoffload.offload(model) as handle, pytest.raises(error, match=next(iter(arguments))):
        handle.fits(**arguments)


def test_several_forwards_before_a_backward():
    _device, model, handle = started(count=6, memory_budget=60 * MIB)
    earlier = model(torch.zeros(4, requires_grad=True))
    for _ in range(12):
        later = model(torch.zeros(4, requires_grad=True))
        earlier.sum().backward()
        earlier = later
    with pytest.raises(RuntimeError, match=r"[Ss]everal forwards run before a backward"):
        handle.fits()
