"""How much of a forward groups save, measured with public hooks and nothing of the engine."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from actoffload.model.follow import FollowedModule


def share_in(run: Callable[[], Any], model: nn.Module, groups: Sequence[FollowedModule], min_bytes: int = 256) -> float:
    """Return the share of the saved bytes that lies in groups, in storages of at least `min_bytes`, each once.

    One that was saved between groups, and again in a group, lies in that group: it is offloaded there.
    """
    running, sizes, inside = list[FollowedModule](), dict[int, int](), set[int]()
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()  # the graph refers to it, so no other storage gets this address
        if storage.nbytes() >= min_bytes and at not in weights:
            sizes[at] = storage.nbytes()
            if running:
                inside.add(at)
        return tensor

    with ExitStack() as hooks:
        for group in groups:
            before = group.module.register_forward_pre_hook(lambda *_, group=group: running.append(group))
            after = group.module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run()
    del result
    return sum(sizes[at] for at in inside) / sum(sizes.values())
