"""What the arguments `layers` and `keep` mean: paths, patterns, modules and types, with the kinds they give."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict

import pytest
import torch
from structures import Attention, Block, Mamba, Mlp, MoeBlock, Parts, blocks
from torch import nn

from actoffload.model.select import Chosen, choose, find_kept


def model(**more: nn.Module) -> Parts:
    inner = Parts(embed=nn.Embedding(9, 4), layers=blocks(3), norm=nn.LayerNorm(4))
    return Parts(model=inner, lm_head=nn.Linear(4, 9), **more)


def names(chosen: tuple[Chosen, ...]) -> list[str]:
    return [each.name for each in chosen]


def kinds(chosen: tuple[Chosen, ...]) -> dict[str, int]:
    return dict(Counter(each.kind for each in chosen))


LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]


# Strings


def test_the_path_of_a_list_means_its_children():
    chosen = choose(model(), "model.layers")
    assert names(chosen) == LAYERS
    assert kinds(chosen) == {"model.layers.*": 3}


def test_the_path_of_a_module_means_it():
    root = model()
    (chosen,) = choose(root, "model.layers.1.mlp")
    assert chosen == Chosen("model.layers.1.mlp", root.model.layers[1].mlp, "model.layers.*.mlp")
    assert names(choose(root, "")) == [""]
    assert kinds(choose(root, "")) == {"Parts": 1}


def test_paths_of_several_modules_of_a_list_are_one_kind():
    chosen = choose(model(), ["model.layers.2", "model.layers.0"])
    assert names(chosen) == ["model.layers.0", "model.layers.2"]
    assert kinds(chosen) == {"model.layers.*": 2}


def test_the_path_of_a_sequential_means_its_children_whatever_their_names():
    root = Parts(body=nn.Sequential(OrderedDict(first=Block(), second=Block(), out=Mlp())))
    chosen = choose(root, "body")
    assert names(chosen) == ["body.first", "body.second", "body.out"]
    assert kinds(chosen) == {"body.* (Block)": 2, "body.* (Mlp)": 1}


def test_a_pattern_means_the_outermost_matches():
    root = model()
    assert names(choose(root, "model.layers.*")) == LAYERS
    assert kinds(choose(root, "model.layers.*")) == {"model.layers.*": 3}
    assert names(choose(root, "*.layers.?")) == LAYERS
    assert names(choose(root, "*.layers.[02]")) == [LAYERS[0], LAYERS[2]]
    assert names(choose(root, "*.attention")) == [f"{name}.attention" for name in LAYERS]
    assert names(choose(root, "*.mlp.up")) == [f"{name}.mlp.up" for name in LAYERS]
    assert names(choose(root, "*att*")) == [f"{name}.attention" for name in LAYERS]
    assert names(choose(root, "*")) == ["model", "lm_head"]


def test_a_pattern_is_compared_with_whole_names():
    with pytest.raises(ValueError, match=r"'layers.\*' matches no module"):
        choose(model(), "layers.*")
    with pytest.raises(ValueError, match=r"'Model.layers.\*' matches no module"):
        choose(model(), "Model.layers.*")


def test_what_lies_deeper_is_chosen_by_an_entry_of_its_own():
    chosen = choose(model(), ["model.layers.*", "*.mlp"])
    assert kinds(chosen) == {"model.layers.*": 3, "*.mlp": 3}
    assert names(chosen)[:2] == ["model.layers.0", "model.layers.0.mlp"]


def test_the_first_entry_that_means_a_module_gives_its_kind():
    assert kinds(choose(model(), ["model.layers.0", "model.layers.*"])) == {"model.layers.*": 3}
    assert kinds(choose(model(), ["*.1.mlp", Mlp])) == {"*.1.mlp": 1, "Mlp": 2}


def test_a_pattern_that_matches_a_list_means_what_is_in_it():
    assert names(choose(model(), "*.layers")) == LAYERS
    assert kinds(choose(model(), "*.layers")) == {"*.layers": 3}
    root = Parts(stages=nn.ModuleList([blocks(2), blocks(1)]), empty=nn.ModuleList())
    assert names(choose(root, "*")) == ["stages.0.0", "stages.0.1", "stages.1.0"]
    # So does any module that only holds others.
    root.held = nn.Module()
    root.held.block = Block()
    assert names(choose(root, "held")) == ["held.block"]
    # A Sequential can be called, so a pattern that matches it means it.
    assert names(choose(Parts(a=Parts(mlp=nn.Sequential(Mlp(), Mlp()))), "*.mlp")) == ["a.mlp"]


def test_types_that_share_a_pattern_are_kinds_of_their_own():
    root = Parts(layers=nn.ModuleList([MoeBlock(0), MoeBlock(4), MoeBlock(4)]))
    assert kinds(choose(root, "*.mlp")) == {"*.mlp (Mlp)": 1, "*.mlp (MoeMlp)": 2}
    root = Parts(layers=nn.ModuleList([Mamba(), Block(), Mamba()]))
    assert kinds(choose(root, list(root.layers))) == {"layers.* (Mamba)": 2, "layers.* (Block)": 1}
    assert kinds(choose(root, None)) == {"layer": 3}


def test_a_module_with_two_names_has_both_and_is_chosen_once():
    block = Block()
    root = Parts(one=nn.ModuleList([block]), two=nn.ModuleList([Block(), block]))
    assert names(choose(root, "two")) == ["one.0", "two.0"]
    assert names(choose(root, "two.1")) == ["one.0"]
    assert names(choose(root, ["two.*", "one"])) == ["one.0", "two.0"]


def test_an_exact_name_is_no_pattern():
    root = Parts()
    root._modules["odd[0]"] = Block()
    assert names(choose(root, "odd[0]")) == ["odd[0]"]


# Modules and types


def test_modules():
    root = model()
    assert names(choose(root, root.lm_head)) == ["lm_head"]
    assert kinds(choose(root, root.lm_head)) == {"lm_head": 1}
    for given in (root.model.layers, list(root.model.layers), iter(root.model.layers), set(root.model.layers)):
        chosen = choose(root, given)
        assert names(chosen) == LAYERS
        assert kinds(chosen) == {"model.layers.*": 3}
    # A slice is a new list.
    assert names(choose(root, root.model.layers[:2])) == LAYERS[:2]
    assert kinds(choose(root, root.model.layers[1:])) == {"model.layers.*": 2}
    assert kinds(choose(root, [each.mlp for each in root.model.layers])) == {"model.layers.*.mlp": 3}
    assert kinds(choose(root, [root.model.layers, root.lm_head])) == {"model.layers.*": 3, "lm_head": 1}


def test_a_sequential_alone_means_its_children_and_among_others_itself():
    root = Parts(stages=nn.ModuleList(nn.Sequential(Mlp(), Mlp()) for _ in range(2)))
    assert names(choose(root, root.stages[1])) == ["stages.1.0", "stages.1.1"]
    assert names(choose(root, list(root.stages))) == ["stages.0", "stages.1"]
    assert names(choose(root.stages[0], root.stages[0])) == ["0", "1"]


def test_named_children_of_a_list_are_one_kind():
    root = Parts(layers=nn.Sequential(OrderedDict((f"block_{k}", Block()) for k in range(12))))
    assert kinds(choose(root, list(root.layers))) == {"layers.block_*": 12}
    # Outside of lists numbers belong to the name: these are no copies of each other.
    assert kinds(choose(Parts(a=Parts(fc1=Mlp(), fc2=Mlp())), ["a.fc1", "a.fc2"])) == {"a.fc1": 1, "a.fc2": 1}


def test_types_mean_all_instances():
    root = model()
    assert names(choose(root, Block)) == LAYERS
    assert kinds(choose(root, [Attention, nn.Linear])) == {"Attention": 3, "Linear": 13}
    nested = Parts(a=Block(), b=Parts(c=Parts(d=nn.Linear(2, 2))))
    assert names(choose(nested, Parts)) == ["", "a", "a.attention", "a.mlp", "b", "b.c"]
    assert names(choose(root, nn.ModuleList)) == LAYERS


def test_subclasses_are_instances():
    assert kinds(choose(Parts(a=Block(), b=Mamba()), [Parts])) == {
        "Parts (Parts)": 1, "Parts (Block)": 1, "Parts (Attention)": 1, "Parts (Mlp)": 2, "Parts (Mamba)": 1,
    }  # fmt: skip


# keep


def test_keep():
    root = model()
    assert find_kept(root, ()) == ()
    assert find_kept(root, "lm_head") == (("lm_head", root.lm_head),)
    assert [name for name, _ in find_kept(root, [root.lm_head, "*.norm"])] == [
        *(f"{name}.norm" for name in LAYERS), "model.norm", "lm_head",
    ]  # fmt: skip
    assert [name for name, _ in find_kept(root, ["model.layers", Mlp])] == [
        part for name in LAYERS for part in (name, f"{name}.mlp")
    ]


def test_a_sequential_is_kept_as_a_whole():
    root = Parts(layers=blocks(2), head=nn.Sequential(Mlp(), Mlp()))
    assert find_kept(root, "head") == find_kept(root, root.head) == (("head", root.head),)


@pytest.mark.parametrize("keep", ["nothing", "*.nothing", nn.Conv2d, nn.Linear(1, 1)])
def test_keep_that_means_nothing(keep):
    with pytest.raises(ValueError, match=r"^keep"):
        find_kept(model(), keep)


# Errors


def test_the_error_of_a_pattern_names_what_is_close():
    with pytest.raises(ValueError, match=r"^layers: '\*.atention' matches no module of this Parts.*'\*.attention'"):
        choose(model(), "*.atention")
    with pytest.raises(ValueError, match=r"Close to it: .*'model.layers.\*.mlp'"):
        choose(model(), "model.layer.*.mlp")
    with pytest.raises(ValueError, match=r"Close to it: .*'model.layers.2'"):
        choose(model(), "model.layers.7")
    # Indices only where an index was given.
    with pytest.raises(ValueError, match=r"Close to it: '[^\d]*\. Modules"):
        choose(model(), "model.layer.mlp.up")
    with pytest.raises(ValueError, match=r"Modules there are 'model', 'lm_head', 'model.embed', 'model.layers'"):
        choose(model(), "xyz")
    with pytest.raises(ValueError, match="no modules inside"):
        choose(nn.Linear(1, 1), "xyz")


@pytest.mark.parametrize("wrong", ["*.atention", "model.layer.*", "moodel.norm", "lm_heads"])
def test_what_an_error_proposes_matches(wrong):
    with pytest.raises(ValueError, match="Close to it") as caught:
        choose(model(), wrong)
    proposed = str(caught.value).partition("Close to it: ")[2].partition(". Modules")[0]
    assert all(choose(model(), each.strip("'")) for each in proposed.split(", "))


def test_the_error_of_a_type_names_the_types():
    with pytest.raises(ValueError, match=r"no module of this Parts is a Conv2d. Types there are Linear,"):
        choose(model(), nn.Conv2d)


def test_a_module_of_another_model():
    root = model()
    with pytest.raises(ValueError, match=r"a Block that is no part of this Parts: .* not of a copy"):
        choose(root, copy.deepcopy(root).model.layers[0])
    with pytest.raises(ValueError, match="no part of this Parts"):
        choose(root, copy.deepcopy(root).model.layers)


def test_empty():
    root = model(empty=nn.ModuleList())
    for given in ([], (), iter(())):
        with pytest.raises(ValueError, match=r"^layers is empty; expected None"):
            choose(root, given)
    for given in ("empty", root.empty, "emp*"):
        with pytest.raises(ValueError, match=r"^layers: 'empty' has no forward, and no modules inside"):
            choose(root, given)


@pytest.mark.parametrize("wrong", [3, 1.5, {"model": 1}, b"model", torch.ones(2), object()])
def test_wrong_types(wrong):
    with pytest.raises(TypeError, match=r"^layers got an? .*; expected a dotted path"):
        choose(model(), wrong)
    with pytest.raises(TypeError, match=r"^keep has an? .* among its entries; expected a dotted path"):
        find_kept(model(), ["lm_head", wrong])


def test_wrong_classes():
    with pytest.raises(TypeError, match=r"the class int, which is no torch.nn.Module"):
        choose(model(), int)
    with pytest.raises(TypeError, match=r"^keep got a NoneType"):
        find_kept(model(), None)
    with pytest.raises(TypeError, match=r"^layers has a list"):
        choose(model(), [["model.layers"]])
