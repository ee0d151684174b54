"""What is saved again under another name, and storages that one tensor fills in another order."""

import pytest
import torch
from helpers import Saves, forward, make, nothing_held
from torch import Tensor

from actoffload import mark_not_offload
from actoffload.device import ReferenceDevice

MODIFIED = "modified by an inplace operation"
SHAPE = (16, 32)


pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class Noting(ReferenceDevice):
    """Notes the layout of all that it copies."""

    def __init__(self) -> None:
        super().__init__()
        self.out: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]] = []
        self.back = list(self.out)

    def to_host(self, pairs, stream):
        assert all(host.stride() == device.stride() for host, device in pairs)  # a plain copy of bytes
        self.out += [(device.dtype, device.size(), device.stride()) for _, device in pairs]
        super().to_host(pairs, stream)

    def to_device(self, pairs, stream):
        self.back += [(device.dtype, device.size(), device.stride()) for _, device in pairs]
        super().to_device(pairs, stream)


def start() -> Tensor:
    return torch.randn(SHAPE, requires_grad=True) * 1.0


def saving(*tensors: Tensor, device: ReferenceDevice | None = None):
    """Save tensors in the first of three layers, an offloaded one; return output, unpacked tensors and context."""
    seen: list[Tensor] = []
    context, sync = make(1, 3, device=device or ReferenceDevice())
    layers = [lambda x: Saves.apply(x, seen, *tensors), *[torch.relu] * 2]
    return forward(layers, start(), context, sync), seen, context


def same(left: Tensor, right: Tensor) -> bool:
    return left.stride() == right.stride() and left.dtype == right.dtype and torch.equal(left, right)


AGAIN = {
    "the same tensor": lambda t: (t, t, t),
    "views of one layout": lambda t: (t.view(512), t.view(512), t.reshape(512)),
    "a view of the other layout": lambda t: (t, t.view(512), t),
    "a part": lambda t: (t, t[:8], t),
    "negated": lambda t: (t, torch._neg_view(t), t),
    "detached": lambda t: (t, t.detach(), t),
    "data": lambda t: (t, t.data, t),
}


@pytest.mark.parametrize("views", AGAIN.values(), ids=AGAIN)
def test_a_storage_that_is_saved_again_leaves_once(views):
    device = Noting()
    tensors = views(torch.randn(SHAPE))
    y, seen, context = saving(*tensors, device=device)
    assert context.statistics().tensors_offloaded == 1
    assert len(device.out) == 1
    y.sum().backward()
    assert len(device.back) == 1
    assert all(map(same, seen, tensors))
    seen.clear()
    del y
    nothing_held(context)


@pytest.mark.parametrize("other", [lambda t: t.data, lambda t: torch.empty(0).set_(t.untyped_storage(), 0, SHAPE)])
@pytest.mark.parametrize("edited", [0, 1])
def test_each_name_is_judged_by_its_own_version_counter(other, edited):
    """Tensors on one storage may count their changes apart; a change of either is an error, as without offloading."""
    held = torch.randn(SHAPE)
    names = (held, other(held))
    before = names[1 - edited]._version
    y, _, _ = saving(*names)
    names[edited].add_(1.0)
    assert names[1 - edited]._version == before
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


@pytest.mark.parametrize("layer", [0, 1], ids=["one layer", "two layers"])
def test_parts_with_version_counters_of_their_own_are_edited_one_after_the_other(layer):
    """The copy of the first part may be on its way when the second one is edited."""
    whole, seen = torch.randn(16, 64), list[Tensor]()
    one, other = whole.unsafe_chunk(2, -1)

    def edits(x: Tensor, part: Tensor) -> Tensor:
        with torch.no_grad():
            part.mul_(2.0)
        return Saves.apply(x, seen, part)

    context, sync = make(2, 4)
    layers = [lambda x: edits(x, one), lambda x: edits(x, other)]
    if not layer:
        layers = [lambda x: edits(edits(x, one), other), torch.relu]
    y = forward([*layers, *[torch.relu] * 2], start(), context, sync)
    y.sum().backward()
    wanted = {part.data_ptr(): part for part in (one, other)}
    assert len(seen) == len(wanted)
    assert {float(part.sum()) for part in seen} == {float(part.sum()) for part in wanted.values()}


def test_edited_names_of_one_counter_are_copied_once():
    """As an activation function in place saves its result, and the next convolution its input."""
    context, sync = make(1, 3)
    layers = [lambda x: (x * 1.0).sigmoid_().square(), *[torch.relu] * 2]
    forward(layers, start(), context, sync).sum().backward()
    assert context.statistics().tensors_offloaded == 1


def test_a_mark_counts_though_the_tensor_was_saved_before():
    held = torch.randn(SHAPE)
    seen: list[Tensor] = []

    def layer(x):
        x = Saves.apply(x, seen, held)
        mark_not_offload(held)
        return Saves.apply(x, seen, held)

    context, sync = make(1, 3)
    y = forward([layer, *[torch.relu] * 2], start(), context, sync)
    assert {reason.name: count for reason, count in context.statistics().tensors_kept.items()}["MARKED"] == 1
    y.sum().backward()
    assert all(torch.equal(tensor, held) for tensor in seen)


# Other orders


FILLING = {
    "transposed": ((32, 16), (1, 32)),
    "heads first": ((2, 8, 32), (32, 64, 1)),
    "channels last": ((2, 4, 8, 8), (256, 1, 32, 4)),
    "one row": ((1, 512), (512, 1)),
}


@pytest.mark.parametrize(("size", "stride"), FILLING.values(), ids=FILLING)
def test_a_tensor_that_fills_its_storage_moves_as_it_is(size, stride):
    device = Noting()
    tensor = torch.randn(512).as_strided(size, stride)
    y, seen, context = saving(tensor, tensor, device=device)
    assert device.out == [(torch.float32, torch.Size(size), stride)]
    y.sum().backward()
    assert device.back == device.out
    assert all(same(other, tensor) for other in seen)
    seen.clear()
    del y
    nothing_held(context)


def test_other_views_of_a_storage_that_moved_in_another_order():
    base = torch.randn(512)
    tensors = [
        base.as_strided((32, 16), (1, 32)),
        base,
        base[100:200],
        base.view(torch.uint8),
        base.view(16, 32)[:, 3:9],
    ]
    device = Noting()
    y, seen, _ = saving(*tensors, device=device)
    assert len(device.out) == 1
    y.sum().backward()
    assert all(map(same, seen, tensors))
