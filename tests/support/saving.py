"""What the modules of a model save in one forward, measured with public hooks and nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from actoffload.model.discovery import Measurement, candidates, choose_groups
from actoffload.model.select import Chosen, Names


def measure(run: Callable[[], Any], model: nn.Module, followed: Sequence[Chosen], min_bytes: int = 256) -> Measurement:
    """Return what `followed` modules save in `run`: storages of at least `min_bytes`, each once, and no weights."""
    measurement, running = Measurement(), list[str]()
    seen = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= min_bytes and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())  # the graph refers to it, so no other storage gets this address
            measurement.add(running[-1] if running else None, storage.nbytes())
        return tensor

    def begin(name: str) -> None:
        measurement.called(name, running)
        running.append(name)

    with ExitStack() as hooks:
        for of in followed:
            before = of.module.register_forward_pre_hook(lambda *_, name=of.name: begin(name))
            after = of.module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run()
    del result
    return measurement


def default_groups(run: Callable[[], Any], model: nn.Module) -> tuple[tuple[Chosen, ...], Measurement]:
    """Return the groups of a model without arguments, and what was measured to choose them."""
    followed = candidates(Names(model))
    measurement = measure(run, model, followed)
    names = choose_groups(measurement.modules(followed), measurement.outside)
    return tuple(of for of in followed if of.name in names), measurement


def share_in(run: Callable[[], Any], model: nn.Module, groups: Sequence[Chosen]) -> float:
    """Return the share of the saved bytes that lies in groups, measured in a forward that follows nothing else."""
    measurement = measure(run, model, groups)
    inside = sum(of.saved for of in measurement.modules(groups))
    return inside / (inside + measurement.outside)
