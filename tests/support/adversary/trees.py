"""Models as data for `actoffload.offload`: trees of modules, some of which are groups or kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import helpers
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actoffload

from .device import AdversarialDevice
from .harness import LAYERS, InjectedError, Run
from .models import DEVICE_KINDS, KINDS, LEAST, STREAM_KINDS, weights
from .programs import Forward, Step, Validate, steps

Found: TypeAlias = "list[tuple[str, nn.Module]]"
"""Role and module, in the order of registration."""

ONCE = {"first", "part", "fork", "failing"}
"""Operations whose recomputation gives another result."""


def everything(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the outputs of every operator that may be saved."""
    return True


@dataclass(frozen=True)
class Node:
    """A module with operations of its own and child modules between them."""

    role: str  # "group", "kept" or ""
    parts: tuple[Any, ...]  # kinds of operations and child modules, in execution order
    times: int = 1  # number of consecutive calls
    checkpointed: bool = False  # each call is in a checkpointed region

    def walk(self) -> Iterator[Node]:
        """Yield this node and its descendants in the order of registration."""
        yield self
        for part in self.parts:
            if isinstance(part, Node):
                yield from part.walk()


@dataclass(frozen=True)
class TreeForward(Forward):
    """A forward that may also skip modules, or be a loop outside of the model."""

    without: frozenset[int] = frozenset()  # modules that are skipped, by their number in `Node.walk`
    loop: bool = False  # the program calls the outermost modules, and not the model


@dataclass(frozen=True)
class TreeProgram:
    """A training program: the model, the arguments of `actoffload.offload`, the steps, and how it checkpoints."""

    model: Node
    options: dict[str, Any]
    steps: Sequence[Any]
    reentrant: bool = False


class Module(nn.Module):
    """The module of a node."""

    def __init__(self, node: Node, numbers: Iterator[int], env: Any, found: Found) -> None:
        super().__init__()
        self.number, self.times, self.env, self.checkpointed = next(numbers), node.times, env, node.checkpointed
        self.without: frozenset[int] = frozenset()
        found.append((node.role, self))
        self.inner, self.weights = nn.ModuleList(), nn.ParameterList()
        self.order: list[Any] = []
        for part in node.parts:
            if isinstance(part, Node):
                self.inner.append(Module(part, numbers, env, found))
                self.order.append(self.inner[-1])
            else:
                self.weights.append(nn.Parameter(weights(len(self.weights) + 1)[-1]))
                self.order.append((LAYERS[part], len(self.weights) - 1))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order:
            if isinstance(part, tuple):
                operation, number = part
                x = operation(self.env, x, self.weights[number])
            else:
                x = part.run(x)
        return x

    def run(self, x: Tensor) -> Tensor:
        """Call this module `times` times, or not at all if the forward skips it."""
        for _ in range(0 if self.number in self.without else self.times):
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(self, x, use_reentrant=self.env.program.reentrant, preserve_rng_state=False)
            else:
                x = self(x)
        return x


class Model(Module):
    """The outermost module."""

    def ready(self, step: TreeForward) -> None:
        """Set the step that the next forward runs."""
        for module in self.modules():
            if isinstance(module, Module):
                module.without = step.without
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        """Run the outermost modules up to the `stop` of the step."""
        for number, part in enumerate(self.order):
            x = part.run(x) if isinstance(part, Module) else part[0](self.env, x, self.weights[part[1]])
            if self.step.stop == number:
                if self.step.raises:
                    raise InjectedError
                return x
        return x


class ModelRun(Run):
    """One run of a `TreeProgram`."""

    program: TreeProgram

    def _build(self) -> None:
        found: Found = []
        self.model = Model(self.program.model, iter(range(10**6)), weakref.proxy(self), found).to(helpers.PLACE)
        self._groups, self._kept = (
            [module for role, module in found if role == wanted] for wanted in ("group", "kept")
        )

    def _open(self, device: AdversarialDevice) -> None:
        given = {"layers": self._groups, "keep": self._kept, "min_bytes": 4 * LEAST, **self.program.options}
        try:
            self.context = actoffload.offload(self.model, **given)
        except ValueError:  # there are not so many groups of any kind
            self.context = actoffload.offload(self.model, **{**given, "num_layers": None})

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.inputs]

    @staticmethod
    def count(program: TreeProgram) -> int | None:
        return None

    def recording(self) -> AbstractContextManager[Any]:
        recording: AbstractContextManager[Any] = self.context.recording()
        return recording

    def forward(self, step: TreeForward | Validate) -> Tensor:
        trained = isinstance(step, TreeForward)
        x = self.begin(trained) * 1.0
        self.model.ready(step if isinstance(step, TreeForward) else TreeForward(-1))
        try:
            x = type(self.model).forward(self.model, x) if trained and step.loop else self.model(x)
            return x + self.state["forked"] if "forked" in self.state else x
        finally:
            self.crossing()
            self.state = {}


# Strategies


@st.composite
def _node(draw: st.DrawFn, kinds: list[str], depth: int) -> Node:
    operation: st.SearchStrategy[Any] = st.sampled_from(kinds)
    part = st.one_of(operation, operation, _node(kinds, depth - 1)) if depth else operation
    parts = draw(st.lists(part, min_size=1, max_size=3))
    # What a region runs again must not depend on the forwards since, which skip other modules.
    again = all(isinstance(each, str) and each not in ONCE for each in parts) and draw(st.integers(0, 3)) == 0
    return Node(draw(st.sampled_from(["group", "group", "group", "kept", ""])), tuple(parts), draw(_times), again)


_times = st.sampled_from([1, 1, 1, 1, 2])


@st.composite
def tree_programs(draw: st.DrawFn, *, streams: bool = False, recompute: bool = False) -> TreeProgram:
    """Draw a program; at least three of its modules are groups, and `recompute` recomputes them."""
    kinds = sorted(set(KINDS)) + (2 * sorted(STREAM_KINDS) + sorted(DEVICE_KINDS) if streams else [])
    kinds = [kind for kind in kinds if not recompute or kind not in ONCE]
    outer = draw(st.lists(_node(kinds, 2), min_size=3, max_size=6))
    outer = [replace(node, role="group") if k < 3 else node for k, node in enumerate(outer)]
    mixed: list[Any] = []
    for node in outer:
        if draw(st.integers(0, 3)) == 0:
            mixed.append(draw(st.sampled_from(kinds)))
        mixed.append(node)
    root = Node(draw(st.sampled_from(["", "", "kept"])), tuple(mixed))
    options = {
        "num_layers": draw(st.sampled_from([None, None, 1, 2])),
        "max_inflight": draw(st.sampled_from([None, None, 1, 2])),
        "fraction": draw(st.sampled_from([1.0, 1.0, 0.5])),
        "max_host_bytes": draw(st.sampled_from([None, None, None, 4096])),
        "recompute": recompute and draw(st.sampled_from([True, [torch.ops.aten.mm.default], everything])),
    }
    return TreeProgram(root, options, draw(_steps(root, aside=streams)), draw(st.booleans()))


@st.composite
def _steps(draw: st.DrawFn, root: Node, *, aside: bool) -> list[Step]:
    count = sum(1 for _ in root.walk())
    found: list[Step] = []
    for step in draw(steps(len(root.parts), aside=aside, passes=4)):
        if isinstance(step, Forward):
            most = draw(st.sampled_from([0, 0, 1, 3]))
            without = draw(st.frozensets(st.integers(1, max(1, count - 1)), max_size=most))
            step = TreeForward(step.run, step.stop, step.raises, without, draw(st.integers(0, 3)) == 0)
        found.append(step)
    return found
