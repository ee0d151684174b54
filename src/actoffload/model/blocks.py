"""The repeated blocks of a model: what `offload` chooses when it is not told what to choose.

[Note: blocks, stages and parts]
A *list* is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with at least two children of one type (``_members``), or
a module with four or more such attributes, as GoogLeNet has.  Lists are nested, and the question is at which depth the
blocks are.  Lists inside a block are its parts: experts, heads, branches.  Lists inside a *stage* are the blocks, and
the list of stages only holds them: Swin, ConvNeXt.

Both look the same: few outer modules, and in each a longer list.  They differ in what repeats.  Blocks are copies of
each other, so two of them in a list have parameters of the same shapes; stages are not, because width or depth changes
from one to the next.  And a stage holds its list directly, and hardly another, while experts lie deeper, below the MLP,
and branches lie side by side.  So the search goes from the outside in, takes the first list, and goes on inside it only
if no two of its members are alike and most of them hold a list directly.

A model of Hugging Face says in ``_no_split_modules`` what its blocks are.  Inside such a model, lists of these classes
are taken and others (a convolutional stem, a list of heads) are not, unless they belong to a model within it that names
nothing.  The names are no substitute for the search: some of them are stages, or parts of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.nn.parameter import is_lazy

from .._torch import registered
from .module_names import CONTAINERS, block_type, children, runs, unwrap

__all__ = ["Stack", "find_stacks"]

_ATTRIBUTES = 4
"""Attributes of one type that make a list; fewer may as well be an encoder and a decoder of one class."""

_SIDE_BY_SIDE = 2
"""Lists that a stage holds at most, such as convolutions and attentions; more are the branches of one block."""

_SMALL = 20
"""A list behind the largest one whose members are smaller by this factor, and plain, holds heads and not blocks."""


@dataclass(frozen=True)
class Stack:
    """A list of blocks.

    Attributes
    ----------
    blocks : tuple of torch.nn.Module
        In registration order, each once.
    scope : torch.nn.Module or None
        The innermost module around the list that has ``_no_split_modules``.
    named : bool
        Whether a block is, or holds, a module of a class that is named there.
    """

    blocks: tuple[Module, ...]
    scope: Module | None
    named: bool


def find_stacks(root: Module) -> tuple[Stack, ...]:
    """Return the lists of repeated blocks of a model, outside in; see [Note: blocks, stages and parts].

    Parameters
    ----------
    root : torch.nn.Module
        The model; itself never a block.

    Returns
    -------
    tuple of Stack
        In registration order; empty if nothing repeats.  Leaves, such as the linear layers of a plain ``Sequential``,
        count only where nothing composite repeats.
    """
    for leaves in (False, True):
        found = _Search(root, leaves).found()
        if found:
            return found
    return ()


class _Search:
    """One search for lists of composite modules, or of leaves with parameters."""

    def __init__(self, root: Module, leaves: bool) -> None:
        self._root = root
        self._leaves = leaves
        self._lists: dict[Module, list[Module]] = {}  # what makes a module a list; empty where it is none
        self._repeated: set[type] = set()  # the types that do
        self._alike: set[type] = set()  # those of which two in one list are copies of each other
        self._stacks: list[Stack] = []
        self._visited: set[Module] = set()
        self._names: dict[Module, frozenset[str]] = {}  # of blocks, as models and the models within them say
        for module in root.modules():
            self._lists[module] = members = self._members(module)
            if members:
                most = _most(members)
                self._repeated.add(block_type(most[0]))
                if block_type(most[0]) not in self._alike and _two_alike(most):
                    self._alike.add(block_type(most[0]))
        if not leaves:  # [guard: stages of one block]
            self._add_short_stages()

    def _add_short_stages(self) -> None:
        """Count stages of one block, or of one of each type, as lists too, if their blocks are known from elsewhere."""
        for module, members in self._lists.items():
            if members:
                continue
            fit = self._fitting(module)
            types = {block_type(child) for child in fit}.difference(CONTAINERS)
            if isinstance(module, CONTAINERS):
                known = not types.isdisjoint(self._repeated)
            else:
                known = len(fit) > 1 and len(types) == 1 and types <= self._alike
            if known:
                self._lists[module] = fit

    def found(self) -> tuple[Stack, ...]:
        """Return the lists of blocks."""
        self._visit(self._root, None)
        # A model that names its blocks, and in which they were found, has no others.
        followed = {stack.scope for stack in self._stacks if stack.named}
        # [guard: lists of heads]
        return _without_heads([stack for stack in self._stacks if stack.named or stack.scope not in followed])

    def _visit(self, module: Module, scope: Module | None) -> None:
        if module in self._visited:
            return
        self._visited.add(module)
        if _is_model(module):
            scope = module
            self._names[scope] = frozenset().union(*(_declared(each) for each in scope.modules()))
        members = self._lists[module]
        blocks = [each for each in members if runs(each) and not _is_model(each)]
        if blocks and self._are_stages(members):  # [guard: stages, which are no blocks]
            # What lies between the stages, such as a convolution that halves the resolution, is a block of its own.
            blocks = [each for each in blocks if not self._holds_list(each)]
        if blocks:
            self._stacks.append(Stack(tuple(dict.fromkeys(blocks)), scope, self._named(blocks, scope)))
        for child in children(module):
            if child not in blocks and not self._is_only_block(module, child):
                self._visit(child, scope)

    def _named(self, blocks: list[Module], scope: Module | None) -> bool:
        if scope is None:
            return False
        types = {type(module) for block in blocks for module in block.modules()}
        return any(base.__name__ in self._names[scope] for kind in types for base in kind.__mro__)

    def _members(self, module: Module) -> list[Module]:
        """Return the children that make a module a list; none if it is not one."""
        fit = self._fitting(module)
        types = [block_type(child) for child in fit]
        number = Counter(types)
        most = max(number.values(), default=0)
        if most < (2 if isinstance(module, CONTAINERS) else _ATTRIBUTES):
            return []
        if isinstance(module, (ModuleList, ModuleDict)):  # [guard: mixed types in one list]
            return fit  # types mixed in one list make a hybrid stack
        # Among others in a Sequential, and among attributes, blocks are what repeats and what lies between.  A stem and
        # a head of one type are a pair, and no blocks.
        least = min(3, most) if isinstance(module, Sequential) else 2
        places = [place for place, kind in enumerate(types) if number[kind] >= least]
        return fit[places[0] : places[-1] + 1]

    def _fitting(self, module: Module) -> list[Module]:
        fit = [child for child in children(module) if self._fits(child)]
        if isinstance(module, CONTAINERS):
            return fit
        return [] if self._leaves else [child for child in fit if not isinstance(unwrap(child), CONTAINERS)]

    def _fits(self, child: Module) -> bool:
        inner = unwrap(child)
        composite = bool(registered(inner)[2].keys() - {"parametrizations"})  # a leaf with weight_norm is a leaf
        return composite is not self._leaves and _has_parameters(inner)

    def _are_stages(self, members: list[Module]) -> bool:
        most = _most(members)
        kind = block_type(most[0])
        # What one Sequential holds says nothing of another.
        if _two_alike(most) if kind is Sequential else kind in self._alike:
            return False
        return 2 * sum(self._holds_list(each) for each in most) > len(most)

    def _holds_list(self, module: Module) -> bool:
        inner = unwrap(module)
        types = {block_type(child) for child in children(inner) if self._fits(child)}
        if self._lists[inner] and (isinstance(inner, CONTAINERS) or len(types) == 1):
            return True
        lists = [each for each in map(unwrap, children(inner)) if isinstance(each, CONTAINERS) and self._lists[each]]
        return 0 < len(lists) <= _SIDE_BY_SIDE

    def _is_only_block(self, module: Module, child: Module) -> bool:
        """Return whether a list holds this one block: then lists below it are its parts and no blocks."""
        alone = isinstance(module, (ModuleList, ModuleDict)) and len(module) == 1 and self._fits(child)
        return alone and runs(unwrap(child)) and not _is_model(child) and not self._holds_list(child)


def _most(modules: list[Module]) -> list[Module]:
    """Return the modules of the most frequent type."""
    if not modules:
        return []
    ((kind, _),) = Counter(block_type(each) for each in modules).most_common(1)
    return [each for each in modules if block_type(each) is kind]


def _two_alike(modules: list[Module]) -> bool:
    """Return whether two of these have parameters of the same names and shapes, or are the same."""
    seen = set()
    for module in modules:
        shapes = tuple((name, None if is_lazy(p) else tuple(p.shape)) for name, p in module.named_parameters())
        if shapes in seen:  # [guard: blocks that are alike]
            return True
        seen.add(shapes)
    return False


def _has_parameters(module: Module) -> bool:
    return any(True for _ in module.parameters())


def _is_model(module: Module) -> bool:
    """Return whether a module can say what its blocks are, and so is none: a model, or a model within one."""
    return hasattr(module, "_no_split_modules")


def _declared(module: Module) -> frozenset[str]:
    """Return the class names in ``_no_split_modules`` of a module."""
    names: Any = getattr(module, "_no_split_modules", None)
    if not isinstance(names, (list, tuple, set, frozenset)):
        return frozenset()
    return frozenset(name for name in names if isinstance(name, str))


def _without_heads(stacks: Sequence[Stack]) -> tuple[Stack, ...]:
    """Leave out lists of small plain modules behind the largest list: backward begins with them, and they hold little.

    The last groups stay on the device, so that backward need not wait.  These should be blocks.
    """
    sizes: dict[type, list[int]] = {}
    for stack in stacks:
        sizes.setdefault(_kind(stack), []).extend(_sizes(stack))
    if not sizes:
        return ()
    largest = max(sizes, key=lambda kind: sum(sizes[kind]))
    last = max(place for place, stack in enumerate(stacks) if _kind(stack) is largest)

    def mean(kind: type) -> float:
        return sum(sizes[kind]) / len(sizes[kind])

    return tuple(
        stack
        for place, stack in enumerate(stacks)
        if place <= last or stack.named or not _plain(stack) or mean(_kind(stack)) * _SMALL >= mean(largest)
    )


def _kind(stack: Stack) -> type:
    return block_type(_most(list(stack.blocks))[0])


def _plain(stack: Stack) -> bool:
    return not any(registered(child)[2] for block in stack.blocks for child in children(unwrap(block)))


def _sizes(stack: Stack) -> list[int]:
    return [sum(0 if is_lazy(p) else p.numel() for p in block.parameters()) for block in stack.blocks]
