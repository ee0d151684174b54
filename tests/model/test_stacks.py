"""Finding the repeated blocks, in models built of plain PyTorch."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
from structures import (
    ATTRIBUTES,
    LEAVES,
    PARTS,
    PLAIN,
    STAGES,
    Block,
    Mamba,
    Mlp,
    MoeBlock,
    Parts,
    blocks,
)
from torch import nn

from actoffload.model.blocks import find_stacks
from actoffload.model.module_names import starred
from actoffload.model.select import choose


def found(model: nn.Module) -> dict[str, int]:
    """Return how many modules of each name, with ``*`` for indices, are chosen."""
    chosen = choose(model, None)
    assert {each.kind for each in chosen} == {"layer"}
    modules = dict(model.named_modules())
    assert all(modules[each.name] is each.module for each in chosen)
    assert [each.name for each in chosen] == [n for n, m in modules.items() if any(m is c.module for c in chosen)]
    return dict(Counter(starred(each.name) for each in chosen))


ALL = {**PLAIN, **PARTS, **STAGES, **ATTRIBUTES, **LEAVES}


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
    assert stack.blocks == (block,)


def test_lazy_layers():
    assert found(nn.Sequential(*(nn.LazyLinear(4) for _ in range(3)))) == {"*": 3}


# Models that name their blocks


class Named(Parts):
    _no_split_modules = ("Block", "Unknown")


class Subclass(Block):
    pass


class Wrapper(Parts):
    def __init__(self) -> None:
        super().__init__(block=Block())


def stem() -> nn.ModuleList:
    return blocks(5, Mamba)


def test_only_what_the_model_names():
    assert found(Parts(stem=stem(), layers=blocks(4))) == {"stem.*": 5, "layers.*": 4}
    assert found(Named(stem=stem(), layers=blocks(4))) == {"layers.*": 4}
    assert found(Parts(model=Named(stem=stem(), layers=blocks(4)))) == {"model.layers.*": 4}
    # What stands beside it is not its to name, and what names nothing that is there is not followed.
    assert found(Parts(model=Named(stem=stem(), layers=blocks(4)), more=stem())) == {"model.layers.*": 4, "more.*": 5}
    assert found(Named(stem=stem(), layers=blocks(4, MoeBlock))) == {"stem.*": 5, "layers.*": 4}


def test_subclasses_and_wrappers_of_what_is_named():
    assert found(Named(stem=stem(), layers=blocks(4, Subclass))) == {"layers.*": 4}
    assert found(Named(stem=stem(), layers=blocks(4, Wrapper))) == {"layers.*": 4}


def test_a_list_of_types_of_which_one_is_named():
    assert found(Named(stem=stem(), layers=nn.ModuleList([Mlp(), Mlp(), Block()]))) == {"layers.*": 3}


def test_a_model_within_a_model_has_blocks_of_its_own():
    class Unnamed(Parts):
        _no_split_modules = None

    inner = Unnamed(layers=stem())
    assert found(Named(text=inner, layers=blocks(4))) == {"text.layers.*": 5, "layers.*": 4}


def test_models_are_no_blocks():
    def inner() -> Named:
        return Named(net=Parts(layers=blocks(3)))

    assert found(Parts(ensemble=nn.ModuleList([inner(), inner()]))) == {"ensemble.*.net.layers.*": 6}
    assert found(Parts(only=nn.ModuleList([inner()]))) == {"only.*.net.layers.*": 3}
    assert found(Parts(all=nn.ModuleList([Block(), Block(), inner()]))) == {"all.*": 2, "all.*.net.layers.*": 3}


def test_small_blocks_that_are_named_stay():
    class Vision(Named):
        _no_split_modules = ("Block", "Mlp")

    model = Vision(language=nn.ModuleList(Block(64) for _ in range(3)), vision=nn.ModuleList(Mlp(2) for _ in range(3)))
    assert found(model) == {"language.*": 3, "vision.*": 3}


# Nothing found


def test_one_layer_is_no_stack_and_its_experts_are_none_either():
    with pytest.raises(ValueError, match=r"no repeated blocks .*'layers' \(1 MoeBlock\)"):
        choose(Parts(layers=blocks(1, MoeBlock)), None)


def test_the_error_lists_the_lists():
    model = Parts(body=nn.ModuleList([Block(), Mamba()]), tail=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(ValueError, match=r"'body' \(1 Block, 1 Mamba\), 'tail' \(1 Linear, 1 ReLU\).* layers="):
        choose(model, None)


def test_the_error_lists_the_children_of_a_model_without_lists():
    with pytest.raises(ValueError, match=r"'first' \(Block\), 'second' \(Linear\)"):
        choose(Parts(first=Block(), second=nn.Linear(2, 2)), None)
    with pytest.raises(ValueError, match="no modules inside"):
        choose(nn.Linear(2, 2), None)


def test_lists_without_parameters_are_none():
    with pytest.raises(ValueError, match="no repeated blocks"):
        choose(nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.ReLU(), c=nn.Sequential(nn.ReLU()))), None)
