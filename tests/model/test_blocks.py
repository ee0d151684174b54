"""Default groups: repeated blocks, and the modules beside them where blocks are not nearly all of a model."""

import warnings
from collections import Counter

import designs
import pytest
import torch
from structures import LEAVES, Block, ConvBlock, Inverted, Mlp, Parts, Stage, blocks
from torch import nn
from whole_model import offload

from actoffload._text import name_pattern
from actoffload.model.follow import GROUP
from actoffload.model.groups import BLOCK, MODULE, Names, find_modules, find_stacks


def groups(model, layers=(...,), keep=()):
    return [each for each in find_modules(Names(model), layers, keep) if each.role == GROUP]


def names(model, layers=(...,), keep=()) -> list[str]:
    return [group.name for group in groups(model, layers, keep)]


def language_model(depth: int = 3) -> Parts:
    return Parts(embed=nn.Embedding(9, 4), layers=blocks(depth), head=nn.Linear(4, 9))


LAYERS = ["layers.0", "layers.1", "layers.2"]
HEADS = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(3))
TOWER = Parts(**{f"part{k}": Parts(a=ConvBlock(3, 4), b=ConvBlock(4, 5)) for k in range(9)})


@pytest.mark.parametrize(
    ("model", "want"),
    [
        *LEAVES.values(),
        # Leaves in a list are blocks where nothing composite is.
        (Parts(stem=nn.Linear(4, 4), layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4))), {"layers.*": 4}),
        # Blocks of one width that are nearly all of a model are alone; a few are not.
        (language_model(12), {"layers.*": 12}),
        (language_model(1), {"embed": 1, "layers.*": 1, "head": 1}),
        # Blocks of different widths are not: a stem may save as much as all of them.
        (Parts(stem=ConvBlock(3, 4), body=nn.Sequential(*(Inverted(4, 4) for _ in range(9))), head=nn.Linear(4, 2)),
         {"body.*": 9}),
        (Parts(stem=ConvBlock(3, 4), body=nn.Sequential(*(Inverted(4, 4 + k // 3) for k in range(9)))),
         {"stem": 1, "body.*": 9}),
        (Parts(embed=Mlp(), stages=nn.ModuleList(Stage(4 << k, 3) for k in range(3))),
         {"embed": 1, "stages.*.blocks.*": 9, "stages.*.downsample": 3}),
        # A module beside them is divided if it is large, or if blocks are inside.
        (Parts(tower=TOWER, heads=HEADS), {**dict.fromkeys([f"tower.part{k}" for k in range(9)], 1), "heads.*": 3}),
        (Parts(tower=Parts(stem=Mlp(), layers=blocks(3)), trunk=TOWER),
         {"tower.stem": 1, "tower.layers.*": 3, **dict.fromkeys([f"trunk.part{k}" for k in range(9)], 1)}),
        # No list at all.
        (Parts(a=Parts(b=nn.Linear(2, 2)), c=nn.ReLU()), {"a.b": 1, "c": 1}),
        (Parts(lists=nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])), {"lists.*.*": 1}),
    ],
)  # fmt: skip
def test_default_groups(model, want):
    found = groups(model)
    assert Counter(name_pattern(group.name) for group in found) == want
    repeated = {block for stack in find_stacks(model) for block in stack}
    assert all(group.kind == (BLOCK if group.module in repeated else MODULE) for group in found)


def test_nothing_in_compiled_modules_is_followed_but_blocks():
    model = language_model()
    model.head = Parts(**{f"part{k}": nn.Linear(4, 4) for k in range(9)})
    assert "head.part0" in names(model)
    model.head.compile(backend="eager")
    assert names(model) == ["embed", *LAYERS, "head"]
    model.compile(backend="eager")
    assert names(model) == LAYERS
    model = Parts(layers=blocks(3), **{f"part{k}": nn.Linear(4, 4) for k in range(9)})
    assert names(torch.compile(model, backend="eager")) == LAYERS


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_and_parametrizations_are_no_groups():
    model = language_model(1)
    model.scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    nn.utils.parametrizations.weight_norm(model.head)
    assert names(model) == ["embed", "layers.0", "head"]


def test_kept_modules_are_no_groups_nor_is_what_is_in_them_unless_it_is_named():
    model = Parts(lm=language_model(2), vision=Parts(block=Block(), norm=nn.LayerNorm(4)))
    keep = ["lm.layers.1", "vision.block"]
    assert names(model, [...], keep) == ["lm.embed", "lm.layers.0", "lm.head", "vision.norm"]
    assert names(model, [..., "vision.block.mlp"], keep)[-2:] == ["vision.block.mlp", "vision.norm"]


def test_named_modules_keep_their_kinds_and_blocks_remain_blocks():
    found = groups(language_model(12), [..., "layers.0", "layers.2.mlp", "head"])
    kinds = {group.name: group.kind for group in found}
    assert kinds == {f"layers.{k}": BLOCK for k in range(12)} | {"head": "head"}


def test_modules_beside_the_blocks_do_not_overlap_with_named_ones():
    model = Parts(embed=nn.Embedding(9, 4), layers=blocks(1), head=Parts(norm=nn.LayerNorm(4), out=nn.Linear(4, 9)))
    for name, want in {"head": ["head"], "head.out": ["head.norm", "head.out"]}.items():
        assert names(model, [..., name]) == ["embed", "layers.0", *want]


class Direct(Parts):
    """Runs its layers by a function that is not their forward."""

    def forward(self, x):
        x = self.used(x)
        for each in self.layers:
            x = type(each).forward(each, x)
        return x


def test_blocks_that_run_without_a_call_are_warned_about():
    width = 8
    model = Direct(used=nn.Linear(width, width), layers=nn.ModuleList(designs.Attention(width) for _ in range(3)))
    handle = offload(model, min_bytes=64)
    with pytest.warns(UserWarning, match=r"because layers\.0 ... 2 were not called.* call `block\(x\)`\."):
        model(torch.randn(4, 3, width)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 3, width)).sum().backward()
    handle.remove()
