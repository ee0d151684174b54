"""Whether the calls of a module may be recomputed: what one call does that a second one must not do again.

A module is watched in its first call, which is not recomputed.  Calls of modules of the same structure, with the same
flags, are assumed to do the same.  A call that does something else after all is refused when it is recomputed:
`State.check` raises the error of autograd, and the gradient is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from .._torch.autograd import saved_tensor_hooks
from .._torch.modules import is_compiled, registered
from .._torch.tensors import DispatchMode, current_dispatch_mode, tree_leaves, version_of
from .policy import draws
from .trace import nodes_between

__all__ = ["OBJECTS", "Mode", "State", "Watch", "remove_modes", "structure"]

T = TypeVar("T")

BUFFERS = "because they change parameters or buffers in their forward"
INPUTS = "because they write to their inputs"
OBJECTS = "because they change objects that are passed to them, such as a cache of keys and values (use_cache)"
HOOKS = "because the program checkpoints a part of them, or has saved-tensor hooks of its own there"
NOISE = "because autograd saves the noise of torch.nn.RReLU before it is drawn, and recomputation stops there"
GENERATORS = "because they draw random numbers from a generator of the program"

REENTRANT = "CheckpointFunction"
"""Beginning of the names of the autograd nodes of reentrant checkpointing, also of that of other libraries."""


def inside(module: Module) -> list[Module]:
    """Return a module and all inside of it; `Module.modules` takes longer, in each forward."""
    found, met = [module], {module}
    for each in found:
        for child in registered(each)[2].values():
            if child is not None and child not in met:
                met.add(child)
                found.append(child)
    return found


def structure(module: Module, args: Any, kwargs: Any) -> Hashable:
    """Return what is equal for calls that are assumed to do the same.

    Of all modules inside, the types, the names of buffers, the number of attributes and the flags among them; of the
    arguments, the types.
    """
    modules = [
        (
            type(each),
            tuple([name for name, buffer in registered(each)[1].items() if buffer is not None]),
            len(attributes := vars(each)),
            tuple([value for value in attributes.values() if value is True or value is False]),
        )
        for each in inside(module)
    ]
    return tuple(modules), frozenset(map(type, tree_leaves((args, kwargs))))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


class State:
    """The parameters and buffers of a module at one moment, with their versions."""

    def __init__(self, module: Module) -> None:
        self._modules = inside(module)
        self._kind = type(module).__name__
        self._buffers = self._present()
        weights = [of for each in self._modules for of in registered(each)[0].values() if of is not None]
        # Two lists of the same length: a pass keeps few objects, for the sake of the garbage collector.
        self._tensors = [*weights, *self._buffers]
        self._versions = list(map(_version, self._tensors))

    def _present(self) -> list[Tensor]:
        """Return the buffers that the modules have now."""
        return [of for each in self._modules for of in registered(each)[1].values() if of is not None]

    def flags(self) -> tuple[Any, ...]:
        """Return which parameters and buffers get gradients, and how many hooks the modules have."""
        hooks = [len(of._forward_hooks) + len(of._forward_pre_hooks) for of in self._modules]
        return tuple([tensor.requires_grad for tensor in self._tensors]), tuple(hooks)

    def changed(self) -> bool:
        """Return whether a parameter or buffer was written to, or a buffer replaced."""
        buffers = self._present()
        # [guard: buffers that a group replaces -> False]
        replaced = len(buffers) != len(self._buffers) or any(map(_differ, buffers, self._buffers))
        # [guard: buffers that a group changes -> False]
        edited = list(map(_version, self._tensors)) != self._versions
        return replaced or edited

    def check(self) -> None:
        """Raise a `RuntimeError` if a parameter or buffer was written to, or a buffer replaced."""
        if self.changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a parameter or buffer of a {self._kind} that is recomputed in backward was changed "
                "after its forward. Change it after backward, or pass recompute=False."
            )


def _differ(one: Any, other: Any) -> bool:
    return one is not other


_Base: Any = object if DispatchMode is None else DispatchMode


class Mode(_Base):  # type: ignore[misc]
    """A context that sees every operation, beside compiled code, which stays compiled, and higher-order operators."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without the wrapper of `torch.compiler.disable`, which takes microseconds for each operator."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such."""
        return True


def remove_modes() -> None:
    """Remove the modes of this thread whose own removal an interrupt prevented."""
    while isinstance(mode := current_dispatch_mode(), Mode):
        _Base.__exit__(mode, None, None, None)


class _Seen(Mode):
    """Sees whether operators run under other saved-tensor hooks than those at its start, or with a generator."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = saved_tensor_hooks()
        self.reason = ""
        self.draws = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = saved_tensor_hooks()
        # [guard: saved-tensor hooks inside of a group]
        if hooks is not None and (self._hooks is None or hooks[0] is not self._hooks[0]):
            self.reason = HOOKS
        # [guard: generator of the program]
        if any(isinstance(of, torch.Generator) for of in (*args, *(kwargs or {}).values())):
            self.reason = GENERATORS
        if operator is torch.ops.aten.rrelu_with_noise.default:  # [guard: noise of RReLU]
            self.reason = NOISE
        self.draws = self.draws or draws(operator, args, kwargs or {})
        return operator(*args, **(kwargs or {}))


class Watch:
    """One call of a module that is not recomputed, and why later ones must not be.

    Attributes
    ----------
    reason : str or None
        Why later calls must not be recomputed; empty if they may be, None until the call has returned.
    draws : bool
        Whether the call drew random numbers, or may have in compiled code.
    compiled : bool
        Whether modules inside are compiled.
    """

    def __init__(self, module: Module) -> None:
        self._module: Module | None = module
        self.reason: str | None = None
        self.draws = True
        self.compiled = any(map(is_compiled, inside(module)))

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that calls the module."""
        assert self._module is not None
        state, self._module = State(self._module), None
        leaves = tree_leaves((args, kwargs))
        inputs = [(of, _version(of)) for of in leaves if isinstance(of, Tensor)]
        objects = [of for of in leaves if not isinstance(of, Tensor)]
        before = _inside(objects)
        if DispatchMode is None:
            result, seen = function(*args, **kwargs), ""
        else:
            with _Seen() as mode:
                result = function(*args, **kwargs)
            seen, self.draws = mode.reason, mode.draws or self.compiled
        if state.changed():
            seen = BUFFERS
        elif any(_version(of) != version for of, version in inputs):  # [guard: group that writes to its inputs]
            seen = INPUTS
        # [guard: group that changes its arguments]
        elif [id(of) for of in _inside(objects)] != [id(of) for of in before]:
            seen = OBJECTS
        elif _is_reentrant(result, [of for of, _ in inputs]):  # [guard: reentrant checkpointing inside of a group]
            seen = HOOKS
        self.reason = seen
        return result


def _inside(of: Any, depth: int = 6, met: set[int] | None = None) -> list[Tensor]:
    """Return the tensors among the attributes of an object, and deeper inside."""
    met = set() if met is None else met
    if isinstance(of, Tensor):
        return [of]
    if not depth or id(of) in met or isinstance(of, Module | ModuleType | type):
        return []
    met.add(id(of))
    if not isinstance(of, dict | list | tuple):
        of = getattr(of, "__dict__", {})
    return [
        tensor for part in (of.values() if isinstance(of, dict) else of) for tensor in _inside(part, depth - 1, met)
    ]


def _is_reentrant(result: Any, inputs: Iterable[Tensor]) -> bool:
    """Return whether a node of reentrant checkpointing is between inputs and result."""
    return any(node.name().startswith(REENTRANT) for node in nodes_between(result, inputs))
