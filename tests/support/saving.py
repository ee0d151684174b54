"""What the modules of a model save in one forward, measured with public hooks and nothing of the engine."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from actoffload.model.discovery import Measured, candidates, choose_groups, measure
from actoffload.model.select import Chosen, Names


def measure_forward(
    run: Callable[[], Any], model: nn.Module, followed: Sequence[Chosen], min_bytes: int = 256
) -> tuple[list[Measured], int]:
    """Return what modules save in `run`, and the bytes outside of them: storages of at least `min_bytes`, each once."""
    calls, running, outside = list[tuple[Chosen, list[str], int]](), list[Chosen](), list[int]()
    seen = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}

    def add(nbytes: int) -> None:
        calls.append((running[-1], [each.name for each in running[:-1]], nbytes))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= min_bytes and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())  # the graph refers to it, so no other storage gets this address
            (add if running else outside.append)(storage.nbytes())
        return tensor

    def begin(chosen: Chosen) -> None:
        running.append(chosen)
        add(0)

    with ExitStack() as hooks:
        for each in followed:
            before = each.module.register_forward_pre_hook(lambda *_, each=each: begin(each))
            after = each.module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run()
    del result
    return measure(calls), sum(outside)


def default_groups(run: Callable[[], Any], model: nn.Module) -> tuple[Chosen, ...]:
    """Return the groups of a model without arguments."""
    followed = candidates(Names(model))
    names = choose_groups(*measure_forward(run, model, followed))
    return tuple(each for each in followed if each.name in names)


def share_in(run: Callable[[], Any], model: nn.Module, groups: Sequence[Chosen]) -> float:
    """Return the share of the saved bytes that lies in groups, measured in a forward that follows nothing else."""
    modules, outside = measure_forward(run, model, groups)
    inside = sum(each.saved for each in modules)
    return inside / (inside + outside)
