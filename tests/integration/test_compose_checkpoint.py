"""Offload beside checkpointing: the inputs of checkpointed regions are offloaded, and recomputation is not followed."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from composing import (
    BLOCKS,
    OFFLOADED,
    STEPS,
    STREAM,
    WIDTH,
    Block,
    Net,
    Offload,
    batch,
    both,
    checkpointing,
    dropping,
    gradients,
    train,
    training,
)
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import actoffload
from actoffload.report import Reason

variants = pytest.mark.parametrize("reentrant", [False, True])


class Regions(Net):
    """Several blocks in each checkpointed region."""

    def __init__(self, each: int, **options: Any) -> None:
        super().__init__(dropping)
        self.each, self.options = each, options

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for first in range(0, BLOCKS, self.each):
            x = checkpoint(self.region, self.blocks[first : first + self.each], x, **self.options)
        return self.head(x)

    def region(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


def only_inputs(handle: actoffload.OffloadHandle, offloaded: int = OFFLOADED, regions: int = BLOCKS) -> None:
    """Check that this many inputs of regions are offloaded in each step and reloaded in time, and nothing else."""
    statistics = handle.statistics()
    assert statistics.passes == STEPS
    # Apart from the regions, the two linears around them save their inputs. Of recomputation there is nothing.
    assert statistics.tensors_saved == STEPS * (regions + 2)
    assert statistics.tensors_offloaded == statistics.reloaded_ahead == STEPS * offloaded
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == STEPS * offloaded * STREAM


@pytest.mark.usefixtures("place")
@variants
def test_each_block_in_a_region(reentrant):
    only_inputs(both(training(lambda: checkpointing(Net(dropping), use_reentrant=reentrant))))


@variants
@pytest.mark.parametrize("each", [2, 3])
def test_regions_of_several_blocks(reentrant, each):
    """A region's input is offloaded with its first group, or with its last one where the region is reentrant."""
    handle = both(training(lambda: Regions(each, use_reentrant=reentrant)))
    saved_by = [first + each - 1 if reentrant else first for first in range(0, BLOCKS, each)]
    only_inputs(handle, offloaded=sum(group < OFFLOADED for group in saved_by), regions=BLOCKS // each)


class Squashed(nn.Module):
    """Saves its input, that of the sine, and its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.sin(self.linear(x)))


def test_a_skip_connection_is_an_input_of_the_first_region_only():
    """Later regions save it too, but none of their groups takes it: there it is saved outside of the groups."""

    class Skips(Net):
        def region(self, first: nn.Module, second: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
            return second(first(x)) + skip

        def forward(self, x: Tensor) -> Tensor:
            x = skip = self.inp(x)
            for k in range(0, BLOCKS, 2):
                x = checkpoint(self.region, *self.blocks[k : k + 2], x, skip, use_reentrant=True)
            return self.head(x)

    statistics = both(training(lambda: Skips(Squashed))).statistics()
    # In each step the inputs of the two linears, and the skip connection once more when the first region is offloaded.
    assert statistics.tensors_kept[Reason.OUTSIDE] == STEPS * 3
    assert statistics.bytes_offloaded == statistics.bytes_reloaded


@variants
@pytest.mark.parametrize("order", ["wrapped, then offloaded", "offloaded, then wrapped"])
def test_checkpoint_wrapper(reentrant, order):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    variant = wrapping.CheckpointImpl.REENTRANT if reentrant else wrapping.CheckpointImpl.NO_REENTRANT
    wrap = functools.partial(wrapping.checkpoint_wrapper, checkpoint_impl=variant)

    def program(offload: Offload) -> list[Tensor]:
        model = Net(dropping)
        if order.startswith("offloaded"):
            offload(model)
        wrapping.apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, Block))
        if order.startswith("wrapped"):
            offload(model)
        return train(model)

    only_inputs(both(program))


def test_selective_checkpointing():
    """What the policy saves is kept by checkpointing itself; the inputs are offloaded."""
    saved = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.addmm.default:
            saved.append(op)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    choose = functools.partial(create_selective_checkpoint_contexts, policy)
    only_inputs(both(training(lambda: checkpointing(Net(), use_reentrant=False, context_fn=choose))))
    assert saved


@pytest.mark.parametrize(
    ("reentrant", "words"),
    [(False, "under other saved-tensor hooks"), (True, "which runs inside of a backward")],
)
def test_a_region_around_the_whole_model(reentrant, words):
    def program(offload: Offload) -> list[Tensor]:
        model = Net(dropping)
        handle = offload(model)
        results = train(lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), owner=model)
        if handle is not None:
            assert handle.statistics().passes == 0
        return results + train(model, 1)

    with pytest.warns(UserWarning, match=f"(?s)Nothing is offloaded.*{words}.*parts of the model") as said:
        both(program)
    assert len(said) == 1


def test_saving_on_the_host_by_save_on_cpu():
    """The hooks of save_on_cpu around the model take its tensors, those around a block only that block's."""

    class Half(Net):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            if block is not self.blocks[0]:
                return block(x)
            with torch.autograd.graph.save_on_cpu():
                return block(x)

    def around(offload: Offload) -> list[Tensor]:
        model = Net()
        offload(model)
        with torch.autograd.graph.save_on_cpu():
            y = model(batch())
        y.square().sum().backward()
        return gradients(model)

    with pytest.warns(UserWarning, match="torch.autograd.graph.save_on_cpu"):
        both(around, offloads=False)
    inside, whole = both(training(Half)).statistics(), both(training(Net)).statistics()
    assert inside.bytes_offloaded == whole.bytes_offloaded * 3 // 4


@variants
def test_hugging_face(reentrant):
    transformers = pytest.importorskip("transformers")
    hidden, tokens = 64, torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))

    def program(offload: Offload) -> list[Tensor]:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=96,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
            attention_dropout=0.1,
        )
        model = transformers.LlamaForCausalLM(config).train()
        # Its name up to version 5, and the one after that.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        offload(model, layers="model.layers.?")
        results = []
        for _ in range(STEPS):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            results += gradients(model)
        return results

    statistics = both(program).statistics()
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == STEPS * OFFLOADED * tokens.numel() * hidden * 4
    assert statistics.tensors_offloaded == STEPS * OFFLOADED
