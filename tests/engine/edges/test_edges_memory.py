from __future__ import annotations

import pytest
import torch
from adversary.device import AdversarialDevice
from adversary.harness import check
from adversary.layers import STORAGE, Layers, numbers, saving
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

pytestmark = pytest.mark.filterwarnings("ignore:num_layers=2 of model_layers=3 leaves one resident layer")


def test_a_released_storage_is_freed_and_the_statistics_say_so(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(None, 1)
    h = numbers()
    memory = StorageWeakRef(h.untyped_storage())
    y = layers(lambda: saving(w, h) + saving(w, h.t()) + saving(w, h[2:]))
    del h
    layers.controller.start_offload_layer(0)
    assert not memory.expired()
    assert layers.statistics.resident_bytes == STORAGE
    layers.controller.release_activation_forward_gpu_memory(0)
    assert memory.expired()
    assert layers.statistics.resident_bytes == 0
    y.sum().backward()
    h = numbers()
    assert torch.equal(w.grad, torch.ones_like(w) * h.sum() + h.sum() + h[2:].sum())
    del y
    check(device, layers.context)


def test_a_storage_that_a_resident_layer_saves_too_does_not_leave(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(1, 3)
    h = numbers()
    outputs = [layers(lambda: saving(w, h)) for _ in range(3)]
    torch.stack(outputs).sum().backward()
    assert layers.statistics.tensors_offloaded == 1
    assert layers.statistics.bytes_reloaded == 0
    assert torch.equal(w.grad, torch.full_like(w, 3.0) * h.sum())
    del outputs
    check(device, layers.context)


def test_a_retained_graph_goes_back_to_the_host(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(2, 4)
    outputs = [layers(lambda k=k: saving(w, numbers(k))) for k in range(4)]  # type: ignore[misc]
    resident = layers.statistics.resident_bytes
    loss = torch.stack(outputs).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert layers.statistics.resident_bytes == resident == 2 * STORAGE
    assert layers.statistics.bytes_reloaded == 4 * STORAGE
    del outputs, loss
    check(device, layers.context)


def test_what_backward_has_used_leaves_at_once(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(2, 4)
    seen: list[int] = []
    x = w * 1.0
    x.register_hook(lambda grad: seen.append(layers.statistics.resident_bytes))
    for k in range(4):
        x = layers(lambda k=k, x=x: saving(x, numbers(k)))  # type: ignore[misc]
        x.register_hook(lambda grad: seen.append(layers.statistics.resident_bytes))
    x.sum().backward(retain_graph=True)
    # Layers 2 and 3 are retained; at the end of the backward of layer 0, layer 1 has gone again.
    assert [count // STORAGE for count in seen] == [2, 2, 3, 4, 3]
    assert layers.statistics.resident_bytes == 2 * STORAGE
    del x
    check(device, layers.context)


def test_closing_the_context_in_flight(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(None, 1)
    first = layers(lambda: saving(w, numbers()[:, 3:9]) + saving(w, numbers(1.0)) + saving(w, numbers(2.0, 40)))
    layers.out(0)
    layers.context.close()
    assert layers.statistics.host_bytes == 0
    second = layers(lambda: saving(w, numbers(3.0)))
    layers.out(0)
    held = layers.statistics.host_bytes
    first.sum().backward()
    del first
    third = layers(lambda: saving(w, numbers(4.0, 40)) + saving(w, numbers(5.0)[:, 3:9]))
    layers.out(0)
    assert layers.statistics.host_bytes > held  # what the first pass gave back belongs to the old pool
    second.sum().backward()
    third.sum().backward()
    kept = [numbers()[:, 3:9], numbers(1.0), numbers(2.0, 40), numbers(3.0), numbers(4.0, 40), numbers(5.0)[:, 3:9]]
    expected = torch.zeros_like(w)
    for group in (kept[:3], kept[3:4], kept[4:]):
        expected += sum(torch.ones_like(w) * t.sum() for t in group)
    assert torch.equal(w.grad, expected)
    del second, third
    check(device, layers.context)


def test_memory_that_two_layers_save_is_freed_by_the_later_release(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(None, 2)
    whole = [numbers()]
    outputs = [layers(lambda: saving(w, whole[0][:4])), layers(lambda: saving(w, whole[0][4:]))]
    whole.clear()
    for layer in (0, 1):
        layers.controller.start_offload_layer(layer)
    for layer, resident in ((0, STORAGE), (1, 0)):
        layers.controller.release_activation_forward_gpu_memory(layer)
        assert layers.statistics.resident_bytes == resident
    torch.stack(outputs).sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * numbers()[:4].sum() + numbers()[4:].sum())
    del outputs
    check(device, layers.context)


def test_what_autograd_holds_outlives_what_made_it(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(1, 3)
    h = numbers() * w.detach()
    with layers.context:
        # Called here as autograd would; in a graph, its hooks happen to keep the pass as well.
        current = layers.context.current_pass
        saved = current.packer(current.layers[-1])(h)
    layers.context.new_pass()
    del current
    assert torch.equal(saved.unpack(), h)
