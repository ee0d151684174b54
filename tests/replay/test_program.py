"""The program of a small gated MLP: which values are dropped, from what they are made, in which order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recomputing import ROWS, WIDTH
from torch import Tensor, nn

from actoffload.replay import Program, Trace, Tracer, everything, policy_for, saving

PRODUCTS = [torch.ops.aten.mm.default]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def trace() -> Trace:
    module, x = Gated(), torch.randn(ROWS, WIDTH, requires_grad=True)
    tracer = Tracer(module, [x], everything, lambda: None)

    def pack(tensor: Tensor) -> Tensor:
        tracer.save(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        tracer.begin()
        y = module(x)
        tracer.end()
    return tracer.result([y])


def names(program: Program) -> list[str]:
    return [step.node.name.removeprefix("aten.") for step in program.steps.values()]


def made_by(program: Program, values: object) -> set[str]:
    """Return the operators that make some values of a program."""
    nodes = program.trace.nodes
    return {nodes[program.trace.values[value].maker].name.removeprefix("aten.") for value in values}  # type: ignore


GATE, UP, SILU, PRODUCT = "mm.default#0", "mm.default#1", "silu.default#0", "mul.Tensor#0"


def test_everything():
    program = Program(trace(), everything, 64)
    assert names(program) == [GATE, SILU, UP, PRODUCT]
    assert made_by(program, program.dropped) == {GATE, SILU, UP, PRODUCT}
    sources = list(program.sources.values())
    assert sources.count(0) == 1, "the input"
    assert sorted(source.module for source in sources if source != 0) == [1, 2], "the weights of gate and up"
    assert made_by(program, program.held) == {GATE, UP}
    assert made_by(program, program.ends) == {PRODUCT}


@pytest.mark.parametrize("policy", [policy_for(PRODUCTS), policy_for("auto"), saving([f"aten.{GATE}", f"aten.{UP}"])])
def test_cheap_operators(policy):
    """The results of the products stay, and are the sources."""
    program = Program(trace(), policy, 64)
    assert names(program) == [SILU, PRODUCT]
    assert made_by(program, program.dropped) == {SILU, PRODUCT}
    assert set(program.sources.values()) == {None}
    assert made_by(program, program.sources) == {GATE, UP}
    assert {program.trace.entries[entry].value for entry in program.kept_at.values()} == set(program.sources)
    assert not program.held


def test_each_value_is_made_from_what_is_there():
    program = Program(trace(), everything, 64)
    values = {name: value for value in program.dropped for name in made_by(program, [value])}
    order = dict(zip(map(id, program.steps.values()), names(program), strict=True))

    def run(target: str, *present: str) -> list[str]:
        return [order[id(step)] for step, _ in program.to_run(values[target], {values[name] for name in present})]

    assert run(PRODUCT) == [GATE, SILU, UP, PRODUCT]
    assert run(PRODUCT, GATE, UP) == [SILU, PRODUCT]
    assert run(PRODUCT, SILU) == [UP, PRODUCT]
    assert run(UP) == [UP]
    assert run(UP, UP) == []


def test_banned_and_small_values_stay():
    found = trace()
    program = Program(found, everything, 64)
    (silu,) = (value for value in program.dropped if made_by(program, [value]) == {SILU})
    program = Program(found, everything, 64, {silu})
    assert made_by(program, program.dropped) == {GATE, UP, PRODUCT}
    assert program.sources[silu] is None
    assert names(program) == [GATE, UP, PRODUCT]
    assert not Program(found, everything, ROWS * WIDTH * 4 + 1).dropped
    assert Program(found, everything, ROWS * WIDTH * 4).dropped


def test_a_program_without_operators():
    program = Program(trace(), policy_for([*PRODUCTS, torch.ops.aten.silu.default, torch.ops.aten.mul.Tensor]), 64)
    assert (program.dropped, program.steps, program.sources) == (frozenset(), {}, {})


def test_running_it_gives_the_values_of_the_call():
    module, x = Gated(), torch.randn(ROWS, WIDTH)
    program = Program(trace(), everything, 64)
    weights = dict(enumerate(module.modules()))

    def source(value: int) -> Tensor:
        found = program.sources[value]
        return x if found == 0 else getattr(weights[found.module], found.name)

    with torch.no_grad():
        values = {value: source(value) for value in program.sources}
        for step in program.steps.values():
            program.run(step, values)
        gate, up = module.gate(x), module.up(x)
        want = {GATE: gate, SILU: F.silu(gate), UP: up, PRODUCT: F.silu(gate) * up}
    for value in values.keys() - program.sources.keys():
        (name,) = made_by(program, [value])
        assert torch.equal(values[value], want.pop(name))
    assert not want


def test_what_a_trace_shows():
    found = trace()
    assert [node.name for node in found.nodes if node.module] == [f"aten.mm.default#{k}" for k in range(3)]
    assert [node.module for node in found.nodes if "mm" in node.name] == ["gate", "up", "down"]
    assert found.steady
    assert {found.nodes[found.values[value].maker].name for value in found.returned} == {"aten.mm.default#2"}
