"""Programs whose layers are the blocks of a model with `actoffload.offload`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actoffload

from .device import AdversarialDevice
from .harness import LAYERS, InjectedError, Run
from .models import LEAST, ROWS, WIDTH
from .programs import Forward, Program, Validate, programs

__all__ = ["ONCE", "ModelProgram", "ModelRun", "everything", "model_programs"]

ONCE = {"first", "part", "fork", "failing"}
"""Operations whose recomputation gives another result."""


def everything(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the outputs of every operator that may be saved."""
    return True


@dataclass(frozen=True)
class ModelProgram(Program):
    """A training program of a model.

    Parameters
    ----------
    calls : sequence of sequence of int
        For each forward, the indices of the blocks in the order of their calls.
    chosen, keep : sequence of str
        Patterns of the modules to offload and to keep.
    num_layers, max_inflight : int or None
        As in `actoffload.offload`.
    checkpointed : frozenset of int
        Indices of the blocks that are checkpointed.
    reentrant : bool
        Whether the reentrant variant of checkpointing is used.
    recompute : bool or Policy
        As in `actoffload.offload`.
    """

    calls: Sequence[Sequence[int]] = ()
    chosen: Sequence[str] = ("blocks.*",)
    keep: Sequence[str] = ()
    num_layers: int | None = None
    max_inflight: int | None = None
    checkpointed: frozenset[int] = frozenset()
    reentrant: bool = False
    recompute: Any = False


class Operation(nn.Module):
    """One operation, with its weight."""

    def __init__(self, run: ModelRun, kind: str, weight: Tensor) -> None:
        super().__init__()
        self.run = weakref.proxy(run)
        self.kind = kind
        self.weight = [weight]  # in a list, so that it is not registered: the program already has it among its leaves

    def forward(self, x: Tensor) -> Tensor:
        return LAYERS[self.kind](self.run, x, self.weight[0])


class Block(nn.Module):
    """The operations of one layer; all but the first are in an inner module."""

    def __init__(self, run: ModelRun, kinds: Sequence[str], weights: Sequence[Tensor]) -> None:
        super().__init__()
        first, *rest = [Operation(run, kind, weight) for kind, weight in zip(kinds, weights, strict=True)]
        self.outer, self.inner = first, nn.Sequential(*rest)

    def forward(self, x: Tensor, raises: bool) -> Tensor:
        x = self.inner(self.outer(x)) * 1.5
        if raises:
            raise InjectedError
        return x


class Model(nn.Module):
    """Call the blocks in the given order, with an operation between them that belongs to no block."""

    def __init__(self, run: ModelRun) -> None:
        super().__init__()
        program, weights = run.program, iter(run.weights)
        self.checkpointed, self.reentrant = program.checkpointed, program.reentrant
        self.blocks = nn.ModuleList(Block(run, kinds, [next(weights) for _ in kinds]) for kinds in program.layers)

    def forward(self, x: Tensor, calls: Sequence[int], raises: bool) -> Tensor:
        for k, index in enumerate(calls):
            block, fails = self.blocks[index], raises and k == len(calls) - 1
            x = x.sin()
            if index in self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, fails, use_reentrant=self.reentrant, preserve_rng_state=False)
            else:
                x = block(x, fails)
        return x * 2.0


class ModelRun(Run):
    """One run of a `ModelProgram`, on `device`; without offloading if that is None."""

    program: ModelProgram

    def __init__(self, program: ModelProgram, device: AdversarialDevice | None, seed: int) -> None:
        self._forwards = 0
        super().__init__(program, device, seed)
        if device is None:
            self.model = Model(self)

    def _open(self, device: AdversarialDevice) -> None:
        program = self.program
        self.model = Model(self)
        self.context = actoffload.offload(
            self.model,
            layers=program.chosen,
            keep=program.keep,
            num_layers=program.num_layers,
            max_inflight=program.max_inflight,
            min_bytes=4 * LEAST,
            max_host_bytes=program.limit,
            recompute=program.recompute,
        )

    def recording(self) -> AbstractContextManager[Any]:
        recording: AbstractContextManager[Any] = self.context.recording()
        return recording

    @staticmethod
    def passes(program: Program) -> int:
        return sum(isinstance(step, Forward) for step in program.steps)

    def forward(self, step: Forward | Validate) -> Tensor:
        calls = self.program.calls[self._forwards]
        self._forwards += 1
        self.state, self.parts = {}, 0
        x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) * (1 + len(self.inputs))
        raises = False
        if isinstance(step, Forward):
            self.inputs.append(x.requires_grad_())
            calls = calls if step.stop is None else calls[: step.stop + 1]
            raises = step.raises
        try:
            x = self.model(x, calls, raises)
            return x + self.state["forked"] if "forked" in self.state else x
        finally:
            self.crossing()
            self.state = {}


@st.composite
def model_programs(
    draw: st.DrawFn, *, streams: bool = False, limited: bool = False, recompute: bool = False
) -> ModelProgram:
    """Draw a program whose forwards skip some blocks and call some twice; `recompute` recomputes its blocks."""
    base = draw(programs(manual=True, streams=streams, limited=limited))
    if recompute:
        base = replace(base, layers=[["linear" if kind in ONCE else kind for kind in of] for of in base.layers])
    blocks = range(len(base.layers))
    regular = list(blocks)
    calls = []
    for step in base.steps:
        if isinstance(step, Forward | Validate):
            any_order = st.lists(st.sampled_from(blocks), min_size=1, max_size=len(blocks) + 2)
            calls.append(draw(st.one_of(st.just(regular), st.just(regular), any_order)))
    may_be = [k for k in blocks if ONCE.isdisjoint(base.layers[k])]
    checkpointed = draw(st.frozensets(st.sampled_from(may_be))) if may_be and draw(st.booleans()) else frozenset()
    chosen, keep = draw(
        st.sampled_from(
            [
                (("blocks.*",), ()),
                (("blocks.*",), ()),
                (("blocks.?", "blocks.?.inner"), ()),
                (("blocks.?",), ("*.inner",)),
            ][: 2 if recompute else None]  # a group with others inside is not recomputed
        )
    )
    return ModelProgram(
        base.layers,
        None,
        base.steps,
        base.limit,
        calls=calls,
        chosen=chosen,
        keep=keep,
        num_layers=draw(st.one_of(st.none(), st.integers(1, len(blocks) - 1))),
        max_inflight=draw(st.sampled_from([None, 1, 2])),
        checkpointed=checkpointed,
        reentrant=draw(st.booleans()),
        recompute=recompute and draw(st.sampled_from([True, [torch.ops.aten.mm.default], everything])),
    )
