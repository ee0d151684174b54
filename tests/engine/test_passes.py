"""Passes: several in flight, several backwards through one, steps that are cut short, forwards without gradients."""

from contextlib import nullcontext

import pytest
import torch
from helpers import Failing, forward, make, make_manual, nothing_held, plain, same_bits
from torch import nn

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


@pytest.fixture
def layers():
    torch.manual_seed(5)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def gradients(layers, loss, **options):
    return torch.autograd.grad(loss, list(layers.parameters()), **options)


def check(layers, seed, *got):
    """Compare gradients with those of the same input without offload."""
    want = gradients(layers, plain(list(layers), data(seed)).square().sum())
    for grads in got:
        assert all(same_bits(a, b) for a, b in zip(want, grads, strict=True))


def run(layers, context, sync, x=None, change=lambda y: y):
    """Return the outputs of all layers, each changed before it is the next one's input; the layers are numbered."""
    x, outputs = data() if x is None else x, []
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
            assert len(context.current_pass.layers) == k + 1
        outputs.append(sync(x))
        x = change(outputs[-1])
    return outputs


# Passes


CHANGES = {"scaled": lambda x: x * 1.5, "cut off": lambda x: x.detach().requires_grad_(), "sine": torch.sin}


@pytest.mark.parametrize("trained", ["all", "not of the first layers", "none"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_with_a_change_between_them_are_of_one_pass(layers, change, trained):
    """Without gradients, or before the first layer that has any, there is no graph to go by."""
    if trained == "not of the first layers":
        layers[:3].requires_grad_(False)
    context, sync = make(3, 6)
    with torch.no_grad() if trained == "none" else nullcontext():
        for k in range(2):
            outputs = run(layers, context, sync, change=change)
            assert context.statistics().passes == k + 1
            if trained == "none":
                assert context.statistics().tensors_saved == 0
            else:
                outputs[-1].sum().backward()


# Backwards


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("call", ["empty_device", "to_device"])
def test_a_backward_without_memory_is_tried_again(layers, call, after):
    """As a program does that catches out-of-memory, frees something and goes on with the retained graph."""
    device = Failing()
    context, sync = make(4, 6, device=device)
    loss = forward(list(layers), data(), context, sync).square().sum()
    gradients(layers, loss, retain_graph=True)
    device.fail(call, after=after)
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        gradients(layers, loss, retain_graph=True)
    check(layers, 0, gradients(layers, loss))
    del loss
    nothing_held(context)


def test_what_a_user_got_from_a_node_stays_his():
    """A saved tensor that was read, or that a second-order graph holds, outlives the release."""
    x, layer = data(), nn.Linear(64, 64)
    context, sync, controller = make_manual(2)
    with context:
        y = layer(x)
    y = sync(y)
    seen = y.grad_fn._saved_mat1
    (first,) = torch.autograd.grad(y.square().sum(), layer.weight, create_graph=True)
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    assert same_bits(seen, x)
    (second,) = torch.autograd.grad(first.sum(), layer.weight)
    assert second.shape == (64, 64)


def test_a_gradient_from_the_middle_brings_nothing_back_ahead(layers):
    """The layers behind still hold their memory, so there is no room to let others in."""
    context, sync = make(2, 6)
    outputs = run(layers, context, sync)
    before = context.statistics()
    torch.autograd.grad(outputs[3].sum(), layers[3][0].weight, retain_graph=True)
    after = context.statistics()
    assert (after.reloaded_ahead, after.reloaded_on_demand) == (0, 0)
    assert after.peak_resident_bytes == before.peak_resident_bytes
    outputs[-1].sum().backward()
    assert context.statistics().reloaded_ahead > 0


@pytest.mark.parametrize("at", range(5))
def test_a_backward_inside_of_a_backward(layers, at):
    """The inner one passes layers that the outer one still needs; each is reloaded once, and ahead."""
    context, sync = make(4, 6)
    outputs = run(layers, context, sync)
    loss = outputs[-1].square().sum()
    inner = []

    def hook(gradient):
        if not inner:
            inner.append(())  # the inner backward comes here too
            inner.append(gradients(layers, loss, retain_graph=True))

    outputs[at].register_hook(hook)
    outer = gradients(layers, loss, retain_graph=True)
    check(layers, 0, inner[1], outer)
    statistics = context.statistics()
    assert statistics.reloaded_on_demand == 0
    # The inner one reloads again only what the outer one had ended: at most layers 2 and 3.
    assert 4 <= statistics.reloaded_ahead <= 6
    assert at < 3 or statistics.reloaded_ahead == 4
    outputs = loss = hook = None
    nothing_held(context)
