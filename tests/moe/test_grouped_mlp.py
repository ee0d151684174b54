"""The grouped MLP: values, gradients, which products are used, and errors."""

import copy
from contextlib import contextmanager

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import no_synchronization, same_bits
from moe_reference import ACTIVATIONS, COUNTS, FFN, HIDDEN, OUT, gradients, operands, output_gradient, poison, reference

from actoffload import moe
from actoffload.moe import GroupedMLP, grouped_mlp


@contextmanager
def garbage():
    """Fill what torch allocates without setting it with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3, device=helpers.PLACE).isnan().all()
        poison()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


# Values and gradients


def on_place(counts: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(counts, dtype=dtype, device=helpers.PLACE)


WAYS = {
    "list": lambda counts: counts,
    "tuple": tuple,
    "counts": on_place,
    "counts of few bits": lambda counts: on_place(counts, torch.uint8),
}


@pytest.mark.parametrize(
    ("activation", "dtype", "way", "counts"),
    [
        *((a, d, "counts", COUNTS) for a in ACTIVATIONS for d in (torch.float64, torch.bfloat16)),
        *(("swiglu", d, "list", COUNTS) for d in (torch.float64, torch.float32, torch.float16)),
        *(("swiglu", torch.bfloat16, way, n) for way in WAYS for n in (COUNTS, [0, 0])),
    ],
    ids=str,
)
def test_the_arithmetic_of_plain_autograd(place, activation, dtype, way, counts):
    leaves, given = operands(activation, dtype, counts), WAYS[way](counts)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]

    def run():
        return grouped_mlp(leaves[0], given, *leaves[1:], activation=activation)

    kernel = place.type == "cpu" or (dtype is torch.bfloat16 and moe.capability(place) in moe.KERNELS)
    if way not in ("list", "tuple") and not kernel:
        with pytest.raises(ValueError, match="Elsewhere give a list of ints"):
            run()
        return
    weight = output_gradient(run())
    torch.autograd.grad(run(), leaves, weight)  # libraries set themselves up in the first call
    with garbage(), no_synchronization():
        y = run()
        got = [y, *torch.autograd.grad(y, leaves, weight)]
    want = reference(exact[0], counts, *exact[1:], activation)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}[dtype]
    for mine, theirs in zip(got, [want, *gradients(want, exact)], strict=True):
        assert mine.dtype is dtype
        assert mine.shape == theirs.shape
        scale = theirs.abs().max().item() if theirs.numel() else 0.0
        assert torch.allclose(mine.double(), theirs, rtol=0, atol=tolerance * scale)
    for gradient in got[2:]:
        for count, of_expert in zip(counts, gradient, strict=True):
            assert count or same_bits(of_expert, torch.zeros_like(of_expert))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_bits_of_autograd_through_grouped_mm(activation, dtype):
    leaves = operands(activation, dtype)
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    y = grouped_mlp(leaves[0], torch.tensor(COUNTS), *leaves[1:], activation=activation)
    hidden = F.grouped_mm(leaves[0], leaves[1].transpose(1, 2), offs=offsets)
    z = F.grouped_mm(ACTIVATIONS[activation][0](hidden), leaves[2].transpose(1, 2), offs=offsets)
    for mine, theirs in zip([y, *gradients(y, leaves)], [z, *gradients(z, leaves)], strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize("way", ["list", "counts"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_behind_the_last_expert(dtype, way):
    leaves = operands("swiglu", dtype, behind=4)
    with torch.no_grad():
        leaves[0][-4:] = float("nan")
    total = sum(COUNTS)
    with garbage():
        y = grouped_mlp(leaves[0], WAYS[way](COUNTS), *leaves[1:], padded=True)
        weight = torch.ones_like(y)
        weight[total:] = float("nan")
        got = [y, *torch.autograd.grad(y, leaves, weight)]
    front = [leaves[0][:total].detach().requires_grad_(), *leaves[1:]]
    z = reference(front[0], COUNTS, *front[1:])
    want = [z, *torch.autograd.grad(z.sum(), front)]
    for part, padded in zip(want[:2], got[:2], strict=True):
        assert torch.allclose(part, padded[:total], rtol=1e-4)
        assert same_bits(padded[total:], torch.zeros_like(padded[total:]))
    for mine, theirs in zip(got[2:], want[2:], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_second_gradient_is_refused():
    leaves = operands()
    y = grouped_mlp(leaves[0], COUNTS, *leaves[1:])
    (first,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@pytest.mark.parametrize("counts", [COUNTS, torch.tensor(COUNTS)], ids=["list", "tensor"])
def test_autocast(counts):
    x, fc1, fc2 = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_mlp(x, counts, fc1, fc2)
        assert y.dtype is torch.bfloat16
    low = [t.detach().bfloat16().requires_grad_() for t in (x, fc1, fc2)]
    z = grouped_mlp(low[0], counts, *low[1:])
    assert same_bits(y, z)
    for mine, theirs in zip(gradients(y, [x, fc1, fc2]), gradients(z, low), strict=True):
        assert same_bits(mine, theirs.float())
    # A backward inside of a region that its forward was not in.
    y = grouped_mlp(x, counts, fc1, fc2)
    want = gradients(y, [x, fc1, fc2])
    y = grouped_mlp(x, counts, fc1, fc2)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(same_bits, gradients(y, [x, fc1, fc2]), want))
        assert grouped_mlp(*operands()[:1], COUNTS, *operands()[1:]).dtype is torch.float64


# Which products


def test_nothing_is_fetched_from_an_accelerator():
    x, fc1, fc2 = (torch.empty(t.shape, device="meta", dtype=torch.bfloat16) for t in operands())
    with pytest.raises(ValueError, match=r"is on meta and x.* kernel for bfloat16.* counts\.tolist\(\) fetches them"):
        grouped_mlp(x, torch.tensor(COUNTS, device="meta"), fc1, fc2)
    for counts in (COUNTS, torch.tensor(COUNTS)):  # on the host: a loop
        assert grouped_mlp(x, counts, fc1, fc2).shape == (9, OUT)
    with pytest.raises(ValueError, match=r"is \[6, 0, 3, 1, 0\] and x has 9 tokens"):
        grouped_mlp(x, torch.tensor([6, 0, 3, 1, 0]), fc1, fc2)


def test_sums_over_no_rows_on_devices_where_the_kernel_leaves_garbage(monkeypatch):
    real = F.grouped_mm

    def dirty(a, b, *, offs):
        result = real(a, b, offs=offs)
        if result.dim() == 3:
            result[torch.tensor(COUNTS) == 0] = float("nan")
        return result

    monkeypatch.setattr(F, "grouped_mm", dirty)
    leaves = operands(dtype=torch.float32)
    for leaves_garbage in (True, False):
        monkeypatch.setattr(moe, "capability", lambda device, answer=10 if leaves_garbage else 9: answer)
        y = grouped_mlp(leaves[0], torch.tensor(COUNTS), *leaves[1:])
        found = gradients(y, leaves)
        assert any(bool(t.isnan().any()) for t in found) is not leaves_garbage
        if leaves_garbage:
            z = reference(leaves[0], COUNTS, *leaves[1:])
            assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found, gradients(z, leaves), strict=True))


# The module

PER_EXPERT = [30, 0, 33, 1]
TOKENS = sum(PER_EXPERT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_module(activation):
    mlp = GroupedMLP(4, HIDDEN, FFN, activation=activation, dtype=torch.float64)
    width = ACTIVATIONS[activation][1]
    assert mlp.fc1_weight.shape == (4, width * FFN, HIDDEN)
    assert mlp.fc2_weight.shape == (4, HIDDEN, FFN)
    assert mlp.fc1_weight.abs().max() <= HIDDEN**-0.5
    assert 0.9 * FFN**-0.5 < mlp.fc2_weight.abs().max() <= FFN**-0.5
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    want = reference(x, PER_EXPERT, mlp.fc1_weight, mlp.fc2_weight, activation)
    for y in (mlp(x, PER_EXPERT), copy.deepcopy(mlp)(x, torch.tensor(PER_EXPERT))):
        assert torch.allclose(y, want, rtol=1e-12)
    padded = mlp(torch.cat([x, x[:2]]), PER_EXPERT, padded=True)
    assert torch.allclose(padded[:TOKENS], want, rtol=1e-12)
    assert sorted(mlp.state_dict()) == ["fc1_weight", "fc2_weight"]
    with torch.no_grad():
        assert not mlp(x, PER_EXPERT).requires_grad


# Errors

X, W1, W2 = torch.zeros(4, 8), torch.zeros(2, 32, 8), torch.zeros(2, 8, 16)
WRONG = [
    ((X, [4, 1], W1, W2), {}, ValueError, r"is \[4, 1\] and x has 4 tokens; expected as many in all, none negative"),
    ((X, [1, 1], W1, W2), {}, ValueError, r"padded=True"),
    ((X, [4, 1], W1, W2), {"padded": True}, ValueError, r"x has 4 tokens"),
    ((X, [5, -1], W1, W2), {}, ValueError, r"none negative"),
    ((X, torch.tensor([4, 1]), W1, W2), {}, ValueError, r"is \[4, 1\] and x has 4 tokens"),
    ((X, torch.tensor([4, 0], device="meta"), W1, W2), {}, ValueError, r"is on meta and x, torch.float32, on cpu"),
    *(
        ((X, counts, W1, W2), {}, TypeError, r"tokens_per_expert is .*; expected 2 integers, one for each expert")
        for counts in ([4], [4.0, 0.0], 4, None, torch.tensor([4.0, 0.0]), torch.tensor([[4, 0]]))
    ),
    ((X, [4, 0], W1, W2), {"activation": "tanh"}, ValueError, r"activation is 'tanh'; expected one of 'swiglu'"),
    (
        (X, [4, 0], W1, W2),
        {"activation": "silu"},
        ValueError,
        r"shapes are .*; expected .* \[experts, 1 \* ffn, hidden",
    ),
    *(
        (arguments, {}, ValueError, r"The shapes are x \[.*\[experts, 2 \* ffn, hidden\]")
        for arguments in (
            (X, [4, 0], W1[:, :16], W2),
            (X[:, :4], [4, 0], W1, W2),
            (X, [4, 0], W1, W2[:1]),
            (X[0], [4, 0], W1, W2),
            (X, [4, 0], W1[0], W2),
        )
    ),
    ((X, [4, 0], W1, 0.5), {}, TypeError, r"fc2_weight is 0.5; expected a Tensor"),
    ((X, [4, 0], W1.double(), W2), {}, RuntimeError, r"dtype"),
]


@pytest.mark.parametrize(("arguments", "more", "error", "text"), WRONG)
def test_wrong_arguments_are_named(arguments, more, error, text):
    with pytest.raises(error, match=text):
        grouped_mlp(*arguments, **more)


@pytest.mark.parametrize(
    ("sizes", "more", "text"),
    [
        ((0, 8, 16), {}, "num_experts is 0; expected a whole number, at least 1"),
        ((2, 8, 0), {}, "ffn_size is 0; expected a whole number, at least 1"),
        ((2, 8, 16), {"activation": "swish"}, "activation is 'swish'; expected one of"),
    ],
)
def test_wrong_arguments_of_the_module_are_named(sizes, more, text):
    with pytest.raises(ValueError, match=text):
        GroupedMLP(*sizes, **more)
