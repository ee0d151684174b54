"""Which saved tensor is which: addresses that are used again, edits in place, views, passes."""

from __future__ import annotations

import pytest
import torch
from adversary.device import AdversarialDevice
from adversary.harness import check
from adversary.layers import Layers, numbers, saving
from adversary.models import ROWS, WIDTH
from torch import Tensor

import actoffload

pytestmark = pytest.mark.filterwarnings("ignore:num_layers=2 of model_layers=3 leaves one resident layer")


# Addresses


def sevens() -> Tensor:
    """Return a tensor that is made by one allocation, so that it gets the address that was freed last."""
    return torch.full((ROWS, WIDTH), 7.0)


def at_one_of(addresses: set[int]) -> Tensor | None:
    """Make tensors until one has its storage at an address from the set; None if none is given away."""
    others = []
    for _ in range(300):
        tensor = sevens()
        if tensor.untyped_storage()._cdata in addresses:
            return tensor
        others.append(tensor)
    return None


def test_an_address_is_reused_once_nothing_refers_to_it() -> None:
    """The tests below can fail: PyTorch does use addresses again."""
    tensors = [sevens() for _ in range(20)]
    addresses = {tensor.untyped_storage()._cdata for tensor in tensors}
    tensors.clear()
    assert at_one_of(addresses) is not None


def test_the_address_of_a_storage_on_the_host_is_not_given_away(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(2, 3)  # one resident layer: the first leaves before the second, which is copied too
    ones = [torch.ones(ROWS, WIDTH) for _ in range(20)]
    addresses = {tensor.untyped_storage()._cdata for tensor in ones}

    def first() -> Tensor:
        y = saving(w, ones[0])
        for tensor in ones[1:]:
            y = y + saving(w, tensor)
        ones.clear()
        return y

    found: list[Tensor | None] = []

    def second() -> Tensor:
        device.collect()
        found.append(at_one_of(addresses))
        return saving(w, sevens() if found[0] is None else found[0])

    (layers(first) + layers(second)).sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * 27 * ROWS * WIDTH)
    assert found == [None]


def test_a_mark_ends_with_its_storage(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(None, 1)
    marked = [sevens() for _ in range(20)]
    actoffload.mark_not_offload(*marked)
    addresses = {tensor.untyped_storage()._cdata for tensor in marked}
    marked.clear()
    other = at_one_of(addresses)
    layers(lambda: saving(w, sevens() if other is None else other)).sum().backward()
    assert layers.statistics.tensors_kept == {}


def test_the_note_that_a_tensor_is_final_ends_with_its_storage(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(1, 3)

    def layer() -> Tensor:
        final = [sevens() for _ in range(20)]
        actoffload.start_offload(*final)
        addresses = {tensor.untyped_storage()._cdata for tensor in final}
        final.clear()
        device.collect()
        other = at_one_of(addresses)
        other = sevens() if other is None else other
        device.produced(other)
        return saving(w, other)

    layers(layer).sum().backward()
    assert device.violations == []


# Versions


@pytest.mark.parametrize("moved", ["on the device", "leaving", "on the host", "back"])
def test_an_edit_in_place_after_saving_is_an_error(device: AdversarialDevice, w: Tensor, moved: str) -> None:
    layers = Layers(None, 1)
    h = numbers()
    y = layers(lambda: saving(w, h))
    steps = [
        layers.controller.start_offload_layer,
        layers.controller.release_activation_forward_gpu_memory,
        layers.back,
    ]
    for step in steps[: ["on the device", "leaving", "on the host", "back"].index(moved)]:
        step(0)
    h.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        y.sum().backward()
    del y
    assert layers.statistics.resident_bytes == 0


def test_an_edit_in_place_of_a_kept_tensor_is_an_error(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(None, 1)
    small = torch.ones(2)
    y = layers(lambda: saving(w, small))
    small.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_each_version_has_a_copy_of_its_own(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(2, 3)
    h = numbers()
    before = layers(lambda: saving(w, h))
    h.add_(1.0)
    after = layers(lambda: saving(w, h))
    after.sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * h.sum())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()


# Views of storages that have left


def test_a_larger_view_of_a_reloaded_storage(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(None, 2)
    h = numbers()
    first = layers(lambda: saving(w, h[:2]))
    layers.out(0)
    layers.back(0)
    second = layers(lambda: saving(w, h))
    layers.out(1)
    (first + second).sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * h[:2].sum() + h.sum())


def test_a_larger_view_of_a_storage_on_the_host(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(2, 3)
    h = numbers()
    first = layers(lambda: saving(w, h[:2]))
    second = layers(lambda: saving(w, h))
    (first + second).sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * h[:2].sum() + h.sum())


# Passes


def test_a_partial_forward_ends_with_its_backward(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(1, 3)
    part = layers(lambda: saving(w, numbers()))
    part.sum().backward(retain_graph=True)
    outputs = [layers(lambda: saving(w, numbers())) for _ in range(2)]
    assert layers.statistics.passes == 2
    del part, outputs
    check(device, layers.context)


def test_a_gradient_inside_a_layer_does_not_end_the_forward(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(1, 3)
    outputs = [layers(lambda: saving(w, numbers()))]

    def penalty() -> Tensor:
        (slope,) = torch.autograd.grad(outputs[0].sum(), w, retain_graph=True)
        return saving(w, slope)

    outputs += [layers(penalty), layers(lambda: saving(w, numbers()))]
    assert layers.statistics.passes == 1
    torch.stack(outputs).sum().backward()
    slope = torch.ones_like(w) * numbers().sum()
    assert torch.equal(w.grad, 2 * slope + slope.sum())
    outputs.clear()
    check(device, layers.context)


def test_a_backward_in_parts_keeps_what_is_reloaded_for_the_next_part(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(1, 4)
    outputs = [w * 1.0]
    for k in range(4):
        outputs.append(layers(lambda k=k: saving(outputs[k], numbers(k) / 4096)))  # type: ignore[misc]
    grad = torch.ones_like(w)
    for k in (3, 2, 1):
        (grad,) = torch.autograd.grad(outputs[k + 1], outputs[k], grad)
    (grad,) = torch.autograd.grad(outputs[1], w, grad)
    expected = torch.ones_like(w)
    for k in (3, 2, 1, 0):
        expected = expected * (numbers(k) / 4096).sum()
    assert torch.equal(grad, expected)
    assert layers.statistics.reloaded_ahead == 1
    assert layers.statistics.reloaded_on_demand == 0
    outputs.clear()
    check(device, layers.context)
