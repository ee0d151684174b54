"""Edges of identity, memory and streams: which saved tensor is which, what is freed when, who waits for whom."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adversary.device import AdversarialDevice
from adversary.harness import check, scaled_down
from adversary.layers import STORAGE, Layers, numbers, saving
from adversary.models import ROWS, WIDTH
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import actoffload
from actoffload.device import use
from actoffload.engine.hooks import Packer

pytestmark = pytest.mark.filterwarnings("ignore:num_layers=2 of model_layers=3 leaves one resident layer")


@pytest.fixture(autouse=True)
def _scaled_down() -> Iterator[None]:
    with scaled_down():
        yield


@pytest.fixture(params=["late", "early", "random"])
def device(request: pytest.FixtureRequest) -> Iterator[AdversarialDevice]:
    gc.disable()  # nothing may need it
    try:
        with use(AdversarialDevice(0, request.param)) as device:
            yield device
    finally:
        gc.enable()


@pytest.fixture
def w() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()


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


VIEWS = {"whole": lambda h: h, "rows": lambda h: h[:2], "transposed": lambda h: h.t()}
MOVED = ["on the device", "leaving", "on the host", "back", "used"]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("moved", MOVED)
def test_an_edit_in_place_after_saving_is_an_error(device: AdversarialDevice, w: Tensor, moved: str, view: str) -> None:
    layers = Layers(None, 1)
    h = numbers()
    saved = VIEWS[view](h)
    y = layers(lambda: saving(w, saved))
    loss = y.sum()
    steps = [
        layers.controller.start_offload_layer,
        layers.controller.release_activation_forward_gpu_memory,
        layers.back,
    ]
    for step in steps[: MOVED.index(moved)]:
        step(0)
    if moved == "used":
        loss.backward(retain_graph=True)
    h.add_(1.0)
    shape = ", ".join(map(str, saved.shape))
    expected = rf"modified by an inplace operation.*\[{shape}\]\] is at version 1; expected version 0 instead"
    with pytest.raises(RuntimeError, match=expected):
        loss.backward()
    del y, loss
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


@pytest.mark.parametrize(("reloaded", "stays"), [(False, False), (True, False), (True, True)])
def test_a_larger_view_of_a_storage_that_has_left(
    device: AdversarialDevice, w: Tensor, reloaded: bool, stays: bool
) -> None:
    layers = Layers(None, 2) if reloaded else Layers(2, 3)
    h = numbers()
    first = layers(lambda: saving(w, h[:2]))
    if reloaded:
        layers.out(0)
        layers.back(0)
    second = layers(lambda: saving(w, h))
    if reloaded and not stays:
        layers.out(1)
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


# Memory


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


def test_what_autograd_holds_outlives_what_made_it(device: AdversarialDevice, w: Tensor) -> None:
    layers = Layers(1, 3)
    h = numbers() * w.detach()
    with layers.context:
        # Called here as autograd would; in a graph, its hooks happen to keep the pass as well.
        current = layers.context.current_pass
        packer = Packer()
        packer.take_for(current, current.layers[-1])
        saved = packer.pack(h)
        packer.end()
    layers.context.new_pass()
    del current
    assert torch.equal(saved.unpack(), h)


# Streams


class _Aside(torch.autograd.Function):
    """Hands its gradient on; its backward uses a saved tensor on another stream, without a wait for it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, saved: Tensor, device: AdversarialDevice, side: Any, sums: list[Tensor]) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.device, ctx.side, ctx.sums = device, side, sums
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.device.on(ctx.side):
            (saved,) = ctx.saved_tensors
            ctx.sums.append(saved.sum())
        return grad, None, None, None, None


@pytest.mark.parametrize("first", ["side", "compute"])
def test_two_streams_use_one_storage(device: AdversarialDevice, w: Tensor, first: str) -> None:
    layers = Layers(None, 1)
    side = device.side_stream()
    h = numbers()
    sums: list[Tensor] = []

    def aside() -> Tensor:
        return _Aside.apply(w, h, device, side, sums)  # type: ignore[no-any-return, no-untyped-call]

    def layer() -> Tensor:
        early = saving(w, h) if first == "side" else aside()
        late = aside() if first == "side" else saving(w, h)
        return early + late  # what was made last is used first

    y = layers(layer)
    layers.out(0)
    layers.back(0)
    y.sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * h.sum() + 1.0)
    assert sums == [h.sum()]
    del y
    check(device, layers.context)


@pytest.mark.parametrize("dropped", [(0, 1), (1, 0)], ids=["0 dropped first", "1 dropped first"])
@pytest.mark.parametrize("reloaded", [(0, 1), (1, 0)], ids=["0 back first", "1 back first"])
def test_joined_host_memory_waits_for_every_reader(
    device: AdversarialDevice, w: Tensor, reloaded: tuple[int, int], dropped: tuple[int, int]
) -> None:
    """A tensor that was ready long ago goes to host memory in which two copies back have just been queued."""
    layers = Layers(None, 1)
    slab = layers(lambda: saving(w, numbers(rows=4 * ROWS)))
    layers.out(0)
    del slab
    graphs, passes = {}, {}
    for k in (0, 1):
        graphs[k] = layers(lambda k=k: saving(w, numbers(k, rows=2 * ROWS)))  # type: ignore[misc]
        passes[k] = layers.context.current_pass
        layers.out(0)
    held = layers.statistics.host_bytes
    last = layers(lambda: saving(w, numbers(5.0, rows=4 * ROWS)))
    for k in reloaded:
        layers.controller.start_reload_layer(0, in_pass=passes[k])
    for k in dropped:
        del graphs[k]
    layers.out(0)
    assert layers.statistics.host_bytes == held
    last.sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w) * numbers(5.0, rows=4 * ROWS).sum())
    del last
    check(device, layers.context)
