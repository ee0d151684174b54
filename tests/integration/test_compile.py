"""Compiled layers: the context must not make them compile again and again."""

from __future__ import annotations

import pytest
import torch
from helpers import make, min_elements
from torch import nn
from torch._dynamo import lookup_backend

import actoffload


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("what", ["in place, as one graph", "a function that calls it"])
@pytest.mark.filterwarnings("ignore")  # Dynamo's own, about global hooks and deprecated parts of torch
def test_compiled_layers_offload_and_are_compiled_once(what):
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled: list[object] = []

    def backend(graph, inputs):
        compiled.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    modules = [Block() for _ in range(3)]
    if what == "in place, as one graph":  # what Dynamo sees includes the hooks of the context
        layers = modules
        for module in modules:
            module.compile(backend=backend, fullgraph=True)
    else:
        layers = [torch.compile(lambda x, module=module: module(x), backend=backend) for module in modules]
    data = torch.randn(64, 64)

    def gradients(pair):
        context, sync = pair
        x = data * 1.0
        for module, layer in zip(modules, layers, strict=True):
            module.zero_grad()
            with context:
                x = layer(x)
            x = sync(x)
        x.square().sum().backward()
        return [parameter.grad.clone() for module in modules for parameter in module.parameters()]

    with min_elements(64):
        expected = gradients(actoffload.get_cpu_offload_context())
        pair = make(1, 3)
        gradients(pair)
        so_far = len(compiled)
        assert so_far >= 1
        for _ in range(10):  # more often than Dynamo compiles anything again before it gives up
            assert all(map(torch.equal, gradients(pair), expected))
        assert len(compiled) == so_far
    assert pair[0].statistics().tensors_offloaded > 0
    torch._dynamo.reset()
