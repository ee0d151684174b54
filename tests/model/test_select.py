"""What `layers` and `keep` mean, also through wrappers, which kinds they give, and which blocks are found."""

import copy
from collections import Counter, OrderedDict

import pytest
import torch
from structures import (
    PLAIN,
    STAGES,
    Attention,
    Block,
    Mamba,
    Mlp,
    MoeBlock,
    Parts,
    blocks,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from actoffload._text import name_pattern
from actoffload.model import groups
from actoffload.model.follow import FollowedModule
from actoffload.model.groups import BLOCK, Names, find_stacks, read_entries


def model(kind: type[nn.Module] = Block, **more: nn.Module) -> Parts:
    inner = Parts(embed=nn.Embedding(9, 4), layers=blocks(3, kind), norm=nn.LayerNorm(4))
    return Parts(model=inner, lm_head=nn.Linear(4, 9), **more)


def choose(root: nn.Module, layers) -> list[FollowedModule]:
    return groups.choose(Names(root), read_entries("layers", ... if layers is None else layers))


def kept(root: nn.Module, keep) -> list[str]:
    return [each.name for each in groups.choose_kept(Names(root), read_entries("keep", keep))]


def names(chosen: list[FollowedModule]) -> list[str]:
    return [each.name for each in chosen]


def kinds(chosen: list[FollowedModule]) -> dict[str, int]:
    return dict(Counter(each.kind for each in chosen))


LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]
MLPS = [f"{name}.mlp" for name in LAYERS]
ATTENTIONS = [f"{name}.attention" for name in LAYERS]


@pytest.mark.parametrize(
    ("layers", "want", "want_kinds"),
    [
        # Paths: that of a list means its children.
        ("model.layers", LAYERS, {"model.layers.*": 3}),
        ("model.layers.1.mlp", [MLPS[1]], {"model.layers.*.mlp": 1}),
        (["model.layers.2", "model.layers.0"], [LAYERS[0], LAYERS[2]], {"model.layers.*": 2}),
        # Patterns: the outermost matches, and the children of those that are lists.
        ("model.layers.*", LAYERS, {"model.layers.*": 3}),
        ("*.layers.?", LAYERS, {"*.layers.?": 3}),
        ("*.layers.[02]", [LAYERS[0], LAYERS[2]], {"*.layers.[02]": 2}),
        ("*att*", ATTENTIONS, {"*att*": 3}),
        ("*.mlp.up", [f"{name}.up" for name in MLPS], {"*.mlp.up": 3}),
        ("*", ["model", "lm_head"], {"* (Parts)": 1, "* (Linear)": 1}),
        ("*.layers", LAYERS, {"*.layers": 3}),
        # Several entries: the first that means a module gives its kind.
        (["model.layers.1", "*.mlp"], [MLPS[0], LAYERS[1], MLPS[2]], {"model.layers.*": 1, "*.mlp": 2}),
        (["model.layers.0", "model.layers.*"], LAYERS, {"model.layers.*": 3}),
        (["*.1.mlp", Mlp], MLPS, {"*.1.mlp": 1, "Mlp": 2}),
        # Types: all instances.
        (Block, LAYERS, {"Block": 3}),
        (nn.ModuleList, LAYERS, {"ModuleList": 3}),
        (Attention, ATTENTIONS, {"Attention": 3}),
        # The default, alone and with others.
        (None, LAYERS, {"layer": 3}),
        ([..., "lm_head", "model.layers.1"], [*LAYERS, "lm_head"], {"layer": 3, "lm_head": 1}),
    ],
)
def test_entries(layers, want, want_kinds):
    chosen = choose(root := model(), layers)
    assert names(chosen) == want
    assert kinds(chosen) == want_kinds
    assert all(each.module is root.get_submodule(each.name) for each in chosen)


def test_modules():
    root = model()
    layers = root.model.layers
    assert kinds(choose(root, root.lm_head)) == {"lm_head": 1}
    for given in (layers, list(layers), iter(layers), set(layers), layers[:]):  # a slice is a new list
        chosen = choose(root, given)
        assert names(chosen) == LAYERS
        assert kinds(chosen) == {"model.layers.*": 3}
    assert kinds(choose(root, [each.mlp for each in layers])) == {"model.layers.*.mlp": 3}
    assert kinds(choose(root, [layers, root.lm_head])) == {"model.layers.*": 3, "lm_head": 1}


def two_names() -> Parts:
    block = Block()
    return Parts(one=nn.ModuleList([block]), two=nn.ModuleList([Block(), block]))


def odd() -> Parts:
    root = Parts()
    root._modules["odd[0]"] = Block()
    return root


def held() -> Parts:
    root = Parts(held=nn.Module())
    root.held.block = Block()
    return root


BODY = nn.Sequential(OrderedDict(first=Block(), second=Block(), out=Mlp()))
NUMBERED = nn.Sequential(OrderedDict((f"block_{k}", Block()) for k in range(12)))
LISTS = nn.ModuleList([blocks(2), blocks(1)])
SEQUENTIALS = nn.ModuleList(nn.Sequential(Mlp(), Mlp()) for _ in range(2))


@pytest.mark.parametrize(
    ("root", "layers", "want"),
    [
        # The path of a Sequential means its children, and so does one that is given alone; else it can be called.
        (Parts(body=BODY), "body", {"body.first": "body.* (Block)", "body.second": "body.* (Block)",
                                    "body.out": "body.* (Mlp)"}),
        (Parts(stages=SEQUENTIALS), SEQUENTIALS[1], {"stages.1.0": "stages.*.*", "stages.1.1": "stages.*.*"}),
        (Parts(stages=SEQUENTIALS), list(SEQUENTIALS), {"stages.0": "stages.*", "stages.1": "stages.*"}),
        (SEQUENTIALS[0], SEQUENTIALS[0], {"0": "*", "1": "*"}),
        (Parts(a=Parts(mlp=SEQUENTIALS[0])), "*.mlp", {"a.mlp": "*.mlp"}),
        # Modules without a forward mean what is in them.
        (Parts(stages=LISTS, empty=nn.ModuleList()), "*",
         {"stages.0.0": "*", "stages.0.1": "*", "stages.1.0": "*"}),
        (held(), "held", {"held.block": "held.*"}),
        # A module with two names has both, and is chosen once.
        (two_names(), "two", {"one.0": "two.*", "two.0": "two.*"}),
        (two_names(), "two.1", {"one.0": "two.*"}),
        (two_names(), ["two.*", "one"], {"one.0": "two.*", "two.0": "two.*"}),
        # An exact name is no pattern.
        (odd(), "odd[0]", {"odd[0]": "odd[0]"}),
        # Numbers outside of lists belong to the name: these are no copies of each other.
        (Parts(layers=NUMBERED), list(NUMBERED), {f"layers.block_{k}": "layers.block_*" for k in range(12)}),
        (Parts(a=Parts(fc1=Mlp(), fc2=Mlp())), ["a.fc1", "a.fc2"], {"a.fc1": "a.fc1", "a.fc2": "a.fc2"}),
        # Types that share a pattern are kinds of their own; a type has those that derive from it.
        (Parts(layers=nn.ModuleList([MoeBlock(0), MoeBlock(4)])), "*.mlp",
         {"layers.0.mlp": "*.mlp (Mlp)", "layers.1.mlp": "*.mlp (MoeMlp)"}),
        # Of modules inside of each other the outermost counts.
        (Parts(b=Parts(c=Mamba())), Parts, {"(the whole model)": "Parts"}),
    ],
)  # fmt: skip
def test_entries_of_other_models(root, layers, want):
    assert {each.name: each.kind for each in choose(root, layers)} == want


def test_keep():
    root = model(head=nn.Sequential(Mlp(), Mlp()))
    assert kept(root, ()) == []
    assert kept(root, [root.lm_head, "*.norm"]) == [*(f"{name}.norm" for name in LAYERS), "model.norm", "lm_head"]
    assert kept(root, ["model.layers", Mlp])[:2] == [LAYERS[0], MLPS[0]]
    assert kept(root, "head") == kept(root, root.head) == ["head"]  # a Sequential as a whole


# Errors

OTHER = copy.deepcopy(model()).model.layers


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("Model.layers.*", r"'Model.layers.\*' matches no module"),
        ("*.atention", r"^layers: '\*.atention' matches no module of this Parts.*'\*.attention'"),
        ("model.layer.*.mlp", r"Close to it: .*'model.layers.\*.mlp'"),
        ("xyz", r"Modules there are 'model', 'lm_head', 'empty', 'model.embed', 'model.layers'"),
        (nn.Conv2d, r"no module of this Parts is a Conv2d. Modules there are 'model',"),
        (OTHER[0], r"a Block that is no part of this Parts: .* not of a copy"),
        (OTHER, r"no part of this Parts"),
        (iter(()), r"^layers is empty; expected None"),
        ("emp*", r"^layers: 'empty' has no forward, and no modules inside"),
    ],
)
def test_entries_that_mean_nothing(layers, message):
    with pytest.raises(ValueError, match=message):
        choose(model(empty=nn.ModuleList()), layers)


@pytest.mark.parametrize("keep", [..., ["lm_head", ...]])
def test_keep_has_no_default(keep):
    with pytest.raises(TypeError, match=r"^keep has `\.\.\.`, which means the default groups of `layers`"):
        read_entries("keep", keep)
    read_entries("layers", keep)


@pytest.mark.parametrize("keep", ["*.nothing", nn.Linear(1, 1)])
def test_keep_that_means_nothing(keep):
    with pytest.raises(ValueError, match=r"^keep"):
        kept(model(), keep)


@pytest.mark.parametrize("wrong", [3, {"model": 1}, b"model", torch.ones(2), int])
def test_wrong_types(wrong):
    with pytest.raises(TypeError, match=r"^layers has an entry .*; expected a dotted path"):
        read_entries("layers", wrong)
    with pytest.raises(TypeError, match=r"^keep has an entry .*; expected a dotted path"):
        read_entries("keep", ["lm_head", wrong])


# Wrappers: of the whole model, or of each block


class Engine(Parts):
    """A wrapper of another library."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module=module)


AROUND = {
    "module.": DistributedDataParallel,
    "_orig_mod.": lambda inner: torch.compile(inner, backend="eager"),
    "_orig_mod.module.": lambda inner: torch.compile(DistributedDataParallel(inner), backend="eager"),
    "_checkpoint_wrapped_module.": checkpoint_wrapper,
    "module.module.": lambda inner: Engine(DistributedDataParallel(inner)),
}


@pytest.mark.parametrize("prefix", AROUND)
@pytest.mark.usefixtures("one_process")
def test_a_wrapped_model(prefix):
    bare = model()
    root = AROUND[prefix](bare)
    for entry in (None, "model.layers", "model.layers.*", "*", Mlp, list(bare.model.layers)):
        chosen = [(each.name, each.kind, each.module) for each in choose(root, entry)]
        assert chosen == [(each.name, each.kind, each.module) for each in choose(bare, entry)]
    assert kept(root, "lm_head") == ["lm_head"]
    assert [each.module for each in choose(root, root)] == [root]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_checkpoint_wrapped_module.", "module."])
@pytest.mark.usefixtures("one_process")
def test_wrapped_blocks_are_chosen_with_their_wrapper(prefix):
    root = model()
    inner = list(root.model.layers)
    for k, block in enumerate(inner):
        root.model.layers[k] = AROUND[prefix](block)
    want = list(root.model.layers)
    for entry in (None, "model.layers", "model.layers.*", "*.layers.?", Block, want, inner):
        chosen = choose(root, entry)
        assert [each.module for each in chosen] == want
        assert names(chosen) == LAYERS
    assert [each.module for each in choose(root, "*.mlp")] == [block.mlp for block in inner]
    assert kinds(choose(root, "*.mlp.up")) == {"*.mlp.up": 3}
    assert kinds(choose(root, "model.layers.1.mlp")) == {"model.layers.*.mlp": 1}


def test_a_module_that_is_called_module():
    """Only around the whole model the name is taken for that of a wrapper."""

    class Residual(Parts):
        def __init__(self) -> None:
            super().__init__(module=Block())

    root = Parts(layers=blocks(3, Residual))
    assert {each.kind for each in choose(root, "layers.1.module")} == {"layers.*.module"}
    for entry in ("layers.*.module", Block):
        assert names(choose(root, entry)) == [f"layers.{k}.module" for k in range(3)]
    assert names(choose(root, None)) == [f"layers.{k}" for k in range(3)]


@pytest.mark.usefixtures("one_process")
def test_sharded_blocks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    root = model()
    mesh = init_device_mesh("cpu", (1,))
    for block in root.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)
    assert type(root.model.layers[0]) is not Block
    for entry in (None, "model.layers", Block):
        assert [each.module for each in choose(root, entry)] == list(root.model.layers)
        assert len({each.kind for each in choose(root, entry)}) == 1


def test_a_circle_of_modules_does_not_end_in_a_circle():
    root = model()
    root.model.layers[0].mlp.up._modules["back"] = root
    assert [each.module for each in choose(root, "model.layers")] == list(root.model.layers)


# Repeated blocks


def found(model: nn.Module) -> dict[str, int]:
    """Return how many blocks of each name, with ``*`` for indices, are chosen."""
    chosen = [each for each in choose(model, None) if each.kind == BLOCK]
    modules = dict(model.named_modules())
    assert all(modules[each.name] is each.module for each in chosen)
    assert [each.name for each in chosen] == [n for n, m in modules.items() if any(m is c.module for c in chosen)]
    return dict(Counter(name_pattern(each.name) for each in chosen))


ALL = {
    **PLAIN,
    **STAGES,
    "the transformer of PyTorch": (
        nn.Transformer(8, 2, num_encoder_layers=6, num_decoder_layers=3, batch_first=True),
        {"encoder.layers.*": 6, "decoder.layers.*": 3},
    ),
    "no parameters": (nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.ReLU(), c=nn.Sequential(nn.ReLU()))), {}),
}


@pytest.mark.parametrize("name", ALL)
def test_structures(name):
    model, want = ALL[name]
    assert found(model) == want
    larger = Parts(backbone=Parts(net=model), norm=nn.LayerNorm(4))
    assert found(larger) == {f"backbone.net.{key}": number for key, number in want.items()}


def test_the_only_block_of_a_stage():
    """What a stage of a pipeline has beside it is none, nor are its experts."""
    (block,) = alone = blocks(1, MoeBlock)
    assert find_stacks(nn.Sequential(nn.Embedding(2, 2), Parts(layers=alone))) == [(block,)]
