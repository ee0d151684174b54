"""The parameters, buffers and other attributes of a module that is recomputed.

`[Note: buffers]`  A module may write to its buffers, as a batch normalization does to its running statistics.  Such a
call is recomputed with copies of what the buffers were before it, so that it does the same once more, and what the
buffers have become is not touched.  In the same way it is recomputed with the attributes that its modules had, such as
numbers: a forward may count, and keep what the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from .._torch.tensors import storage_address, version_of
from .structure import Structure

__all__ = ["State", "version"]

T = TypeVar("T")


def version(tensor: Tensor) -> int:
    """Return the version of a tensor; those of inference mode have none, and it is 0."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(version_of, tensors))
    except RuntimeError:  # of inference mode
        return list(map(version, tensors))


class State:
    """The parameters, buffers and other attributes of a module at one moment, with the versions of the tensors.

    Parameters
    ----------
    module : Module
        The module.
    structure : Structure
        What it is made of.
    writers : collection of int
        Positions of modules, among all inside of it, that write to their buffers in forward.  What these are at this
        moment is copied; they may change.
    """

    def __init__(self, module: Module, structure: Structure, writers: Collection[int] = ()) -> None:
        self._modules, self._structure, self._writers = structure.modules(module), structure, writers
        tables = structure.tables(self._modules)
        self._written = [vars(self._modules[k])["_buffers"] for k in writers]
        self._before = _copies(self._written)
        self._copies: list[dict[str, Any]] = []
        self._buffers = self._present(tables)
        weights = [of for parameters, _, _ in tables for of in parameters.values() if of is not None]
        self._attributes = structure.attributes()
        attributes = [of for of in self._attributes if isinstance(of, Tensor)]
        if any(of.grad_fn is not None for of in attributes):  # [guard: graphs of the calls before]
            self._attributes = list(map(_without_graph, self._attributes))
        # Two lists of the same length: a pass keeps few objects, for the sake of the garbage collector.
        self._weights, self._tensors = len(weights), [*weights, *self._buffers]
        self._tensors += [of for of in self._attributes if isinstance(of, Tensor)]
        self._versions = _versions(self._tensors)

    def _present(self, tables: Iterable[tuple[Any, Mapping[str, Any], Any]]) -> list[Tensor]:
        """Return the buffers that the modules have now, but for those that they may change."""
        found = [buffers for k, (_, buffers, _) in enumerate(tables) if buffers and k not in self._writers]
        return [of for buffers in found for of in buffers.values() if of is not None]

    def addresses(self) -> set[int]:
        """Return the addresses of the parameters."""
        return set(map(storage_address, self._tensors[: self._weights]))

    def flags(self) -> tuple[Any, ...]:
        """Return which tensors get gradients, and how many hooks the modules have."""
        hooks = [len(of._forward_hooks) + len(of._forward_pre_hooks) for of in self._modules]
        return tuple([tensor.requires_grad for tensor in self._tensors]), tuple(hooks)

    def changed(self) -> bool:
        """Return whether a parameter, an attribute, or a buffer of a module that does not write to it, was changed."""
        tables = self._structure.tables(self._modules)
        buffers = self._present(tables)
        # [guard: buffers that are replaced against expectation -> False]
        replaced = len(buffers) != len(self._buffers) or any(map(_differ, buffers, self._buffers))
        # [guard: buffers that are changed against expectation -> False]
        edited = _versions(self._tensors) != self._versions
        weights = [of for parameters, _, _ in tables for of in parameters.values() if of is not None]
        # Sharding replaces its own, which are DTensors, while a module runs.
        # [guard: parameters that are replaced -> False]
        other = len(weights) == self._weights and any(map(_replaced, weights, self._tensors))
        return replaced or edited or other

    def check(self) -> None:
        """Raise a `RuntimeError` if it has `changed`."""
        if self.changed():
            kind = type(self._modules[0]).__name__
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a parameter, buffer or attribute of a {kind} that is recomputed in backward was changed "
                "after its forward. Change it after backward, or pass recompute=False."
            )

    def copy_before(self) -> None:
        """Copy the buffers from before the call, for a recomputation; its dispatch mode must not see that."""
        self._copies = _copies(self._before)

    def again(self, call: Callable[[], T]) -> T:
        """Return what a function returns while the modules have these copies, and their attributes of that time."""
        now = [dict(buffers) for buffers in self._written]
        weights = self._tensors[: self._weights]
        frozen = [of.requires_grad for of in weights]
        try:
            for buffers, copies in zip(self._written, self._copies, strict=True):
                buffers |= copies  # [guard: buffers from before the call]
            with self._structure.with_attributes(self._attributes):
                return call()
        finally:
            for buffers, present in zip(self._written, now, strict=True):
                buffers |= present  # [guard: buffers after a recomputation]
            if frozen != [of.requires_grad for of in weights]:  # [guard: weights that a recomputation left frozen]
                for of, needed in zip(weights, frozen, strict=True):
                    of.requires_grad_(needed)


def _copies(written: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of buffers by name; one that several modules share is shared by their copies."""
    copies: dict[int, Tensor] = {}
    found = []
    for buffers in written:
        for of in buffers.values():
            if of is not None and id(of) not in copies:
                copies[id(of)] = of.detach().clone().requires_grad_(of.requires_grad)
        found.append({name: None if of is None else copies[id(of)] for name, of in buffers.items()})
    return found


def _without_graph(value: Any) -> Any:
    """Return an alias of a tensor that has a graph, which the call before may have made: that would never be freed."""
    if not isinstance(value, Tensor) or value.grad_fn is None:
        return value
    alias = value.detach().requires_grad_()
    return alias.view_as(alias) if alias.layout is torch.strided else alias  # no leaf, so it may be written to


def _differ(one: Any, other: Any) -> bool:
    return one is not other


def _replaced(one: Any, other: Any) -> bool:
    return one is not other and type(one) is type(other) is Parameter
