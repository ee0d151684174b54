"""What a whole model owns: its weights and buffers, wherever in it they are used."""

from __future__ import annotations

import weakref

from torch.nn import Module

from ..observe.counters import Reason
from .owned import Owned, addresses, modules_in

__all__ = ["ModelOwned", "OwnedByModel"]


class OwnedByModel:
    """The addresses of all parameters and buffers of a model, looked up when the first question of a pass comes.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    """

    def __init__(self, model: Module) -> None:
        self._model = weakref.ref(model)
        self._found: dict[int, Reason] | None = None
        self.swaps = False

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at this address stays, if the model owned it when it was first asked."""
        if self._found is None:
            model = self._model()
            self._found = {} if model is None else addresses(model)
            # A sharding wrapper puts other storages in the parameters' places while a module runs. That of PyTorch,
            # fully_shard, gives the modules a class with a method to shard them again.
            types = set() if model is None else {type(module) for module in modules_in(model)}
            self.swaps = any(hasattr(type_, "reshard") for type_ in types)
        return self._found.get(key)


class ModelOwned(Owned):
    """What one group owns, and behind it the model.

    Parameters
    ----------
    group : torch.nn.Module or None
        The module that runs.
    model : OwnedByModel
        Everything else.
    """

    __slots__ = ("_model",)

    def __init__(self, group: Module | None, model: OwnedByModel) -> None:
        super().__init__()
        if group is not None:
            self.enter(group)
        self._model = model

    def reason(self, key: int) -> Reason | None:
        """Return why the storage at this address stays, if the model owned it, or the group owns it only now."""
        found = self._model.reason(key)
        return super().reason(key) if found is None and self._model.swaps else found
