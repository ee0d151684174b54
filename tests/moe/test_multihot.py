"""indices_to_multihot: the bits of indexing with a mask, without a mask."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import no_synchronization, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from actoffload.moe import indices_to_multihot

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def masked(indices: torch.Tensor, probs: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same by indexing with a mask."""
    here = indices != -1
    rows = torch.arange(len(indices), device=indices.device).repeat_interleave(here.sum(dim=1))
    columns = indices[here].long()
    routing_map = torch.zeros(len(indices), num_experts, dtype=torch.bool, device=indices.device)
    probabilities = probs.new_zeros(len(indices), num_experts)
    routing_map[rows, columns] = True
    probabilities[rows, columns] = probs[here]
    return routing_map, probabilities


CASES = {
    "some": [[0, 3], [-1, 2], [4, -1], [1, 0]],
    "none here": [[-1, -1], [-1, -1]],
    "a row with none": [[2, 1], [-1, -1], [0, 4]],
    "one expert for each": [[3], [-1], [0]],
    "one token": [[4, 0, -1]],
    "twice in a row": [[2, 2], [1, -1], [3, 3], [0, 4]],
    "as many as experts": [[4, 3, 2, 1, 0], [-1, 0, -1, 1, -1]],
    "many": [[k % 5, -1 if k % 3 else (k + 1 + k % 4) % 5] for k in range(4096)],
}


def drawn(rows: list[list[int]], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return indices, probabilities and a gradient with negative zeros among both."""
    generator = torch.Generator().manual_seed(len(rows))
    indices = torch.tensor(rows).view(len(rows), -1)
    probs = torch.randn(indices.shape, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(len(rows), 5, generator=generator, dtype=torch.float64).to(dtype)
    grad[torch.rand(grad.shape, generator=generator) < 0.4] = -0.0
    probs[torch.rand(probs.shape, generator=generator) < 0.2] = -0.0
    return indices, probs, grad


def check(indices: torch.Tensor, probs: torch.Tensor, grad: torch.Tensor, num_experts: int = 5) -> None:
    results = []
    for function in (masked, indices_to_multihot):
        leaf = probs.clone().requires_grad_()
        with nullcontext() if function is masked else no_synchronization():
            routing_map, probabilities = function(indices, leaf, num_experts)
            (grad_probs,) = torch.autograd.grad(probabilities, leaf, grad)
        results.append((routing_map, probabilities, grad_probs))
    for want, got in zip(*results, strict=True):
        assert same_bits(want, got)
        assert got.is_contiguous()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *(("twice in a row", dtype) for dtype in FLOATS)],
    ids=str,
)
def test_the_bits_of_indexing_with_a_mask(case, dtype, place):
    check(*(tensor.to(place) for tensor in drawn(CASES[case], dtype)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_of_every_width(dtype):
    indices, probs, grad = drawn(CASES["some"], torch.float32)
    check(indices.to(dtype), probs, grad)
    # 127 experts and more do not fit into int8 together with the step of one.
    edge = torch.tensor([[127], [-1]], dtype=dtype)
    routing_map, _ = indices_to_multihot(edge, torch.ones(2, 1), 128)
    assert routing_map.nonzero().tolist() == [[0, 127]]


def test_what_stands_beside_minus_one_is_not_used():
    probs = torch.tensor([[0.5, float("nan")], [float("inf"), 1.0]], requires_grad=True)
    _, probabilities = indices_to_multihot(torch.tensor([[0, -1], [-1, 1]]), probs, 2)
    assert probabilities.tolist() == [[0.5, 0.0], [0.0, 1.0]]
    probabilities.backward(torch.full((2, 2), float("inf")))
    assert probs.grad.tolist() == [[float("inf"), 0.0], [0.0, float("inf")]]


# Gradients


def test_first_and_second_gradients():
    indices = torch.tensor(CASES["twice in a row"])
    probs = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def distinct(probs: torch.Tensor) -> torch.Tensor:
        return indices_to_multihot(torch.tensor(CASES["some"]), probs, 5)[1]

    assert torch.autograd.gradcheck(distinct, (probs,))
    assert torch.autograd.gradgradcheck(distinct, (probs,))
    seconds = []
    for function in (masked, indices_to_multihot):
        weight = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
        table = function(indices, probs, 5)[1]
        (first,) = torch.autograd.grad((table**3 * weight).sum(), probs, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), (probs, weight)))
    for want, got in zip(*seconds, strict=True):
        assert torch.allclose(want, got, rtol=1e-14, atol=0)


# No synchronization


class HostWaitsError(RuntimeError):
    """An operator was called for which the host has to wait."""


class NeverWait(TorchDispatchMode):
    """Refuses operators whose result, or the size of whose result, depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            waits = bool(tags & set(func.tags)) or func.overloadpacket is aten.is_nonzero
        if waits:
            raise HostWaitsError(str(func))
        return func(*args, **(kwargs or {}))


def test_no_operator_waits():
    indices, probs, grad = drawn(CASES["a row with none"], torch.float32)
    probs.requires_grad_()
    with NeverWait():
        _, probabilities = indices_to_multihot(indices, probs, 5)
        (first,) = torch.autograd.grad((probabilities**2 * grad).sum(), probs, create_graph=True)
        torch.autograd.grad(first.sum(), probs)


# Together with other things


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_as_one_graph():
    function = torch.compile(indices_to_multihot, backend="aot_eager", fullgraph=True)
    for case in ("some", "twice in a row", "one token"):
        indices, probs, grad = drawn(CASES[case], torch.float32)
        results = []
        for version in (indices_to_multihot, function):
            leaf = probs.clone().requires_grad_()
            routing_map, probabilities = version(indices, leaf, 5)
            results.append((routing_map, probabilities, *torch.autograd.grad(probabilities, leaf, grad)))
        assert all(map(same_bits, *results))


# Errors


@pytest.mark.parametrize("index", [5, -2])
def test_an_index_out_of_range_is_named(index):
    with pytest.raises(IndexError, match=rf"indices has {index}, and num_experts is 5; expected -1 .* from 0 to 4"):
        indices_to_multihot(torch.tensor([[0, index]]), torch.ones(1, 2), 5)


IDS, P = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
WRONG = [
    ((0, P, 4), TypeError, r"indices is 0; expected a Tensor"),
    ((P, P, 4), TypeError, r"indices has dtype torch.float32; expected one of torch.int64"),
    ((IDS, P.cfloat(), 4), TypeError, r"probs has dtype torch.complex64"),
    ((IDS[0], P[0], 4), ValueError, r"indices has shape \[3\] and probs \[3\]; expected \[tokens, topk\]"),
    ((IDS, P[:, :2], 4), ValueError, r"indices has shape \[2, 3\] and probs \[2, 2\]"),
    ((IDS, P, 0), ValueError, r"num_experts is 0; expected a whole number, at least 1"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG)
def test_wrong_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        indices_to_multihot(*arguments)
