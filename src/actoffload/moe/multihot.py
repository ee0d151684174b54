"""From a token's list of experts to a table of all experts, without reading values on the host.

`[Note: no masks]`  The size of a result indexed with a mask depends on values, so the host waits for the device.
Here every index is increased by one and written into a table with one more column: -1 goes to column 0, which is cut
off.  An index out of range still fails the bounds check of `scatter`.
"""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import check_whole

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
    TypeError
        If `indices` or `probs` is not a tensor or has another dtype, or `num_experts` is not a whole number.
    ValueError
        If the shapes or devices do not match, or `num_experts` is less than 1.
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
    _check(indices, probs, num_experts)
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
        table = probs.new_zeros(probs.shape[0], num_experts + 1)
        return _without_first(table.scatter(1, columns, probs))

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


def _check(indices: torch.Tensor, probs: torch.Tensor, num_experts: int) -> None:
    for name, value, dtypes in (("indices", indices, _INDICES), ("probs", probs, _PROBS)):
        if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
            found = f"has dtype {value.dtype}" if isinstance(value, torch.Tensor) else f"is a {type(value).__name__}"
            raise TypeError(f"{name} {found}; expected a tensor [tokens, topk] of {', '.join(map(str, dtypes))}.")
    if indices.dim() != 2 or probs.shape != indices.shape:
        raise ValueError(
            f"indices has shape {list(indices.shape)} and probs {list(probs.shape)}; expected [tokens, topk] of both."
        )
    if probs.device != indices.device:
        raise ValueError(f"indices is on {indices.device} and probs on {probs.device}; move them to one device.")
    check_whole(num_experts=num_experts, least=1)
