"""Groups from measurement: candidates, the call tree and the choice."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import designs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import default_groups, share_in
from structures import Block, Mlp, Parts, blocks
from torch import nn
from whole_model import offload

from actoffload.model import discovery
from actoffload.model.discovery import (
    BLOCK,
    ENOUGH,
    MODULE,
    Measured,
    choose_groups,
    measure,
)
from actoffload.model.select import Names, choose, choose_kept, find_stacks


def candidates(model, named=(), kept=()):
    tree = Names(model)
    return discovery.candidates(tree, choose(tree, named) if named else (), choose_kept(tree, kept))


def names(followed) -> list[str]:
    return [of.name for of in followed]


def language_model(depth: int = 3) -> Parts:
    return Parts(embed=nn.Embedding(9, 4), layers=blocks(depth), head=nn.Linear(4, 9))


LAYERS = ["layers.0", "layers.1", "layers.2"]


# Candidates


def stages(part: Callable[[], nn.Module]) -> Parts:
    return Parts(stages=nn.ModuleList(Parts(part=part()) for _ in range(4)))


TWO = language_model(2)
INSIDE = [f"layers.{k}{name}" for k in range(2) for name in ("", *(f".{n}" for n, _ in Block().named_modules() if n))]


@pytest.mark.parametrize(
    ("model", "want"),
    [
        # Repeated blocks are followed as a whole, all else module by module; if there are few, they can be divided.
        (Parts(lm=language_model(), vision=Mlp()),
         ["lm", "lm.embed", *(f"lm.{name}" for name in LAYERS), "lm.head", "vision", "vision.up", "vision.down"]),
        (TWO, ["embed", *INSIDE, "head"]),
        # So can blocks that hold lists; an MLP in a Sequential is none.
        (stages(lambda: nn.ModuleList([Mlp()])),
         [f"stages.{k}{name}" for k in range(4) for name in ("", ".part.0", ".part.0.up", ".part.0.down")]),
        (stages(lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU())), [f"stages.{k}" for k in range(4)]),
        (Parts(a=Parts(b=nn.Linear(2, 2)), c=nn.ReLU()), ["a", "a.b", "c"]),
        (nn.Linear(2, 2), []),
    ],
)  # fmt: skip
def test_candidates(model, want):
    followed = candidates(model)
    assert names(followed) == want
    repeated = {block for stack in find_stacks(model) for block in stack}
    assert {of.name for of in followed if of.kind == BLOCK} == {of.name for of in followed if of.module in repeated}
    assert {of.kind for of in followed} <= {BLOCK, MODULE}


def test_nothing_in_compiled_modules_is_followed_but_blocks():
    model = language_model()
    model.head = Parts(a=nn.Linear(4, 4), b=nn.Linear(4, 9))
    assert "head.a" in names(candidates(model))
    model.head.compile(backend="eager")
    assert names(candidates(model)) == ["embed", *LAYERS, "head"]
    model.compile(backend="eager")
    assert names(candidates(model)) == LAYERS
    assert names(candidates(torch.compile(language_model(), backend="eager"))) == LAYERS


def test_nothing_in_compiled_blocks_is_followed():
    model = language_model(2)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.layers[1].forward = torch.compile(model.layers[1].forward, backend="eager")
    assert names(candidates(model)) == ["embed", "layers.0", "layers.1", "head"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_and_parametrizations_are_no_candidates():
    model = language_model()
    model.scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    nn.utils.parametrizations.weight_norm(model.head)
    assert names(candidates(model)) == ["embed", *LAYERS, "head"]


def test_kept_modules_are_no_candidates_nor_is_what_is_in_them_unless_it_is_named():
    model = Parts(lm=language_model(2), vision=Block())
    kept = ["lm.layers.1", "vision"]
    followed = names(candidates(model, kept=kept))
    assert not [name for name in followed if name.startswith(("lm.layers.1", "vision"))]
    assert names(candidates(model, "vision.mlp", kept))[-1] == "vision.mlp"


def test_named_modules_keep_their_kinds_and_blocks_remain_blocks():
    model = language_model()
    kinds = {of.name: of.kind for of in candidates(model, ["layers.0", "layers.2.mlp", "head"])}
    assert kinds["layers.0"] == BLOCK
    assert kinds["layers.2.mlp"] == "layers.*.mlp"
    assert kinds["head"] == "head"


# The measurement


@pytest.mark.parametrize(
    ("calls", "want"),
    [
        # A module that runs in several others is inside of what is around all of them.
        (["a", "ab", "abd", "ac", "acd", "ace"],
         {"a": (None, 10), "b": ("a", 10), "d": ("a", 20), "c": ("a", 10), "e": ("c", 10)}),
        # One that calls itself is around itself.
        (["a", "ab", "aba"], {"a": (None, 20), "b": ("a", 10)}),
    ],
)  # fmt: skip
def test_which_module_is_inside_of_which(calls, want):
    chosen = {each.name: each for each in candidates(Parts(**{name: nn.Linear(1, 1) for name in "abcde"}))}
    found = measure((chosen[call[-1]], list(call[:-1]), 10) for call in calls)
    assert {each.name: (each.parent, each.saved) for each in found} == want
    assert [each.name for each in found] == list(want)


def test_a_shared_module_is_a_group_of_its_own():
    class Shared(Parts):
        def forward(self, x):
            return self.second(self.shared(self.first(self.shared(x))).sin())

    model = Shared(first=designs.FeedForward(8), shared=designs.FeedForward(8), second=designs.FeedForward(8))
    x = torch.randn(64, 8)
    groups = default_groups(lambda: model(x), model)
    assert share_in(lambda: model(x), model, groups) >= ENOUGH
    assert {name.partition(".")[0] for name in names(groups)} == {"first", "shared", "second"}


# The choice


def block(name: str, saved: int, **more) -> Measured:
    return Measured(name, saved, type="Block", block=True, **more)


def test_blocks_that_save_nearly_everything_are_the_groups():
    head = Measured("head", 15, type="Linear")
    layers = [block(f"layers.{k}", 20) for k in range(5)]
    assert choose_groups([*layers, head]) == tuple(of.name for of in layers)
    assert choose_groups([*layers, replace(head, saved=40)]) == (*(of.name for of in layers), "head")
    # Where most is saved by the code of the model itself, other modules are no help.
    assert choose_groups([*layers, replace(head, saved=1)], outside=500) == tuple(of.name for of in layers)


def test_modules_that_saved_nothing_are_no_groups():
    student = [block(f"student.{k}", 20) for k in range(5)]
    teacher = [block(f"teacher.{k}", 0) for k in range(5)]
    assert choose_groups([*teacher, *student], named={"teacher.1"}) == tuple(of.name for of in student)
    assert choose_groups(teacher) == choose_groups([]) == ()


def test_named_modules_are_groups():
    layers = [block(f"layers.{k}", 20) for k in range(5)]
    head = Measured("head", 1)
    assert choose_groups([*layers, head], named={"head"})[-1] == "head"
    assert choose_groups([*layers, head])[-1] == "layers.4"


def stage(name: str, inner: int, own: int = 0, number: int = 4) -> list[Measured]:
    return [Measured(name, own), *(Measured(f"{name}.{k}", inner, (name,)) for k in range(number))]


def test_a_large_module_is_divided_into_the_modules_inside_of_it():
    small = stage("small", 5)
    assert choose_groups([*stage("large", 45), *small]) == (*(f"large.{k}" for k in range(4)), "small")


def test_a_large_module_that_saves_much_itself_is_a_group_beside_those_inside_of_it():
    assert choose_groups(stage("large", 20, own=20)) == ("large", *(f"large.{k}" for k in range(4)))
    # Where the inner ones save next to nothing, they are not followed.
    assert choose_groups([*stage("large", 1, own=100), *stage("other", 45)])[0] == "large"
    assert "large.0" not in choose_groups([*stage("large", 1, own=100), *stage("other", 45)])


def test_modules_that_are_alike_are_kept_whole_however_large_they_are():
    def alike(number: int) -> list[Measured]:
        every = [stage(f"layer{k}", 10) for k in range(number)]
        return [replace(of, type="Layer" if of.parent is None else "Part") for each in every for of in each]

    assert choose_groups(alike(3)) == ("layer0", "layer1", "layer2")
    assert len(choose_groups(alike(2))) == 8


def test_modules_that_hold_blocks_are_divided_although_they_are_small():
    tower = [Measured("tower", 1), *(block(f"tower.{k}", 2, around=("tower",)) for k in range(6))]
    rest = [Measured(f"m{k}", 20) for k in range(6)]
    assert choose_groups([*tower, *rest])[:6] == tuple(f"tower.{k}" for k in range(6))


def test_a_large_repeated_block_is_not_divided_into_its_parts():
    """As in a U-Net, whose blocks save different amounts: the largest of them is one group, not one for each part."""

    def unet(largest: int) -> list[Measured]:
        sizes = (8, 6, 4, 3, 2, 1, 3, 5, 9, largest)
        blocks = [block(f"b{k}", 0) for k in range(len(sizes))]
        parts = [[Measured(f"b{k}.{j}", 10 * size, (f"b{k}",)) for j in range(5)] for k, size in enumerate(sizes)]
        return [of for each, inside in zip(blocks, parts, strict=True) for of in (each, *inside)]

    whole = tuple(f"b{k}" for k in range(10))
    assert choose_groups(unet(12)) == choose_groups(unet(24)) == whole  # 23 % and 37 % of all
    assert choose_groups(unet(40)) == (*whole[:9], *(f"b9.{j}" for j in range(5)))  # one half of all


def test_very_small_modules_belong_to_what_is_around_them():
    tiny = [Measured(f"large.norm{k}", 1, ("large",)) for k in range(3)]
    found = choose_groups(
        [Measured("large", 3000), *(Measured(f"large.{k}", 1000, ("large",)) for k in range(9)), *tiny]
    )
    assert "large" in found
    assert not any("norm" in name for name in found)


@st.composite
def forwards(draw):
    """A call tree: modules with the bytes they save themselves, in the order of their calls."""
    number = draw(st.integers(1, 30))
    parents = [None, *(draw(st.sampled_from([None, *range(k)])) for k in range(1, number))]
    children = {k: [j for j in range(number) if parents[j] == k] for k in (None, *range(number))}
    order: list[int] = []

    def visit(k):
        order.append(k)
        for child in children[k]:
            visit(child)

    for k in children[None]:
        visit(k)
    saved = st.one_of(st.just(0), st.integers(1, 1000), st.integers(10**5, 10**6))
    return [
        Measured(
            f"m{k}",
            draw(saved),
            () if parents[k] is None else (f"m{parents[k]}",),
            draw(st.sampled_from("AB")),
            draw(st.booleans()),
        )
        for k in order
    ]


def saved_in(modules: list[Measured], groups: set[str]) -> int:
    """Return what lies in groups: a byte does if the module that saved it, or one around it, is a group."""
    parents = {of.name: of.parent for of in modules}

    def inside(name: str | None) -> bool:
        return name is not None and (name in groups or inside(parents[name]))

    return sum(of.saved for of in modules if inside(of.name))


def test_groups_of_a_model_that_saves_nearly_everything_outside_of_its_modules():
    assert choose_groups([Measured("stem", 1)], 200) == ("stem",)
    assert choose_groups([Measured("layers.0", 1, block=True), Measured("stem", 100)], 10**6) == ("layers.0", "stem")


@settings(deadline=None, max_examples=150)
@given(forwards(), st.integers(0, 10**6))
def test_groups_cover_what_modules_save(modules, outside):
    groups = choose_groups(modules, outside)
    inside = sum(of.saved for of in modules)
    assert saved_in(modules, set(groups)) >= min(ENOUGH * (inside + outside), 0.8 * inside) * 0.99
    assert [of.name for of in modules if of.name in groups] == list(groups)
    total = {of.name: saved_in(modules, {of.name}) for of in modules}
    assert all(total[name] > 0 for name in groups)


class Direct(Parts):
    """Runs its layers by a function that is not their forward."""

    def forward(self, x):
        x = self.used(x)
        for each in self.layers:
            x = type(each).forward(each, x)
        return x


def test_blocks_that_run_without_a_call_are_warned_about():
    width = 8
    model = Direct(used=nn.Linear(width, width), layers=nn.ModuleList(designs.FeedForward(width) for _ in range(3)))
    model.idle = nn.ModuleList(designs.Attention(width) for _ in range(3))  # takes no part
    handle = offload(model, min_bytes=64)
    with pytest.warns(UserWarning, match=r"'layers\.0' and 5 more were not called.* call `block\(x\)`\."):
        model(torch.randn(4, width)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, width)).sum().backward()
    handle.remove()
