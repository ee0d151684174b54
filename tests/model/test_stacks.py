"""Finding the repeated blocks, in models built of plain PyTorch."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
from structures import (
    LEAVES,
    PARTS,
    PLAIN,
    STAGES,
    Block,
    MoeBlock,
    Parts,
    blocks,
)
from torch import nn

from actoffload._text import name_pattern
from actoffload.model.select import Names, choose, find_stacks


def found(model: nn.Module) -> dict[str, int]:
    """Return how many modules of each name, with ``*`` for indices, are chosen."""
    chosen = choose(Names(model), None)
    assert {each.kind for each in chosen} == {"layer"}
    modules = dict(model.named_modules())
    assert all(modules[each.name] is each.module for each in chosen)
    assert [each.name for each in chosen] == [n for n, m in modules.items() if any(m is c.module for c in chosen)]
    return dict(Counter(name_pattern(each.name) for each in chosen))


ALL = {**PLAIN, **PARTS, **STAGES, **LEAVES}


@pytest.mark.parametrize("name", ALL)
def test_structures(name):
    model, want = ALL[name]
    assert found(model) == want


@pytest.mark.parametrize("name", [*PLAIN, *PARTS, *STAGES])
def test_it_is_found_in_a_larger_model_too(name):
    model, want = ALL[name]
    around = Parts(backbone=Parts(net=model), norm=nn.LayerNorm(4))
    assert found(around) == {f"backbone.net.{key}": number for key, number in want.items()}


def test_the_transformer_of_pytorch():
    model = nn.Transformer(8, 2, num_encoder_layers=6, num_decoder_layers=3, batch_first=True)
    assert found(model) == {"encoder.layers.*": 6, "decoder.layers.*": 3}


def test_a_shared_block_is_in_its_stack_once():
    block = Block()
    (stack,) = find_stacks(nn.ModuleList([block] * 3))
    assert stack == (block,)


def test_lazy_layers():
    assert found(nn.Sequential(*(nn.LazyLinear(4) for _ in range(3)))) == {"*": 3}


def test_the_only_block_of_a_stage():
    """What a stage of a pipeline has beside it is none, nor are its experts; lists of several come first."""
    (block,) = alone = blocks(1, MoeBlock)
    assert find_stacks(Parts(embedding=nn.Embedding(2, 2), layers=alone)) == ((block,),)
    assert find_stacks(nn.Sequential(nn.Embedding(2, 2), Parts(layers=alone))) == ((block,),)
    several = Parts(first=blocks(1), layers=blocks(3))
    assert find_stacks(several) == (tuple(several.layers),)
    leaves = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_stacks(leaves) == (tuple(leaves),)


def test_lists_without_parameters_are_none():
    assert find_stacks(nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.ReLU(), c=nn.Sequential(nn.ReLU())))) == ()
