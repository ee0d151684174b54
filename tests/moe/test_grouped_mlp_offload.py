"""Exactly what the grouped MLP offloads, when, and what it keeps."""

import itertools
from contextlib import contextmanager, nullcontext

import helpers
import pytest
import torch
from helpers import forward, make, no_synchronization, nothing_held, same_bits
from moe_reference import COUNTS, FFN, HIDDEN, gradients, operands, reference
from torch import Tensor

import actoffload
from actoffload import moe
from actoffload.device import ReferenceDevice
from actoffload.moe import GroupedMLP, grouped_mlp
from actoffload.report import Reason
from actoffload.schedule import Kind

pytestmark = pytest.mark.usefixtures("offload_small_tensors")

SAVED = {"fc1_input": HIDDEN, "activation_input": 2 * FFN, "fc2_input": FFN}
TOKENS = 64


def dtype_here() -> torch.dtype:
    """Return the only type for which an accelerator has a kernel, or a more exact one."""
    return torch.bfloat16 if helpers.PLACE.type == "cuda" else torch.float32


def module(**more) -> GroupedMLP:
    torch.manual_seed(3)
    return GroupedMLP(4, HIDDEN, FFN, **more).to(helpers.PLACE, dtype_here())


def tokens() -> Tensor:
    drawn = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    return drawn.to(helpers.PLACE, dtype_here())


def step(mlp, pair, counts, x=None):
    """Run the module as the first layer of three, and return the bits that it gives."""
    leaf = (tokens() if x is None else x.clone()).requires_grad_()
    mlp.zero_grad()
    y = forward([lambda t: mlp(t, counts), *[lambda t: t * 1.0] * 2], leaf * 1.0, *pair)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in mlp.parameters())]


PER_EXPERT = [30, 0, 33, 1]


@pytest.mark.parametrize("counts", [PER_EXPERT, torch.tensor(PER_EXPERT)], ids=["list", "tensor"])
@pytest.mark.parametrize("kept", [c for n in range(4) for c in itertools.combinations(SAVED, n)], ids="+".join)
def test_exactly_what_is_offloaded_and_what_is_kept(kept, counts, place):
    """Without synchronization, where the counts are on the device and all memory is there."""
    mlp, x = module(**{f"keep_{name}": True for name in kept}), tokens()
    if isinstance(counts, Tensor):
        if place.type == "cuda" and moe.capability(place) not in moe.KERNELS:
            pytest.skip("grouped_mm has no kernel for this device")
        counts = counts.to(place)
    want = step(mlp, actoffload.get_cpu_offload_context(), counts, x)
    context, sync = make(1, 3)
    for k in range(3):
        context.reset_statistics()
        with no_synchronization() if k == 2 and isinstance(counts, Tensor) else nullcontext():
            got = step(mlp, (context, sync), counts, x)
        assert all(map(same_bits, got, want))
        statistics = context.statistics()
        offloaded = [TOKENS * width * x.itemsize for name, width in SAVED.items() if name not in kept]
        staying = [TOKENS * width * x.itemsize for name, width in SAVED.items() if name in kept]
        assert statistics.tensors_offloaded == len(offloaded)
        assert statistics.bytes_offloaded == statistics.bytes_reloaded == sum(offloaded)
        assert statistics.reloaded_on_demand == 0
        offsets = [4 * 4] if isinstance(counts, Tensor) else []
        expected = {
            Reason.PARAMETER: (2, mlp.fc1_weight.nbytes + mlp.fc2_weight.nbytes),
            Reason.MARKED: (len(staying), sum(staying)),
            Reason.SMALL: (len(offsets), sum(offsets)),
        }
        expected = {reason: entry for reason, entry in expected.items() if entry[0]}
        seen = {r: (statistics.tensors_kept[r], statistics.bytes_kept[r]) for r in statistics.tensors_kept}
        assert seen == expected
        del got
    nothing_held(context)


def test_copies_start_where_each_tensor_is_final(monkeypatch):
    """Each product takes a second, and each tensor a tenth to copy: none waits for the end of the function."""
    device = ReferenceDevice(d2h=TOKENS * 4 * 2 * FFN / 0.1, h2d=1e12)
    real = moe.Groups.times

    def slow(*args, **more):
        device.compute(1.0)
        return real(*args, **more)

    monkeypatch.setattr(moe.Groups, "times", slow)
    for keep, starts in (({}, [0.0, 1.0, 1.1]), ({"keep_activation_input": True}, [0.0, 1.0])):
        context, sync = make(1, 3, device=device)
        with context.record_timeline() as recorder:
            step(module(**keep), (context, sync), PER_EXPERT)
        timeline = recorder.timeline()
        began = timeline.of(Kind.FORWARD)[0].start
        copies = timeline.of(Kind.D2H)
        assert [copy.start - began for copy in copies] == pytest.approx(starts)
        assert all(copy.end - began < 2.0 for copy in copies)


@contextmanager
def saving(found: list[int]):
    """Note how many elements each saved tensor has."""

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_only_what_backward_needs_is_saved(needs):
    """Frozen weights, as with adapters, and inputs without a gradient."""
    leaves = operands(dtype=torch.float32)
    z = reference(leaves[0], COUNTS, *leaves[1:])
    want = gradients(z, leaves)
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    x, fc1, fc2 = (leaf.numel() for leaf in leaves)
    tokens = sum(COUNTS)
    saved: list[int] = []
    with saving(saved):
        y = grouped_mlp(leaves[0], COUNTS, *leaves[1:])
    needs_x, needs_fc1, needs_fc2 = needs
    inner = needs_x or needs_fc1
    expected = (
        [x] * needs_fc1 + [tokens * 2 * FFN] * inner + [tokens * FFN] * needs_fc2 + [fc1] * needs_x + [fc2] * inner
    )
    assert saved == expected
    assert y.requires_grad is any(needs)
    if any(needs):
        asked = [k for k in range(3) if needs[k]]
        got = gradients(y, [leaves[k] for k in asked])
        for mine, k in zip(got, asked, strict=True):
            assert torch.allclose(mine, want[k], atol=1e-3)


WEIGHTS = {
    "computed": (lambda w: w * 1.0, Reason.MARKED),
    "computed and frozen": (lambda w: w.detach() * 1.0, Reason.MARKED),
    "a tensor that requires grad": (lambda w: w.detach().clone().requires_grad_(), Reason.LEAF),
    "a view of a parameter": (lambda w: w.view(w.shape), Reason.PARAMETER),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_stay_whatever_they_are(kind):
    form, reason = WEIGHTS[kind]
    mlp = module()
    context, sync = make(1, 3)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True) * 1.0
    weights = form(mlp.fc1_weight), form(mlp.fc2_weight)
    layers = [lambda t: grouped_mlp(t, PER_EXPERT, *weights), torch.sin, torch.sin]
    forward(layers, x, context, sync).sum().backward()
    statistics = context.statistics()
    assert statistics.tensors_kept == {reason: 2}
    frozen = kind == "computed and frozen"
    assert statistics.bytes_offloaded == TOKENS * 4 * (2 * FFN if frozen else sum(SAVED.values()))


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_autocast_casts_are_kept(frozen):
    mlp = module().requires_grad_(not frozen)
    context, sync = make(1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        step(mlp, (context, sync), PER_EXPERT)
    statistics = context.statistics()
    weights = (mlp.fc1_weight.numel() + mlp.fc2_weight.numel()) * 2
    assert sum(n for r, n in statistics.bytes_kept.items() if r in (Reason.MARKED, Reason.PARAMETER)) == weights
    assert statistics.bytes_offloaded == TOKENS * 2 * (2 * FFN if frozen else sum(SAVED.values()))


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.usefixtures("nothing_compiled")
def test_between_compiled_parts_it_runs_as_it_is():
    mlp = module(keep_fc2_input=True)
    compiled = torch.compile(lambda t, counts: mlp(t.sin(), counts).cos(), backend="aot_eager")
    plain = lambda t, counts: mlp(t.sin(), counts).cos()  # noqa: E731
    plain.zero_grad = compiled.zero_grad = mlp.zero_grad
    plain.parameters = compiled.parameters = mlp.parameters
    want = step(plain, actoffload.get_cpu_offload_context(), PER_EXPERT)
    context, sync = make(1, 3)
    for _ in range(2):
        assert all(map(same_bits, step(compiled, (context, sync), PER_EXPERT), want))
    assert context.statistics().tensors_kept[Reason.MARKED] == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match="marks tensors for offloading"):
        torch.compile(lambda t: mlp(t.sin(), PER_EXPERT), backend="aot_eager", fullgraph=True)(torch.randn(64, HIDDEN))
