"""Offload beside hooks of others on the same modules, before and after, and hooks that go while they run."""

from typing import Any

import pytest
import torch
from composing import STEPS, Block, Net, Offload, both, train, training
from helpers import in_threads
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from whole_model import hooks, nothing_installed


def output_replaced(model: Net) -> list[RemovableHandle]:
    return [model.blocks[1].register_forward_hook(lambda module, args, output: output.sin() * 1.5)]


def input_replaced_first(model: Net) -> list[RemovableHandle]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0].tanh(),), kwargs

    return [model.blocks[1].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)]


def gradients_replaced(model: Net) -> list[RemovableHandle]:
    block = model.blocks[2]
    return [
        block.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,)),
        block.register_full_backward_hook(lambda module, grads_in, grads_out: (grads_in[0].clamp(-1, 1),)),
        block.norm.register_full_backward_hook(lambda module, grads_in, grads_out: (grads_in[0] * 0.5,)),
    ]


def hooks_on_the_model(model: Net) -> list[RemovableHandle]:
    return [
        model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
        model.register_forward_hook(lambda module, args, output: output * 2.0),
        model.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,)),
    ]


def hooks_on_all_modules(model: Net) -> list[RemovableHandle]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.25 if isinstance(module, Block) else None

    modules = torch.nn.modules.module
    return [
        modules.register_module_forward_hook(hook),
        modules.register_module_forward_pre_hook(lambda module, args: None),
        modules.register_module_full_backward_hook(lambda module, grads_in, grads_out: None),
    ]


KINDS = [
    output_replaced,
    input_replaced_first,
    gradients_replaced,
    hooks_on_the_model,
    hooks_on_all_modules,
]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed:UserWarning")
@pytest.mark.parametrize("first", ["theirs", "ours"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_others(kind, first):
    def program(offload: Offload) -> list[Tensor]:
        model, handles = Net(), []
        try:
            if first == "theirs":
                handles = kind(model)
            offload(model)
            if first == "ours":
                handles = kind(model)
            results = train(model)
        finally:
            for handle in handles:
                handle.remove()
        return results + train(model, 1)

    statistics, plain = both(program).statistics(), both(training(Net)).statistics()
    assert statistics.passes == STEPS + 1
    assert statistics.bytes_offloaded >= plain.bytes_offloaded * (STEPS + 1) // STEPS


@pytest.mark.usefixtures("way")
def test_outputs_taken_by_a_hook_are_not_freed_and_stay_right():
    """A feature extractor holds what a block returned; its values are those of the forward, also later."""
    seen: list[Tensor] = []

    def program(offload: Offload) -> list[Tensor]:
        model = Net()
        handle = model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
        offload(model)
        results = train(model)
        handle.remove()
        results += [output.detach() for output in seen]
        seen.clear()
        return results

    both(program)


# The end of offload


PLACES = {
    "before its group": lambda model: model.blocks[2].register_forward_pre_hook,
    "after its group": lambda model: model.blocks[2].register_forward_hook,
    "inside of a group": lambda model: model.blocks[2].norm.register_forward_hook,
    "in the model's own hook": lambda model: model.register_forward_hook,
}


@pytest.mark.parametrize(("when", "aside"), [*((when, False) for when in PLACES), ("after its group", True)])
def test_removed_while_a_forward_is_under_way(when, aside):
    """That forward goes on as it began; with its end all of ours is gone, also if another thread removes it."""

    def program(offload: Offload) -> list[Tensor]:
        model = Net()
        handle = offload(model)
        results = train(model, 1)

        def remove(*_: object) -> None:
            if handle is not None:
                in_threads(handle.remove) if aside else handle.remove()
                assert not handle.installed

        hook = PLACES[when](model)(remove)
        results += train(model, 1)
        hook.remove()
        results += train(model, 1)
        assert not any(hooks(model))
        nothing_installed()
        return results

    statistics, plain = both(program).statistics(), both(training(Net)).statistics()
    assert statistics.host_bytes == 0
    assert statistics.passes == 2
    assert statistics.bytes_offloaded * STEPS == plain.bytes_offloaded * 2
