"""Names and blocks through wrappers: a model may be wrapped as a whole, or block by block."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from structures import Block, Mlp, MoeBlock, Parts, blocks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from actoffload.model.module_tree import block_type
from actoffload.model.select import choose, find_kept


@pytest.fixture
def one_process():
    """Give a process group of one process, without any network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(kind: type[nn.Module] = Block) -> Parts:
    return Parts(model=Parts(layers=blocks(3, kind), norm=nn.LayerNorm(4)), lm_head=nn.Linear(4, 9))


class Engine(Parts):
    """A wrapper of another library."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module=module)


def around(how: str, inner: nn.Module) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(inner)
    if how == "compile":
        return torch.compile(inner, backend="eager")
    if how == "both":
        return torch.compile(DistributedDataParallel(inner), backend="eager")
    if how == "checkpoint":
        return checkpoint_wrapper(inner)
    return Engine(inner)


PREFIX = {
    "ddp": "module.",
    "compile": "_orig_mod.",
    "both": "_orig_mod.module.",
    "checkpoint": "_checkpoint_wrapped_module.",
    "engine": "module.",
}


@pytest.mark.parametrize("how", PREFIX)
@pytest.mark.usefixtures("one_process")
def test_a_wrapped_model(how):
    bare = model()
    root = around(how, bare)
    entries = [None, "model.layers", "model.layers.*", "*.mlp", Mlp, ["*.mlp", nn.LayerNorm], list(bare.model.layers)]
    for entry in entries:
        want, got = choose(bare, entry), choose(root, entry)
        assert [each.module for each in got] == [each.module for each in want]
        assert [each.kind for each in got] == [each.kind for each in want]
        assert [each.name for each in got] == [PREFIX[how] + each.name for each in want]
        assert all(root.get_submodule(each.name) is each.module for each in got)
    assert find_kept(root, "lm_head") == ((PREFIX[how] + "lm_head", bare.lm_head),)
    # The names with the wrapper's part do as well, and so do patterns of them.
    assert [each.module for each in choose(root, PREFIX[how] + "model.layers")] == list(bare.model.layers)
    assert [each.module for each in choose(root, PREFIX[how] + "model.layers.*")] == list(bare.model.layers)
    # The wrapper is the model; and its type is what it wraps, as far as is known of it.
    assert [each.module for each in choose(root, "")] == [root]
    assert [each.name for each in choose(root, "*")] == [PREFIX[how] + name for name in ("model", "lm_head")]


@pytest.mark.parametrize("how", ["compile", "checkpoint", "ddp"])
@pytest.mark.usefixtures("one_process")
def test_wrapped_blocks_are_chosen_with_their_wrapper(how):
    root = model()
    inner = list(root.model.layers)
    for k, block in enumerate(inner):
        root.model.layers[k] = around(how, block)
    want = list(root.model.layers)
    for entry in (None, "model.layers", "model.layers.*", "*.layers.?", Block, want):
        chosen = choose(root, entry)
        assert [each.module for each in chosen] == want
        assert [each.name for each in chosen] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert [each.module for each in choose(root, "*.mlp")] == [block.mlp for block in inner]
    assert {each.kind for each in choose(root, "*.mlp.up")} == {"*.mlp.up"}
    assert [each.kind for each in choose(root, "model.layers.1.mlp")] == ["model.layers.*.mlp"]
    # Who hands over the module inside means that one.
    assert [each.module for each in choose(root, inner)] == inner


def test_some_wrapped_blocks_are_of_the_type_of_the_others():
    root = model()
    root.model.layers[0] = checkpoint_wrapper(root.model.layers[0])
    root.model.layers[2] = checkpoint_wrapper(root.model.layers[2])
    assert [each.kind for each in choose(root, "model.layers")] == ["model.layers.*"] * 3
    assert len(choose(root, None)) == 3
    assert len(choose(root, CheckpointWrapper)) == 2


def test_experts_of_wrapped_blocks_are_their_parts():
    root = model(MoeBlock)
    for k in range(3):
        root.model.layers[k] = checkpoint_wrapper(root.model.layers[k])
    assert [each.module for each in choose(root, None)] == list(root.model.layers)


def test_a_module_that_is_called_module():
    """Only around the whole model the name is taken for that of a wrapper."""

    class Residual(Parts):
        def __init__(self) -> None:
            super().__init__(module=Block())

    root = Parts(layers=blocks(3, Residual))
    assert [each.name for each in choose(root, "layers.*.module")] == [f"layers.{k}.module" for k in range(3)]
    assert [each.kind for each in choose(root, "layers.1.module")] == ["layers.*.module"]
    assert [each.name for each in choose(root, Block)] == [f"layers.{k}.module" for k in range(3)]
    assert [each.name for each in choose(root, None)] == [f"layers.{k}" for k in range(3)]


@pytest.mark.usefixtures("one_process")
def test_sharded_blocks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    root = model()
    mesh = init_device_mesh("cpu", (1,))
    for block in list(root.model.layers)[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)
    assert type(root.model.layers[0]) is not Block
    assert block_type(root.model.layers[0]) is Block
    for entry in (None, "model.layers", Block):
        assert [each.module for each in choose(root, entry)] == list(root.model.layers)
        assert len({each.kind for each in choose(root, entry)}) == 1
    with pytest.raises(ValueError, match="no module of this Parts"):
        choose(root, "nothing")


def test_parametrized_blocks():
    root = model()

    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    for block in root.model.layers:
        nn.utils.parametrize.register_parametrization(block.mlp.up, "weight", Twice())
    assert len({type(block.mlp.up) for block in root.model.layers}) == 3
    assert {each.kind for each in choose(root, "*.mlp.up")} == {"*.mlp.up"}


def test_a_circle_of_modules_does_not_end_in_a_circle():
    root = model()
    root.model.layers[0].mlp.up._modules["back"] = root
    assert [each.module for each in choose(root, "model.layers")] == list(root.model.layers)


def test_names_are_those_of_named_modules():
    root = model()
    root.model.tied = root.model.layers[1]
    root.first = checkpoint_wrapper(root.lm_head)
    for entry in (nn.Module, "model.*", "*"):
        wanted = [name for name, m in root.named_modules() if any(m is each.module for each in choose(root, entry))]
        assert [each.name for each in choose(root, entry)] == wanted


def test_what_is_chosen_of_a_checkpointed_model_runs():
    """The wrapper of a block is called, and so a hook on what was chosen is."""
    root = nn.Sequential(*(checkpoint_wrapper(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), checkpoint) for _ in range(3)))
    called = []
    for each in choose(root, None):
        each.module.register_forward_hook(lambda module, _, __: called.append(module))
    root(torch.ones(2, 3))
    assert called == list(root)
