"""The experts of a mixture-of-experts layer as one operation.

One autograd function instead of three saves three tensors besides the weights: the inputs of FC1, of the activation and
of FC2, as Transformer Engine's does.  `start_offload` starts the copy of each where it is final, not at the end.

``torch.nn.functional.grouped_mm`` multiplies the rows of each expert with its matrix.  It takes the ends of the groups
of rows as a tensor on the device.  A loop over the experts takes every dtype, size and device, but needs the counts on
the host.  Counts are never fetched from an accelerator, because that makes the host wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .._arguments import check_whole
from .._torch.modules import opaque
from ..annotations import mark_not_offload, start_offload

_aten = torch.ops.aten
_KEEP = ("keep_fc1_input", "keep_activation_input", "keep_fc2_input")
_ALIGNMENT = 16  # bytes, of each row of an operand of grouped_mm
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# Activations: their gradients are those of autograd, by the same kernels, without what autograd would save.


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation of the output of FC1, and its gradient ``(grad_y, x) -> grad_x``, both pointwise.

    If `gated`, the output of FC1 is [tokens, 2 * ffn]: the function of the first half, times the second half.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gated: bool

    @property
    def width(self) -> int:
        """Columns of FC1's output for each column of FC2's input."""
        return 2 if self.gated else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return FC2's input, [tokens, ffn], from FC1's output, [tokens, width * ffn]."""
        if not self.gated:
            return self.function(x)
        gate, value = x.chunk(2, dim=-1)
        return self.function(gate).mul_(value)

    def backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of FC1's output from that of FC2's input."""
        if not self.gated:
            return self.gradient(grad, x)
        gate, value = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        grad_gate, grad_value = result.chunk(2, dim=-1)
        grad_gate.copy_(self.gradient(grad * value, gate))
        torch.mul(grad, self.function(gate), out=grad_value)
        return result


_ACTIVATIONS = {
    "swiglu": Activation(F.silu, _aten.silu_backward.default, gated=True),
    "geglu": Activation(F.gelu, _aten.gelu_backward.default, gated=True),
    "silu": Activation(F.silu, _aten.silu_backward.default, gated=False),
    "gelu": Activation(F.gelu, _aten.gelu_backward.default, gated=False),
    "srelu": Activation(
        lambda x: F.relu(x).square_(),
        lambda grad, x: _aten.threshold_backward.default(F.relu(x).mul_(2).mul_(grad), x, 0),
        gated=False,
    ),
}


def _named(name: str) -> Activation:
    """Return the activation of a name that `grouped_mlp` takes."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; expected one of {', '.join(map(repr, _ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


# Matrix products of rows, sorted by group, with a matrix for each group


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows belong to which group."""

    rows: int
    number: int  # of groups
    counts: tuple[int, ...] | None  # rows of each group, for the loop
    offsets: torch.Tensor | None  # where each group ends, [number], int32 on the device, for grouped_mm
    padded: bool  # rows may follow that belong to no group

    @staticmethod
    def of(counts: Sequence[int] | torch.Tensor, x: torch.Tensor, widths: Sequence[int], *, padded: bool) -> Groups:
        """Check how many rows of `x` each group has, and choose the products; `widths` are those of all operands."""
        rows, number = x.shape[0], len(counts)
        if isinstance(counts, torch.Tensor):
            fits = counts.device == x.device and _takes_grouped_mm(x, widths)
            known = counts.tolist() if counts.device.type == "cpu" else None  # reading values costs nothing here
            if known is None and not fits:
                raise ValueError(
                    f"tokens_per_expert is on {counts.device} and x, {x.dtype}, on {x.device}: counts on an "
                    "accelerator need grouped_mm, which has a kernel for bfloat16, rows of a multiple of 16 bytes and "
                    "compute capability 9.x and 10.x. Elsewhere give a list of ints; where the counts are on the "
                    "device, counts.tolist() fetches them and waits for the device."
                )
        else:
            fits, known = False, [*counts]
        if known is not None:
            total = sum(known)
            if min(known) < 0 or total > rows or (total < rows and not padded):
                raise ValueError(
                    f"tokens_per_expert is {known} and x has {rows} tokens; expected as many in all, none negative, "
                    "or padded=True where rows without an expert follow."
                )
        if fits:
            assert isinstance(counts, torch.Tensor)
            return Groups(rows, number, None, counts.cumsum(0).to(torch.int32), padded)
        assert known is not None
        return Groups(rows, number, tuple(known), None, padded)

    def times(self, x: torch.Tensor, weight: torch.Tensor, *, clean: bool = False) -> torch.Tensor:
        """Return each group of rows [rows, k] times its matrix [number, k, n]: [rows, n], contiguous.

        One of the last two strides of `weight` is 1.  Rows of no group are undefined, or zero if `clean`.
        """
        if not self.rows:
            return x.new_zeros(0, weight.shape[2])
        if self.offsets is not None:
            result = F.grouped_mm(x, weight, offs=self.offsets)
            if clean and self.padded:
                behind = torch.arange(self.rows, device=x.device) >= self.offsets[-1]
                result.masked_fill_(behind.unsqueeze(1), 0.0)  # not a product: what lies there may be NaN
            return result
        result = x.new_empty(self.rows, weight.shape[2])
        for part, rows, matrix in zip(self._split(result), self._split(x), weight.unbind(), strict=True):
            torch.mm(rows, matrix, out=part)
        if clean:
            assert self.counts is not None
            result[sum(self.counts) :].zero_()
        return result

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the sums of the outer products of rows [rows, n] and [rows, k] by group, as a weight's gradient is.

        The result, [number, n, k], is zero for a group without rows.
        """
        shape = (self.number, a.shape[1], b.shape[1])
        if not self.rows:
            return a.new_zeros(shape)
        if self.offsets is not None:
            result = F.grouped_mm(a.t(), b, offs=self.offsets)
            if _leaves_garbage(a.device):
                empty = self.offsets.diff(prepend=self.offsets.new_zeros(1)) == 0
                result.masked_fill_(empty.view(-1, 1, 1), 0.0)
            return result
        result = a.new_empty(shape)
        for matrix, left, right in zip(result.unbind(), self._split(a), self._split(b), strict=True):
            torch.mm(left.t(), right, out=matrix)
        return result

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each group."""
        assert self.counts is not None
        return torch.split(rows[: sum(self.counts)], list(self.counts))


def _takes_grouped_mm(x: torch.Tensor, widths: Sequence[int]) -> bool:
    """Return whether grouped_mm takes these operands without the host."""
    if any(width * x.element_size() % _ALIGNMENT for width in widths):
        return False
    if x.device.type == "cpu":
        return x.dtype in _CPU_DTYPES
    # Elsewhere torch runs grouped_mm as a loop of its own, for which it copies the offsets to the host.
    return x.device.type == "cuda" and _has_kernel(x.device) and x.dtype is torch.bfloat16


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def _leaves_garbage(device: torch.device) -> bool:
    """Whether the kernel's sum over no rows at all is what lay in the accumulator (CUTLASS issue 2674)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


# The operation


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

    In an offloading context all saved tensors are offloaded, except the weights.  Only what the wanted gradients need
    is saved: no FC2 input, for instance, if `fc2_weight` is frozen.

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
    TypeError
        If an operand is not a floating point tensor, dtypes differ, or counts are not integers.
    ValueError
        If shapes, devices or counts do not fit, or counts are on an accelerator without a kernel for the operands.
        Values on an accelerator are not checked: without `padded`, rows without an expert are undefined.

    Notes
    -----
    With counts on the device the products are ``torch.nn.functional.grouped_mm``: on CUDA for bfloat16 on devices of
    compute capability 9.x and 10.x, if the operands' rows are multiples of 16 bytes.  The loop takes every floating
    point dtype, device and size, and is not recomputed.  Backward cannot be differentiated again.

    Examples
    --------
    >>> x, fc1_weight, fc2_weight = torch.randn(5, 8), torch.randn(3, 32, 8), torch.randn(3, 8, 16)
    >>> actoffload.moe.grouped_mlp(x, [2, 0, 3], fc1_weight, fc2_weight).shape
    torch.Size([5, 8])
    """
    chosen = _named(activation)
    _check(x, tokens_per_expert, fc1_weight, fc2_weight, chosen)
    x, fc1_weight, fc2_weight = _in_one_dtype(x, fc1_weight, fc2_weight)
    groups = Groups.of(tokens_per_expert, x, (*fc1_weight.shape[1:], *fc2_weight.shape[1:]), padded=padded)
    keep = keep_fc1_input, keep_activation_input, keep_fc2_input
    # Counts that the host knows may differ in the next call, and nothing else in it would show that.  So they are
    # passed as an object, with which a function is not run again; ends on the device are tensors like all others.
    known = None if groups.counts is None else groups
    result: torch.Tensor = _GroupedMLP.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), _dense(fc1_weight), _dense(fc2_weight), groups.offsets, known, padded, activation, keep
    )
    return result


opaque(grouped_mlp, "grouped_mlp marks tensors for offloading, which a compiled graph cannot do")


class _GroupedMLP(torch.autograd.Function):
    """FC1, activation and FC2 of all experts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        fc1_weight: torch.Tensor,
        fc2_weight: torch.Tensor,
        offsets: torch.Tensor | None,
        known: Groups | None,
        padded: bool,
        name: str,
        keep: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        groups = known or Groups(x.shape[0], fc1_weight.shape[0], None, offsets, padded)
        activation = _named(name)
        x_grad, fc1_grad, fc2_grad, *_ = ctx.needs_input_grad
        inner = x_grad or fc1_grad  # backward goes through the activation
        keep_fc1_input, keep_activation_input, keep_fc2_input = keep
        fc1_input = _saved(x, keep_fc1_input) if fc1_grad else None
        # Clean: what is saved has the same bits whenever it is computed.
        hidden = groups.times(x, fc1_weight.transpose(1, 2), clean=True)
        activation_input = _saved(hidden, keep_activation_input) if inner else None
        active = activation.forward(hidden)
        fc2_input = _saved(active, keep_fc2_input) if fc2_grad else None
        result = groups.times(active, fc2_weight.transpose(1, 2), clean=True)

        weights = fc1_weight if x_grad else None, fc2_weight if inner else None
        mark_not_offload(*weights)
        ctx.save_for_backward(fc1_input, activation_input, fc2_input, *weights, offsets)
        ctx.groups, ctx.activation = replace(groups, offsets=None), activation
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fc1_input, activation_input, fc2_input, fc1_weight, fc2_weight, offsets = ctx.saved_tensors
        groups: Groups = replace(ctx.groups, offsets=offsets)
        grad = grad.contiguous()
        grad_x = grad_fc1 = grad_fc2 = None
        if fc2_input is not None:
            grad_fc2 = groups.outer(grad, fc2_input)
        if activation_input is not None:
            grad_hidden = ctx.activation.backward(groups.times(grad, fc2_weight), activation_input)
            if fc1_weight is not None:
                grad_x = groups.times(grad_hidden, fc1_weight, clean=True)
            if fc1_input is not None:
                grad_fc1 = groups.outer(grad_hidden, fc1_input)
        return grad_x, grad_fc1, grad_fc2, None, None, None, None, None


class GroupedMLP(torch.nn.Module):
    """The experts of a mixture-of-experts layer: a module around `grouped_mlp`.

    Parameters
    ----------
    num_experts, hidden_size, ffn_size : int
        Number of experts; width of a token, in and out; width between activation and FC2.
    activation, keep_fc1_input, keep_activation_input, keep_fc2_input
        As in `grouped_mlp`; the latter may be changed between steps.
    device, dtype
        Of the weights.

    Raises
    ------
    ValueError
        If there is no such activation, or a size is less than 1.

    Attributes
    ----------
    fc1_weight : torch.nn.Parameter
        [num_experts, ffn_size or 2 * ffn_size, hidden_size].
    fc2_weight : torch.nn.Parameter
        [num_experts, hidden_size, ffn_size].

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
        width = _named(activation).width
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
        self,
        x: torch.Tensor,
        tokens_per_expert: Sequence[int] | torch.Tensor,
        *,
        padded: bool = False,
    ) -> torch.Tensor:
        """Apply the experts to tokens [tokens, hidden_size]; the arguments are those of `grouped_mlp`."""
        more: dict[str, Any] = {name: getattr(self, name) for name in ("activation", *_KEEP)}
        return grouped_mlp(x, tokens_per_expert, self.fc1_weight, self.fc2_weight, padded=padded, **more)


def _saved(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    """Keep a tensor that will be saved, or start its copy."""
    (mark_not_offload if keep else start_offload)(tensor)
    return tensor


# Checks of operands


def _check(
    x: torch.Tensor, counts: object, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, activation: Activation
) -> None:
    """Check types, shapes and devices; `_in_one_dtype` compares dtypes."""
    operands = {"x": x, "fc1_weight": fc1_weight, "fc2_weight": fc2_weight}
    for name, tensor in operands.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"{name} is a {kind}; expected a floating point tensor.")
    fit = (x.dim(), fc1_weight.dim(), fc2_weight.dim()) == (2, 3, 3) and x.shape[1] == fc1_weight.shape[2]
    if not fit or fc2_weight.shape[::2] != (fc1_weight.shape[0], fc1_weight.shape[1] / activation.width):
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in operands.items())
        raise ValueError(
            f"The shapes are {found}; expected [tokens, hidden], [experts, {activation.width} * ffn, hidden] and "
            "[experts, out, ffn]."
        )
    if not x.device == fc1_weight.device == fc2_weight.device:
        raise ValueError(f"x is on {x.device}, and weights on {fc1_weight.device} and {fc2_weight.device}.")
    if isinstance(counts, torch.Tensor):
        fit = counts.dtype in _INTEGERS and counts.shape == fc1_weight.shape[:1]
    else:
        fit = isinstance(counts, Sequence) and list(map(type, counts)) == [int] * len(fc1_weight)
    if not fit:
        raise TypeError(f"tokens_per_expert is {counts!r}; expected {len(fc1_weight)} integers, one for each expert.")


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with strides that the products take; transposed ones are not copied."""
    return weight if weight.transpose(1, 2).is_contiguous() else weight.contiguous()


def _in_one_dtype(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does for a matrix product; float64 is left alone."""
    kind = operands[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        operands = tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in operands)
    x, *weights = operands
    for name, weight in zip(("fc1_weight", "fc2_weight"), weights, strict=True):
        if weight.dtype is not x.dtype:
            raise TypeError(f"x has dtype {x.dtype} and {name} {weight.dtype}; cast one, or run under torch.autocast.")
    return operands
