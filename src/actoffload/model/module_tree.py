"""The modules of a model: their names with and without wrappers, and the repeated blocks, which `offload` chooses.

[Note: blocks, stages and parts]
A *list* is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with at least two composite children of one type.  Lists
are nested, and the question is at which depth the blocks are.  Lists inside a block are its parts: experts, heads,
branches.  Lists inside a *stage* hold the blocks, and the list of stages only holds them: Swin, ConvNeXt.

Both look the same: a few outer modules, and in each a longer list.  But blocks are copies of each other, so two of them
have parameters of the same shapes; stages are not, because width or depth changes from one to the next.  So the search
goes from the outside in.  It takes the first list that it meets and does not search its blocks.  If no two of the
members are alike, and most of them hold a list themselves, they are stages: then the search goes on inside each that
holds a list, and what lies between, such as a convolution that halves the resolution, is a block of its own.

Where no composite module repeats, the same search is made for leaves: the linear layers of a plain ``Sequential``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

from torch.nn import DataParallel, Module, ModuleDict, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .._torch.modules import PARAMETRIZATIONS, SHARDED, WRAPPED_AS, registered

__all__ = [
    "CONTAINERS",
    "Named",
    "Names",
    "block_type",
    "children",
    "find_stacks",
    "inner_name",
    "names_of",
    "runs",
    "shapes",
    "starred",
    "unwrap",
    "written",
]


CONTAINERS = (ModuleList, ModuleDict, Sequential)


# Wrappers


def inner_name(module: Module) -> str | None:
    """Return the attribute under which a wrapper holds its module; None for what is no wrapper.

    Wrappers are those of data parallelism, ``torch.compile``, activation checkpointing and the older FSDP.
    """
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    return next((name for name in WRAPPED_AS if registered(module)[2].get(name) is not None), None)


def unwrap(module: Module) -> Module:
    """Return the module inside of all wrappers."""
    while (name := inner_name(module)) is not None:
        module = module.get_submodule(name)
    return module


def block_type(module: Module) -> type:
    """Return the class that a module was created with: without wrappers, sharding and parametrizations."""
    kind: type = type(unwrap(module))
    while True:
        *others, base = kind.__bases__
        sharded = len(others) == 1 and others[0].__name__ in SHARDED
        if not (sharded or kind.__name__ == f"Parametrized{base.__name__}"):
            return kind
        kind = base


def children(module: Module) -> list[Module]:
    """Return the children in registration order; one that was registered twice is there twice."""
    return [child for child in registered(module)[2].values() if child is not None]


def runs(module: Module) -> bool:
    """Return whether a module has a forward; a ``ModuleList`` has none and is never called."""
    return getattr(module.forward, "__func__", None) is not Module.forward  # a compiled module sets one on itself


# Names


class Named(NamedTuple):
    """A module under one of its names: as registered, and without the parts that wrappers add."""

    full: str
    clean: str
    module: Module


class Names:
    """All names of all modules of a model, in registration order; a module that is registered twice has two."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self.all = list(_walk(root, "", "", ()))
        self.title = block_type(root).__name__
        self.first: dict[Module, Named] = {}  # the names that named_modules() gives
        for named in self.all:
            self.first.setdefault(named.module, named)
        self._full = {named.full: named for named in self.all}
        self._clean = {named.clean: named for named in reversed(self.all)}  # the first one counts

    @cached_property
    def stacks(self) -> tuple[tuple[Module, ...], ...]:
        """The lists of repeated blocks, as `find_stacks` returns them."""
        return find_stacks(self.root)

    def at(self, path: str) -> Named | None:
        """Return the module of this name; of a wrapper and what it wraps the wrapper, which comes first."""
        return self._clean.get(path) or self._full.get(path)

    def of_group(self, name: str) -> Named | None:
        """Return the module of a group that a plan names, which may be of this model in other wrappers, or in none."""
        if name in self._full:
            return self._full[name]
        parts = [part for part in name.split(".") if part not in WRAPPED_AS]
        while parts:  # what is around the whole model
            if found := self.at(".".join(parts)):
                return found
            if parts[0] != "module":
                return None
            del parts[0]
        return self._full[""]

    def matching(self, pattern: str) -> list[Named]:
        """Return the outermost modules whose names match a glob pattern; the root has no name to match."""
        for clean in (True, False):
            found: list[Named] = []
            for named in self.all:  # a module is followed by those in it
                name = named.clean if clean else named.full
                inside = found and named.full.startswith(f"{found[-1].full}.")
                if name and not inside and fnmatchcase(name, pattern):
                    found.append(named)
            if found:
                return found
        return []

    def kind(self, named: Named) -> str:
        """Return a clean name with ``*`` in place of indices, also in names like ``block_3`` in a list."""
        *parents, last = named.clean.split(".")
        above = self._full.get(named.full.rpartition(".")[0])
        if above is not None and isinstance(above.module, CONTAINERS):
            last = re.sub(r"\d+$", "*", last)
        return starred(".".join([*parents, last])) or block_type(named.module).__name__


def names_of(root: Module | Names) -> Names:
    """Return the names of a model, which is walked through once."""
    return root if isinstance(root, Names) else Names(root)


def _walk(module: Module, full: str, clean: str, above: tuple[Module, ...]) -> Iterator[Named]:
    yield Named(full, clean, module)
    wrapped = inner_name(module)
    if wrapped is None and not clean and list(registered(module)[2]) == ["module"]:
        wrapped = "module"  # around a whole model this is what engines and data parallel wrappers of others look like
    for name, child in registered(module)[2].items():
        if child is not None and child is not module and child not in above:  # a circle of modules has no names
            below = f"{full}.{name}" if full else name
            inside = clean if name == wrapped else f"{clean}.{name}" if clean else name
            yield from _walk(child, below, inside, (*above, module))


def starred(name: str) -> str:
    """Return a dotted name with ``*`` in place of indices."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def written(root: Module | Names, given: Any) -> list[Any] | None:
    """Return the entries of ``layers`` or ``keep`` as strings, classes and ``...``; None for None."""
    if given is None:
        return None
    names = names_of(root)
    if isinstance(given, CONTAINERS) and given not in names.first:
        given = children(given)
    entries = [given] if isinstance(given, (str, Module, type)) or given is ... else list(given)
    return [names.first[entry].clean if isinstance(entry, Module) else entry for entry in entries]


_SIDE_BY_SIDE = 2  # lists that a stage holds at most (convolutions, attentions); more are the branches of one block


def find_stacks(root: Module, *, alone: bool = False) -> tuple[tuple[Module, ...], ...]:
    """Return the lists of repeated blocks of a model in registration order, each block once; empty if nothing repeats.

    See [Note: blocks, stages and parts].  The model itself is never a block.  Where nothing composite repeats and
    `alone` is True, lists of a single composite module count: the stage of a pipeline may have one of many blocks.
    """
    fewest = (2, 1) if alone else (2,)
    for least in fewest:
        if stacks := _Search(root, leaves=False, least=least).stacks:
            return tuple(stacks)
    return tuple(_Search(root, leaves=True).stacks)


class _Search:
    """A search for lists of composite modules, or of leaves with parameters, with at least some of one type."""

    def __init__(self, root: Module, *, leaves: bool, least: int = 2) -> None:
        self._leaves, self._least = leaves, least
        self._visited: set[Module] = set()
        self._lists = {module: self._members(module) for module in root.modules()}
        # Types of which two in one list are copies of each other; what one Sequential holds says nothing of another.
        lists = [_most_frequent(members) for members in self._lists.values() if members]
        self._alike = {
            block_type(each[0]) for each in lists if block_type(each[0]) is not Sequential and _two_alike(each)
        }
        self.stacks: list[tuple[Module, ...]] = []
        self._visit(root)

    def _visit(self, module: Module) -> None:
        if module in self._visited:
            return
        self._visited.add(module)
        members = self._lists[module]
        blocks = [each for each in members if runs(each)]
        if blocks and self._are_stages(members):  # [guard: stages, which are no blocks]
            blocks = [each for each in blocks if not self._holds_list(each)]
        if blocks:
            self.stacks.append(tuple(dict.fromkeys(blocks)))
        for child in children(module):
            if child not in blocks and not self._is_only_block(module, child):
                self._visit(child)

    def _members(self, module: Module) -> list[Module]:
        """Return the children that make a module a list; none if it is not one."""
        fit = [child for child in children(module) if self._fits(child)] if isinstance(module, CONTAINERS) else []
        types = [block_type(child) for child in fit]
        number = Counter(types)
        most = max(number.values(), default=0)
        if most < self._least:
            return []
        if not isinstance(module, Sequential):  # [guard: mixed types in one list]
            return fit  # types mixed in one list make a hybrid stack
        # A Sequential also holds what lies before and behind: blocks are what repeats, and what lies between.  A stem
        # and a head of one type are a pair, and no blocks.
        places = [place for place, kind in enumerate(types) if number[kind] >= min(3, most)]
        return fit[places[0] : places[-1] + 1]

    def _fits(self, child: Module) -> bool:
        inner = unwrap(child)
        composite = bool(registered(inner)[2].keys() - {PARAMETRIZATIONS})  # a leaf with weight_norm is a leaf
        return composite is not self._leaves and any(True for _ in inner.parameters())

    def _are_stages(self, members: list[Module]) -> bool:
        most = _most_frequent(members)
        kind = block_type(most[0])
        if kind in self._alike or (kind is Sequential and _two_alike(most)):
            return False
        return 2 * sum(map(self._holds_list, most)) > len(most)

    def _holds_list(self, module: Module) -> bool:
        """Return whether a module is a list, or holds one or two directly."""
        inner = unwrap(module)
        if self._lists[inner]:
            return True
        held = [each for each in map(unwrap, children(inner)) if self._lists[each]]
        return 0 < len(held) <= _SIDE_BY_SIDE

    def _is_only_block(self, module: Module, child: Module) -> bool:
        """Return whether a list holds this one block: then lists below it are its parts and no blocks."""
        alone = isinstance(module, CONTAINERS) and not isinstance(module, Sequential) and len(module) == 1
        return alone and self._fits(child) and runs(unwrap(child)) and not self._holds_list(child)


def _most_frequent(modules: list[Module]) -> list[Module]:
    """Return the modules of the most frequent type."""
    ((kind, _),) = Counter(map(block_type, modules)).most_common(1)
    return [each for each in modules if block_type(each) is kind]


def _two_alike(modules: Iterable[Module]) -> bool:
    """Return whether two of these have parameters of the same names and shapes, or are the same."""
    found = list(map(shapes, modules))
    return len(set(found)) < len(found)  # [guard: blocks that are alike -> False]


def shapes(module: Module) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    """Return the names and shapes of the parameters of a module; None is the shape of a lazy one."""
    return tuple((name, None if is_lazy(p) else tuple(p.shape)) for name, p in module.named_parameters())
