"""`start_offload`: the point at which a tensor is final, and views that are offloaded with their base."""

import pytest
import torch
from helpers import forward, make, nothing_held, same_bits

import actoffload
from actoffload.device import ReferenceDevice
from actoffload.schedule import Kind

ONE = 64 * 64 * 4


pytestmark = pytest.mark.usefixtures("offload_small_tensors")


class Fused(torch.autograd.Function):
    """Compute for 1 s until the tensor is final, then for 4 s until autograd saves it."""

    @staticmethod
    def forward(ctx, x, device, tensor, between, whole):
        device.compute(1.0)
        actoffload.start_offload(tensor, None, offload_base_tensor=whole)
        between(tensor)
        device.compute(4.0)
        ctx.save_for_backward(tensor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (tensor,) = ctx.saved_tensors
        return grad * tensor.float().sum(), None, None, None, None


def run(tensor, *, between=lambda t: None, whole=False):
    """Return the copies to the host, the gradient and the statistics."""
    device = ReferenceDevice(d2h=ONE, h2d=ONE)
    context, sync = make(1, 3, device=device)
    leaf = torch.ones(2, requires_grad=True)
    calls = [lambda x: Fused.apply(x, device, tensor, between, whole), *[lambda x: x * 1.0] * 2]
    with context.record_timeline() as recorder:
        forward(calls, leaf, context, sync).sum().backward()
    nothing_held(context)
    return recorder.timeline().of(Kind.D2H), leaf.grad, context.statistics()


def test_the_copy_starts_where_the_tensor_is_final():
    """The mark is made on the device of the context, whatever the current device is."""
    tensor = torch.ones(64, 64)
    (copy,), grad, _ = run(tensor)
    assert (copy.start, copy.end) == (1.0, 2.0)
    assert torch.equal(grad, torch.full((2,), 4096.0))


def test_a_tensor_that_is_changed_afterwards_is_offloaded_when_it_is_saved():
    (copy,), grad, _ = run(torch.ones(64, 64), between=lambda t: t.add_(1.0))
    assert (copy.start, copy.end) == (5.0, 6.0)
    assert torch.equal(grad, torch.full((2,), 8192.0))


@pytest.mark.parametrize("whole", [False, True])
def test_a_view_may_be_offloaded_with_its_base(whole):
    base = torch.arange(4096.0).view(64, 64)
    part = base[8:16]
    _, grad, statistics = run(part, whole=whole)
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == (ONE if whole else ONE // 8)
    assert same_bits(grad, part.sum().expand(2))


def test_a_marked_tensor_is_kept():
    tensor = torch.ones(64, 64)
    actoffload.mark_not_offload(tensor)
    copies, _, statistics = run(tensor)
    assert copies == ()
    assert statistics.tensors_kept == {actoffload.report.Reason.MARKED: 1}
