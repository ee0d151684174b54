"""Models as data for `actoffload.offload`: trees of modules, some of which are groups or kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from .modelruns import ONCE, everything
from .models import DEVICE_KINDS, KINDS, ROWS, STREAM_KINDS, WIDTH, Surroundings, weights

__all__ = ["Forward", "Model", "Node", "TreeProgram", "build", "tree_programs"]

Found: TypeAlias = "list[tuple[str, nn.Module]]"
"""Role and module, in the order of registration."""

OPERATIONS = {**KINDS, **STREAM_KINDS, **DEVICE_KINDS}


@dataclass(frozen=True)
class Node:
    """A module with operations of its own and child modules between them.

    Parameters
    ----------
    role : str
        ``"group"``, ``"kept"`` or ``""``.
    parts : tuple of str or Node
        Kinds of operations and child modules, in execution order.
    times : int
        Number of consecutive calls.
    """

    role: str
    parts: tuple[Any, ...]
    times: int = 1

    def walk(self) -> Iterator[Node]:
        """Yield this node and its descendants in the order of registration."""
        yield self
        for part in self.parts:
            if isinstance(part, Node):
                yield from part.walk()


@dataclass(frozen=True)
class Forward:
    """A forward that may skip modules, stop early, raise, or be a loop outside of the model.

    Parameters
    ----------
    run : int
        Number of the forward.
    without : frozenset of int
        Modules that are skipped, by their number in `Node.walk`.
    stop : int or None
        Index of the outermost module after which the forward stops.
    raises : bool
        Whether it raises at `stop`.
    loop : bool
        Whether the program calls the outermost modules, and not the model.
    """

    run: int
    without: frozenset[int] = frozenset()
    stop: int | None = None
    raises: bool = False
    loop: bool = False


@dataclass(frozen=True)
class TreeProgram:
    """A training program: the model, the arguments of `actoffload.offload`, and the steps."""

    model: Node
    options: dict[str, Any]
    steps: Sequence[Any]


class Module(nn.Module):
    """The module of a node."""

    def __init__(self, node: Node, numbers: Iterator[int], env: Surroundings, found: Found) -> None:
        super().__init__()
        self.number, self.times, self.env = next(numbers), node.times, env
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
                self.order.append((OPERATIONS[part], len(self.weights) - 1))

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
            x = self(x)
        return x


class Model(Module):
    """The outermost module."""

    def ready(self, step: Forward) -> None:
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
                    raise InterruptedError
                return x
        return x


def build(root: Node, env: Surroundings) -> tuple[Model, list[nn.Module], list[nn.Module]]:
    """Return the model of a tree, its groups, and its kept modules."""
    found: Found = []
    model = Model(root, iter(range(10**6)), env, found)
    return model, [m for role, m in found if role == "group"], [m for role, m in found if role == "kept"]


def start(k: int) -> Tensor:
    """Return the input of a run."""
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) * (1 + k)


# Strategies


@st.composite
def _node(draw: st.DrawFn, kinds: list[str], depth: int) -> Node:
    operation: st.SearchStrategy[Any] = st.sampled_from(kinds)
    part = st.one_of(operation, operation, _node(kinds, depth - 1)) if depth else operation
    parts = draw(st.lists(part, min_size=1, max_size=3))
    return Node(draw(st.sampled_from(["group", "group", "group", "kept", ""])), tuple(parts), draw(_times))


_times = st.sampled_from([1, 1, 1, 1, 2])


@st.composite
def tree_programs(draw: st.DrawFn, *, streams: bool = False, recompute: bool = False) -> TreeProgram:
    """Draw a program; at least three of its modules are groups, and `recompute` recomputes them."""
    kinds = sorted(set(KINDS)) + (2 * sorted(STREAM_KINDS) + sorted(DEVICE_KINDS) if streams else [])
    kinds = [kind for kind in kinds if not recompute or kind not in ONCE]
    outer = draw(st.lists(_node(kinds, 2), min_size=3, max_size=6))
    outer = [Node("group", node.parts, node.times) if k < 3 else node for k, node in enumerate(outer)]
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
    return TreeProgram(root, options, draw(_steps(root)))


@st.composite
def _steps(draw: st.DrawFn, root: Node) -> list[Any]:
    """Draw forwards, and for their graphs ("backward", run, retain), ("drop", run), ("validate",)."""
    count = sum(1 for _ in root.walk())
    steps: list[Any] = []
    alive: list[int] = []
    passes, begun, retained = draw(st.integers(1, 4)), 0, 0
    while begun < passes or alive:
        what = draw(st.sampled_from(["forward", "backward", "backward", "other"]))
        if begun < passes and (what == "forward" or not alive):
            without = draw(
                st.frozensets(st.integers(1, max(1, count - 1)), max_size=draw(st.sampled_from([0, 0, 1, 3])))
            )
            how = draw(st.integers(0, 5))
            stop = draw(st.integers(0, len(root.parts) - 1)) if how < 2 else None
            step = Forward(begun, without, stop, how == 0, draw(st.integers(0, 3)) == 0)
            steps.append(step)
            alive += [] if step.raises else [begun]
            begun += 1
        elif what == "other" and begun < passes:
            steps.append(("validate",))
        elif what == "backward":
            run = draw(st.sampled_from(alive))
            retain = retained < 2 and draw(st.booleans())
            retained += retain
            steps.append(("backward", run, retain))
            if not retain:
                alive.remove(run)
        elif alive:
            run = draw(st.sampled_from(alive))
            steps.append(("drop", run))
            alive.remove(run)
    return steps
