"""Parts of a mixture-of-experts layer: routing that never waits for the device, and experts that offload.

`[Note: no masks]`  The size of a result indexed with a mask depends on values, so the host waits for the device.  So
indices are increased by one and written into a table with one more column: -1 goes to column 0, which is cut off.

`[Note: experts]`  One autograd function instead of three saves three tensors besides the weights: the inputs of FC1, of
the activation and of FC2, as Transformer Engine's does.  The copy of each starts where it is final.  ``grouped_mm``
takes the ends of the groups of rows on the device; a loop over the experts takes every dtype, size and device, but
needs the counts on the host, which are never fetched from an accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ._arguments import check_kind, check_whole
from ._torch.modules import opaque
from .engine.eligibility import mark_not_offload, start_offload

__all__ = ["GroupedMLP", "grouped_mlp", "indices_to_multihot"]

_aten = torch.ops.aten


# Routing

_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)
_PROBS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def indices_to_multihot(
    indices: torch.Tensor, probs: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which experts each token goes to, and with which probability, as tables of tokens by experts.

    Neither forward nor backward makes the host wait for the device.  Values and gradients have the bits of indexing
    with a mask, as Megatron-LM's token dispatcher does (``_indices_to_multihot``, with tables in float32).

    Parameters
    ----------
    indices : torch.Tensor
        The experts of each token, [tokens, topk], a signed integer dtype; -1 means "not here".
    probs : torch.Tensor
        Their probabilities, [tokens, topk], float16, bfloat16, float32 or float64, differentiable twice, not in forward
        mode.  Those beside -1 are not used, and their gradient is zero.
    num_experts : int
        Columns of the tables, at least 1.

    Returns
    -------
    routing_map, probabilities : torch.Tensor
        [tokens, num_experts], contiguous: bool; and the dtype of `probs`, zero where the map is False.

    Raises
    ------
    IndexError
        If an index is out of range, on the CPU.  On an accelerator an assertion of the kernel fails.

    Notes
    -----
    If an expert is in a row more than once, one of its probabilities is kept: the last one on the CPU, any of them on
    an accelerator.  The gradient of the table goes to each of them.

    Examples
    --------
    >>> indices, probs = torch.tensor([[2, 0], [1, -1]]), torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    >>> routing_map, probabilities = actoffload.moe.indices_to_multihot(indices, probs, num_experts=3)
    >>> probabilities
    tensor([[0.2500, 0.0000, 0.7500],
            [0.0000, 1.0000, 0.0000]])
    """
    check_kind(torch.Tensor, indices=indices, probs=probs)
    for name, value, dtypes in (("indices", indices, _INDICES), ("probs", probs, _PROBS)):
        if value.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {value.dtype}; expected one of {', '.join(map(str, dtypes))}.")
    if indices.dim() != 2 or probs.shape != indices.shape:
        raise ValueError(
            f"indices has shape {list(indices.shape)} and probs {list(probs.shape)}; expected [tokens, topk] of both."
        )
    check_whole(num_experts=num_experts, least=1)
    columns = indices.long() + 1  # a new tensor in any case; [Note: no masks]
    table = columns.new_zeros(indices.shape[0], num_experts + 1, dtype=torch.bool)
    try:
        routing_map = _without_first(table.scatter_(1, columns, True))
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        least, most = (int(value) for value in indices.aminmax())
        raise IndexError(
            f"indices has {least if least < -1 else most}, and num_experts is {num_experts}; expected -1 for 'not "
            f"here', or an expert from 0 to {num_experts - 1}."
        ) from None
    probabilities: torch.Tensor = _Table.apply(probs, columns, num_experts)  # type: ignore[no-untyped-call]
    return routing_map, probabilities


class _Table(torch.autograd.Function):
    """The table of probabilities.

    The gradient of `scatter` keeps a negative zero; with a mask it is added to zero, which makes it positive.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(probs: torch.Tensor, columns: torch.Tensor, num_experts: int) -> torch.Tensor:
        return _without_first(probs.new_zeros(probs.shape[0], num_experts + 1).scatter(1, columns, probs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (columns,) = ctx.saved_tensors
        taken = grads[0].gather(1, (columns - 1).clamp(min=0))
        return taken.masked_fill(columns == 0, 0.0) + 0.0, None, None


def _without_first(table: torch.Tensor) -> torch.Tensor:
    # A copy even of a single row, so that a result is never a view.
    return table[:, 1:].clone(memory_format=torch.contiguous_format)


# Activations


class _Activation(NamedTuple):
    """An activation of the output of FC1, and its gradient by the kernels of autograd, ``(grad_y, x) -> grad_x``.

    If `gated`, the output of FC1 is [tokens, 2 * ffn]: the function of the first half, times the second half.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gated: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.function(x)
        gate, value = x.chunk(2, dim=-1)
        return self.function(gate).mul_(value)

    def backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.gradient(grad, x)
        gate, value = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        grad_gate, grad_value = result.chunk(2, dim=-1)
        grad_gate.copy_(self.gradient(grad * value, gate))
        torch.mul(grad, self.function(gate), out=grad_value)
        return result


_ACTIVATIONS = {
    "swiglu": _Activation(F.silu, _aten.silu_backward.default, gated=True),
    "geglu": _Activation(F.gelu, _aten.gelu_backward.default, gated=True),
    "silu": _Activation(F.silu, _aten.silu_backward.default),
    "gelu": _Activation(F.gelu, _aten.gelu_backward.default),
    "srelu": _Activation(
        lambda x: F.relu(x).square_(),
        lambda grad, x: _aten.threshold_backward.default(F.relu(x).mul_(2).mul_(grad), x, 0),
    ),
}


def _activation(name: str) -> _Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; expected one of {', '.join(map(repr, _ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


# Matrix products of rows, sorted by group, with a matrix for each group

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ALIGNMENT = 16  # bytes, of each row of an operand of grouped_mm
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS = (9, 10)  # major compute capabilities for which grouped_mm has a kernel


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows belong to which group: by the rows of each, or by the place where each ends, int32 on the device."""

    counts: list[int]  # for a loop
    offsets: torch.Tensor | None  # for grouped_mm
    padded: bool  # rows may follow that belong to no group

    def times(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return each group of rows [rows, k] times its matrix [groups, k, n]; rows of no group are zero."""
        if not len(x):
            return x.new_zeros(0, weight.shape[2])
        if self.offsets is not None:
            result = F.grouped_mm(x, weight, offs=self.offsets)
            if self.padded:
                behind = torch.arange(len(x), device=x.device) >= self.offsets[-1]
                result.masked_fill_(behind.unsqueeze(1), 0.0)  # not a product: what lies there may be NaN
            return result
        result = x.new_empty(len(x), weight.shape[2])
        for part, rows, matrix in zip(self._split(result), self._split(x), weight.unbind(), strict=True):
            torch.mm(rows, matrix, out=part)
        result[sum(self.counts) :].zero_()
        return result

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the sums of the outer products of rows [rows, n] and [rows, k] by group: the gradient of a weight."""
        shape = (len(self.counts) if self.offsets is None else len(self.offsets), a.shape[1], b.shape[1])
        if not len(a):
            return a.new_zeros(shape)
        if self.offsets is not None:
            result = F.grouped_mm(a.t(), b, offs=self.offsets)
            if capability(a.device) == 10:  # a sum over no rows is what lay in the accumulator (CUTLASS issue 2674)
                empty = self.offsets.diff(prepend=self.offsets.new_zeros(1)) == 0
                result.masked_fill_(empty.view(-1, 1, 1), 0.0)
            return result
        result = a.new_empty(shape)
        for matrix, left, right in zip(result.unbind(), self._split(a), self._split(b), strict=True):
            torch.mm(left.t(), right, out=matrix)
        return result

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(rows[: sum(self.counts)], self.counts)


def _group(counts: Sequence[int] | torch.Tensor, x: torch.Tensor, widths: Sequence[int], *, padded: bool) -> Groups:
    """Check how many rows of `x` each group has, and choose the products; `widths` are those of all operands."""
    on_host = not isinstance(counts, torch.Tensor) or counts.device.type == "cpu"
    known = [*map(int, counts)] if on_host else []
    if on_host and (min(known) < 0 or sum(known) > len(x) or (sum(known) < len(x) and not padded)):
        raise ValueError(
            f"tokens_per_expert is {known} and x has {len(x)} tokens; expected as many in all, none negative, or "
            "padded=True where rows without an expert follow."
        )
    if isinstance(counts, torch.Tensor):
        aligned = not any(width * x.element_size() % _ALIGNMENT for width in widths)
        # Without a kernel grouped_mm is a loop, for which torch copies the offsets to the host.
        has_kernel = (
            x.dtype in _CPU_DTYPES if on_host else x.dtype is torch.bfloat16 and capability(x.device) in KERNELS
        )
        if counts.device == x.device and aligned and has_kernel:
            return Groups([], counts.cumsum(0).to(torch.int32), padded)
        if not on_host:
            raise ValueError(
                f"tokens_per_expert is on {counts.device} and x, {x.dtype}, on {x.device}: counts on an accelerator "
                "need grouped_mm, which has a kernel for bfloat16, rows of a multiple of 16 bytes and compute "
                "capability 9.x and 10.x. Elsewhere give a list of ints; counts.tolist() fetches them and waits."
            )
    return Groups(known, None, padded)


@functools.cache
def capability(device: torch.device) -> int:
    """Return the major compute capability of an NVIDIA GPU; 0 for other devices."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if is_nvidia else 0


# Experts


def grouped_mlp(
    x: torch.Tensor,
    tokens_per_expert: Sequence[int] | torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    *,
    activation: str = "swiglu",
    padded: bool = False,
    keep_fc1_input: bool = False,
    keep_activation_input: bool = False,
    keep_fc2_input: bool = False,
) -> torch.Tensor:
    """Apply to each group of tokens the two-layer network of its expert, without biases.

    For the rows of expert ``e``: ``activation(rows @ fc1_weight[e].T) @ fc2_weight[e].T``.  Rows are sorted by expert.

    In an offloading context all saved tensors are offloaded, except the weights.

    Parameters
    ----------
    x : torch.Tensor
        Tokens, sorted by expert, [tokens, hidden].
    tokens_per_expert : sequence of int or torch.Tensor
        Number of tokens of each expert.  For an integer tensor [experts] on the device of `x` the host does not wait.
        A list, or a tensor in host memory if `x` is on an accelerator, makes a loop over the experts.
    fc1_weight, fc2_weight : torch.Tensor
        [experts, ffn, hidden], with a gated activation [experts, 2 * ffn, hidden], the gate first; [experts, out, ffn].
    activation : str
        ``"swiglu"`` or ``"geglu"``, which are gated, ``"silu"``, ``"gelu"`` or ``"srelu"`` (the square of ReLU).
    padded : bool
        Rows without an expert may follow.  Their output and gradient are zero.
    keep_fc1_input, keep_activation_input, keep_fc2_input : bool
        Mark `x`, the output of FC1, or the input of FC2 with `mark_not_offload`.

    Returns
    -------
    torch.Tensor
        [tokens, out], the dtype of the operands.

    Raises
    ------
    ValueError
        If counts do not fit, or are on an accelerator without a kernel for the operands.  Values on an accelerator are
        not checked: without `padded`, rows without an expert are undefined.

    Examples
    --------
    >>> x, fc1_weight, fc2_weight = torch.randn(5, 8), torch.randn(3, 32, 8), torch.randn(3, 8, 16)
    >>> actoffload.moe.grouped_mlp(x, [2, 0, 3], fc1_weight, fc2_weight).shape
    torch.Size([5, 8])
    """
    _check(x, tokens_per_expert, fc1_weight, fc2_weight, 2 if _activation(activation).gated else 1)
    x, fc1_weight, fc2_weight = _in_one_dtype(x, fc1_weight, fc2_weight)
    groups = _group(tokens_per_expert, x, (*fc1_weight.shape[1:], *fc2_weight.shape[1:]), padded=padded)
    keep = keep_fc1_input, keep_activation_input, keep_fc2_input
    # Counts that the host knows may differ in the next call, and nothing else in it would show that.  So they are
    # passed as an object, with which a function is not run again; ends on the device are tensors like all others.
    known = groups if groups.offsets is None else None
    result: torch.Tensor = _GroupedMLP.apply(  # type: ignore[no-untyped-call]
        x, fc1_weight, fc2_weight, groups.offsets, known, padded, activation, keep
    )
    return result


opaque(grouped_mlp, "grouped_mlp marks tensors for offloading, which a compiled graph cannot do")


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        fc1_weight: torch.Tensor,
        fc2_weight: torch.Tensor,
        offsets: torch.Tensor | None,
        known: Groups | None,
        padded: bool,
        activation: str,
        keep: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        groups = known or Groups([], offsets, padded)
        ctx.counts, ctx.padded, ctx.activation = groups.counts, padded, _activation(activation)
        x_grad, fc1_grad, fc2_grad, *_ = ctx.needs_input_grad
        inner = x_grad or fc1_grad  # backward goes through the activation

        def save(tensor: torch.Tensor, kept: bool, needed: bool) -> torch.Tensor | None:
            if needed:
                (mark_not_offload if kept else start_offload)(tensor)
            return tensor if needed else None

        fc1_input = save(x, keep[0], fc1_grad)
        # Rows of no group are zero: what is saved has the same bits whenever it is computed.
        hidden = groups.times(x, fc1_weight.transpose(1, 2))
        activation_input = save(hidden, keep[1], inner)
        active = ctx.activation.forward(hidden)
        fc2_input = save(active, keep[2], fc2_grad)
        result = groups.times(active, fc2_weight.transpose(1, 2))
        weights = fc1_weight if x_grad else None, fc2_weight if inner else None
        mark_not_offload(*weights)
        ctx.save_for_backward(fc1_input, activation_input, fc2_input, *weights, offsets)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fc1_input, activation_input, fc2_input, fc1_weight, fc2_weight, offsets = ctx.saved_tensors
        groups, grad = Groups(ctx.counts, offsets, ctx.padded), grad.contiguous()
        grad_x = grad_fc1 = grad_fc2 = None
        if fc2_input is not None:
            grad_fc2 = groups.outer(grad, fc2_input)
        if activation_input is not None:
            grad_hidden = ctx.activation.backward(groups.times(grad, fc2_weight), activation_input)
            if fc1_weight is not None:
                grad_x = groups.times(grad_hidden, fc1_weight)
            if fc1_input is not None:
                grad_fc1 = groups.outer(grad_hidden, fc1_input)
        return grad_x, grad_fc1, grad_fc2, None, None, None, None, None


class GroupedMLP(torch.nn.Module):
    """The experts of a mixture-of-experts layer: a module around `grouped_mlp`.

    Its parameters are `fc1_weight`, [num_experts, ffn_size or 2 * ffn_size, hidden_size], and `fc2_weight`,
    [num_experts, hidden_size, ffn_size].

    Parameters
    ----------
    num_experts, hidden_size, ffn_size : int
        Number of experts; width of a token, in and out; width between activation and FC2.
    activation, keep_fc1_input, keep_activation_input, keep_fc2_input
        As in `grouped_mlp`; the latter may be changed between steps.
    device, dtype
        Of the weights.

    Examples
    --------
    >>> experts = actoffload.moe.GroupedMLP(num_experts=4, hidden_size=16, ffn_size=32, keep_fc2_input=True)
    >>> experts(torch.randn(10, 16), torch.tensor([4, 0, 5, 1])).shape
    torch.Size([10, 16])
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str = "swiglu",
        keep_fc1_input: bool = False,
        keep_activation_input: bool = False,
        keep_fc2_input: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = 2 if _activation(activation).gated else 1
        check_whole(num_experts=num_experts, hidden_size=hidden_size, ffn_size=ffn_size, least=1)
        self.activation = activation
        self.keep_fc1_input = keep_fc1_input
        self.keep_activation_input = keep_activation_input
        self.keep_fc2_input = keep_fc2_input
        fc1 = torch.empty(num_experts, width * ffn_size, hidden_size, device=device, dtype=dtype)
        fc2 = torch.empty(num_experts, hidden_size, ffn_size, device=device, dtype=dtype)
        self.fc1_weight, self.fc2_weight = torch.nn.Parameter(fc1), torch.nn.Parameter(fc2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, for each expert as `torch.nn.Linear` does."""
        for weight in (self.fc1_weight, self.fc2_weight):
            bound = weight.shape[2] ** -0.5
            torch.nn.init.uniform_(weight, -bound, bound)

    def forward(
        self, x: torch.Tensor, tokens_per_expert: Sequence[int] | torch.Tensor, *, padded: bool = False
    ) -> torch.Tensor:
        """Apply the experts to tokens [tokens, hidden_size]; the arguments are those of `grouped_mlp`."""
        keep = {name: getattr(self, name) for name in ("keep_fc1_input", "keep_activation_input", "keep_fc2_input")}
        weights = self.fc1_weight, self.fc2_weight
        return grouped_mlp(x, tokens_per_expert, *weights, activation=self.activation, padded=padded, **keep)


def _check(x: torch.Tensor, counts: object, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, width: int) -> None:
    """Check shapes and counts; the products check dtypes and devices."""
    check_kind(torch.Tensor, x=x, fc1_weight=fc1_weight, fc2_weight=fc2_weight)
    fit = (x.dim(), fc1_weight.dim(), fc2_weight.dim()) == (2, 3, 3) and x.shape[1] == fc1_weight.shape[2]
    if not fit or fc2_weight.shape[::2] != (fc1_weight.shape[0], fc1_weight.shape[1] / width):
        raise ValueError(
            f"The shapes are x {list(x.shape)}, fc1_weight {list(fc1_weight.shape)}, fc2_weight "
            f"{list(fc2_weight.shape)}; expected [tokens, hidden], [experts, {width} * ffn, hidden] and "
            "[experts, out, ffn]."
        )
    if isinstance(counts, torch.Tensor):
        fit = counts.dtype in _INTEGERS and counts.shape == fc1_weight.shape[:1]
    else:
        fit = isinstance(counts, Sequence) and list(map(type, counts)) == [int] * len(fc1_weight)
    if not fit:
        raise TypeError(f"tokens_per_expert is {counts!r}; expected {len(fc1_weight)} integers, one for each expert.")


def _in_one_dtype(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does for a matrix product, but not float64; make strides such as the products take."""
    kind = operands[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        operands = tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in operands)
    x, *weights = operands
    return x.contiguous(), *(each if each.mT.is_contiguous() else each.contiguous() for each in weights)
