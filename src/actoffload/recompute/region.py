"""One call of a function whose activations are recomputed in backward, except outputs of operators that are saved.

`[Note: two modes]`  `torch.utils.checkpoint` runs the function under one dispatch mode in forward and under another one
when it is recomputed.  The first hands the outputs that a policy chooses to `pack`, which keeps or offloads them; the
second returns them where the same operator comes again, instead of running it.  Both see what autograd runs, below
autograd itself, so the graph of the recomputation is that of the forward.  Nothing is consumed: a graph may be used
several times, and a split backward may come back to a region.

Autograd holds the region through the frame of the checkpoint, and the region what `pack` returned.  So all of it is freed
with the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from .._torch import alias_below_autograd
from .policy import Policy, never, saveable

__all__ = ["Region", "recomputed"]

T = TypeVar("T")
Key = tuple[Any, int]  # an operator, and how often the region has called it before


class Region:
    """What one call saved.

    Parameters
    ----------
    policy : Policy
        Which outputs are saved.
    pack, unpack : callable
        As for `torch.autograd.graph.saved_tensors_hooks`: what is held for a tensor, and the tensor again.
    """

    def __init__(
        self,
        policy: Policy = never,
        pack: Callable[[Tensor], Any] = lambda tensor: tensor,
        unpack: Callable[[Any], Tensor] = lambda held: held,
    ) -> None:
        self.policy, self.pack, self.unpack = policy, pack, unpack
        self.saved: dict[Key, Any] = {}  # the outputs of an operator, with what `pack` returned in place of tensors
        self.used: set[Key] = set()

    def modes(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the modes for the forward and for one recomputation; see [Note: two modes]."""
        return _Saving(self), _Returning(self)


class _Held:
    """Stands for a tensor among the outputs of an operator.

    It has an alias, without the graph: the graph refers to the region.
    """

    __slots__ = ("alias", "held", "version")

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> None:
        self.alias, self.version = alias_below_autograd(tensor), tensor._version
        self.held = pack(self.alias)

    @property
    def current(self) -> bool:
        """Whether nothing has written to the tensor since."""
        return self.alias._version == self.version


class _Mode(TorchDispatchMode):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.calls = Counter[Any]()

    def __enter__(self) -> Any:
        self.calls.clear()  # a graph that is used twice is recomputed twice
        return super().__enter__()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def key(self, operator: Any) -> Key:
        self.calls[operator] += 1
        return operator, self.calls[operator] - 1


class _Saving(_Mode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = operator(*args, **(kwargs or {}))
        key, region = self.key(operator), self.region
        if saveable(operator) and region.policy(operator, key[1], args):
            region.saved[key] = tree_map_only(Tensor, lambda tensor: _Held(tensor, region.pack), outputs)
        return outputs


class _Returning(_Mode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key, region = self.key(operator), self.region
        saved = region.saved.get(key)
        if saved is None or not all(of.current for of in tree_leaves(saved) if isinstance(of, _Held)):
            return operator(*args, **(kwargs or {}))
        region.used.add(key)
        return tree_map_only(_Held, lambda of: region.unpack(of.held), saved)


def recomputed(function: Callable[..., T], region: Region, *args: Any, **kwargs: Any) -> T:
    """Call a function, and recompute in backward what autograd saves in it, except what the region saves."""
    result: T = checkpoint(function, *args, use_reentrant=False, context_fn=region.modes, **kwargs)
    return result
