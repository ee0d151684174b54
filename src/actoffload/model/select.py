"""The modules of a model by name, its repeated blocks, and what ``layers``, ``keep`` and ``plan`` of `offload` mean.

[Note: blocks, stages and parts]
A *list* is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with at least two composite children of one type.  Lists
are nested, and the question is at which depth the blocks are.  Lists inside a block are its parts: experts, heads,
branches.  Lists inside a *stage* hold the blocks, and the list of stages only holds them: Swin, ConvNeXt.

Blocks are copies of each other, so two of them have parameters of the same shapes.  Stages differ in width or depth.
The search goes from the outside in.  It takes the first list that it meets and does not search its blocks.  If no two
of the members are alike, and most of them hold a list themselves, they are stages: then the search goes on inside each
that holds a list, and what lies between, such as a convolution that halves the resolution, is a block of its own.

Where nothing composite repeats, lists of a single composite module count, as the stage of a pipeline may have one of
many blocks; and without these, the leaves: the linear layers of a plain ``Sequential``.

[Note: what an entry means]
- A dotted path is the module of that name.  The path of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` means its
  children.
- A string with ``*``, ``?`` or ``[`` is a glob pattern, compared with whole dotted names as `fnmatch.fnmatchcase` does.
  ``*`` also crosses dots.  Of matches below each other only the outermost counts: ``"model.layers.*"`` is the layers,
  not all that is in them.  The root has no name that a pattern could match.
- A module means itself, and must be part of the model.  A ``Sequential`` that is given alone means its children.
- A type means all modules of that class, also nested ones.
- ``...`` among other entries means the default as well: ``[..., "vision.blocks"]``.
- A module without a forward, such as a ``ModuleList``, is never called, so it always means its children.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import DataParallel, Module, ModuleDict, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .._text import fold_names, name_pattern
from .._torch.modules import PARAMETRIZATIONS, SHARDED, WRAPPED_AS, registered
from .._warnings import warn
from .follow import split_group_name

__all__ = [
    "CONTAINERS",
    "Chosen",
    "Names",
    "block_type",
    "check_entries",
    "children",
    "choose",
    "choose_kept",
    "find_stacks",
    "planned_modules",
    "runs",
    "shapes",
    "split_default",
    "unwrap",
    "with_wrapped",
    "written",
]

CONTAINERS = (ModuleList, ModuleDict, Sequential)

_EXPECTED = "a dotted path or glob pattern, a module, a module type, or an iterable of these"


# Modules and wrappers


def _inner_name(module: Module) -> str | None:
    """Return the attribute under which a wrapper holds its module; None for what is no wrapper.

    Wrappers are those of data parallelism, ``torch.compile``, activation checkpointing and the older FSDP.
    """
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    return next((name for name in WRAPPED_AS if registered(module)[2].get(name) is not None), None)


def with_wrapped(module: Module) -> Iterator[Module]:
    """Yield a module and, if it is a wrapper, what it wraps."""
    yield module
    while (name := _inner_name(module)) is not None:
        module = module.get_submodule(name)
        yield module


def unwrap(module: Module) -> Module:
    """Return the module inside of all wrappers."""
    *_, inner = with_wrapped(module)
    return inner


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
    """Return the children in registration order, without parametrizations; one may be there twice."""
    return [child for name, child in registered(module)[2].items() if child is not None and name != PARAMETRIZATIONS]


def runs(module: Module) -> bool:
    """Return whether a module has a forward; a ``ModuleList`` has none and is never called."""
    return getattr(module.forward, "__func__", None) is not Module.forward  # a compiled module sets one on itself


def shapes(module: Module) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    """Return the names and shapes of the parameters of a module; None is the shape of a lazy one."""
    return tuple((name, None if is_lazy(p) else tuple(p.shape)) for name, p in module.named_parameters())


# Names


class Names:
    """The names of the modules of a model; a wrapper has the name of what it wraps, and stands for it.

    Attributes
    ----------
    modules : dict of str to torch.nn.Module
        In registration order; a module that is registered twice has two names.
    first : dict of torch.nn.Module to str
        The first name of each module, also of those in wrappers.
    """

    def __init__(self, root: Module) -> None:
        self.root, self.title = root, block_type(root).__name__
        self.modules: dict[str, Module] = {}
        self.first: dict[Module, str] = {}
        self._add(root, "", ())

    def _add(self, module: Module, name: str, above: tuple[Module, ...]) -> None:
        self.modules[name] = module
        while True:
            self.first.setdefault(module, name)
            inside = registered(module)[2]
            wrapped = _inner_name(module)
            if wrapped is None and not name and list(inside) == ["module"]:
                wrapped = "module"  # around a whole model this is what engines and data parallel wrappers of others are
            if wrapped is None:
                break
            module = inside[wrapped]
        for part, child in inside.items():
            if child is not None and child is not module and child not in above:  # a circle of modules has no names
                self._add(child, f"{name}.{part}" if name else part, (*above, module))

    @cached_property
    def stacks(self) -> tuple[tuple[Module, ...], ...]:
        """The lists of repeated blocks, as `find_stacks` returns them."""
        return find_stacks(self.root)

    def matching(self, pattern: str) -> list[str]:
        """Return the outermost names that match a glob pattern; the root has none to match."""
        found: list[str] = []
        for name in self.modules:  # a module is followed by those in it
            if name and not (found and name.startswith(f"{found[-1]}.")) and fnmatchcase(name, pattern):
                found.append(name)
        return found

    def kind(self, name: str) -> str:
        """Return a name with ``*`` in place of indices; the root has the name of its class."""
        return name_pattern(name) or self.title

    def chosen(self, kinds: Mapping[str, str]) -> tuple[Chosen, ...]:
        """Return modules in registration order, each under its first name, with the kind that it has there."""
        return tuple(Chosen(name, self.modules[name], kinds[name]) for name in self.modules if name in kinds)


class Chosen(NamedTuple):
    """A module that an argument means."""

    name: str
    module: Module
    kind: str  # modules of one kind are scheduled alike


def _spellings(given: str) -> Iterator[str]:
    """Yield a path or pattern as it was given, and without the parts that wrappers add."""
    yield given
    parts = [part for part in given.split(".") if part not in WRAPPED_AS]
    while parts:
        yield ".".join(parts)
        if parts[0] != "module":
            return
        del parts[0]


# Repeated blocks


_SIDE_BY_SIDE = 2  # lists that a stage holds at most (convolutions, attentions); more are the branches of one block


def find_stacks(root: Module) -> tuple[tuple[Module, ...], ...]:
    """Return the lists of repeated blocks of a model, each block once; see [Note: blocks, stages and parts]."""
    for leaves, least in ((False, 2), (False, 1), (True, 2)):
        if stacks := _Search(root, leaves=leaves, least=least).stacks:
            return tuple(stacks)
    return ()


class _Search:
    """A search for lists of composite modules, or of leaves with parameters, with at least some of one type."""

    def __init__(self, root: Module, *, leaves: bool, least: int) -> None:
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
        return bool(children(inner)) is not self._leaves and any(True for _ in inner.parameters())

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


# What arguments mean


def split_default(layers: Any) -> tuple[bool, Any]:
    """Return whether the argument `layers` includes the default, and its other entries; none is an empty tuple.

    >>> from actoffload.model.select import split_default
    >>> split_default(None), split_default([..., "lm_head"]), split_default("*.mlp")
    ((True, ()), (True, ('lm_head',)), (False, '*.mlp'))
    """
    if layers is None or layers is ...:
        return True, ()
    if not _is_several(layers):
        return False, layers
    entries = tuple(layers)
    others = tuple(entry for entry in entries if entry is not ...)
    return len(others) < len(entries), others


def choose(names: Names, layers: Any) -> tuple[Chosen, ...]:
    """Return the modules that `layers` means, in registration order, each once; at least one.

    Repeated blocks, which None and ``...`` mean, are of the kind ``"layer"``.  Otherwise the kind is the pattern, the
    name of the class, or the path with ``*`` in place of indices; with the name of the module's class after it if
    modules of several classes would be of one kind.  The first entry that means a module decides.
    """
    default, entries = split_default(layers)
    blocks = {names.first[block]: "layer" for stack in names.stacks for block in stack} if default else {}
    meant = dict[str, str]()
    for entry, alone in _entries(names, entries):
        for name, kind in _meaning(names, entry, alone, "layers"):
            if name not in blocks:
                meant.setdefault(name, kind)  # [guard: first entry that means a module]
    if not meant and not blocks:
        raise ValueError(f"layers is empty; expected None for the repeated blocks, {_EXPECTED}.")
    return names.chosen(blocks | _by_class(names, meant))


def choose_kept(names: Names, keep: Any) -> tuple[Chosen, ...]:
    """Return the modules that `keep` means, in registration order; a ``Sequential`` is itself here."""
    entries = _entries(names, keep)
    return names.chosen(dict(meant for entry, _ in entries for meant in _meaning(names, entry, False, "keep")))


def planned_modules(names: Names, groups: Sequence[str]) -> list[Module]:
    """Return the modules of the groups that a plan names; warn about blocks that it lacks of a list that it has."""
    found = list[Module]()
    for group in groups:
        name, _ = split_group_name(group)
        if name not in names.modules or not runs(unwrap(names.modules[name])):
            raise ValueError(
                f"plan has the group '{name}', which is no module of this {names.title} that runs: give a plan of the "
                f"same model. {_similar(names, name)}"
            )
        found.append(names.modules[name])
    planned, missing = set(found), list[str]()
    for stack in names.stacks:
        types = {block_type(block) for block in stack if block in planned}
        missing += [
            names.first[block]
            for block in stack
            if block_type(block) in types
            and planned.isdisjoint(block.modules())
            and any(parameter.requires_grad for parameter in block.parameters())
        ]
    if missing:
        warn(
            f"plan does not have the blocks {fold_names(missing, most=6)} of this {names.title}, which are kept, "
            "although it has others of their list: it may be the plan of a smaller model. Give a plan of the same "
            "model."
        )
    return found


def written(names: Names, given: Any) -> list[Any] | None:
    """Return the entries of ``layers`` or ``keep`` as strings, classes and ``...``; None for None."""
    if given is None:
        return None
    return [names.first[entry] if isinstance(entry, Module) else entry for entry, _ in _entries(names, given)]


def _by_class(names: Names, kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds, with the name of the class where modules of several classes are of one kind."""
    classes = {(kind, block_type(names.modules[name])) for name, kind in kinds.items()}
    numbers = Counter(kind for kind, _ in classes)
    several = {kind for kind, number in numbers.items() if number > 1}  # [guard: kinds of several classes]
    return {
        name: f"{kind} ({block_type(names.modules[name]).__name__})" if kind in several else kind
        for name, kind in kinds.items()
    }


# Entries


def _entries(names: Names, given: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the single entries of an argument, and whether each is all of it."""
    if isinstance(given, CONTAINERS) and given not in names.first:
        # model.layers[:8] is a new list of modules of the model.
        yield from ((child, False) for child in children(given))
    elif _is_several(given):
        yield from ((entry, False) for entry in given)
    else:
        yield given, True


def check_entries(argument: str, given: Any) -> None:
    """Raise a `TypeError` or `ValueError` for entries of `layers` or `keep` that no model has."""
    if not (_is_several(given) or isinstance(given, (str, Module, type)) or given is ...):
        raise TypeError(f"{argument} got {_called(given)}; expected {_EXPECTED}.")
    entries = [given] if not _is_several(given) else [] if isinstance(given, Iterator) else given
    for entry in entries:
        is_class = isinstance(entry, type) and issubclass(entry, Module)
        if not (is_class or isinstance(entry, (str, Module)) or entry is ...):
            raise TypeError(f"{argument} has {_called(entry)} among its entries; expected {_EXPECTED}.")
        if entry == "":
            raise ValueError(f"{argument} has an empty name; expected {_EXPECTED}.")


def _is_several(given: Any) -> bool:
    single = (str, Module, type, Mapping, bytes, Tensor)
    return isinstance(given, Iterable) and not isinstance(given, single)


def _meaning(names: Names, entry: Any, alone: bool, argument: str) -> Iterator[tuple[str, str]]:
    """Yield the first names of the modules that an entry means, with their kinds; see [Note: what an entry means]."""
    kind: str | None = None
    opened = False
    if isinstance(entry, str):
        path = next((name for name in _spellings(entry) if name in names.modules), None)
        if path is not None:
            found, opened = [path], argument == "layers"
        else:
            found, kind = next(filter(None, map(names.matching, _spellings(entry))), []), entry
        if not found:
            of_class = any(block_type(module).__name__ == entry for module in names.modules.values())
            hint = f"It is the name of a class: pass the class, {entry}." if of_class else _similar(names, entry)
            raise ValueError(f"{argument}: '{entry}' matches no module of this {names.title}. {hint}")
    elif isinstance(entry, Module):
        if entry not in names.first:  # [guard: module of another model]
            raise ValueError(
                f"{argument} has a {type(entry).__name__} that is no part of this {names.title}: pass modules of the "
                "model itself, not of a copy of it or of a model around it."
            )
        found, opened = [names.first[entry]], alone
    else:
        kind, modules = entry.__name__, names.modules.items()
        found = [name for name, module in modules if isinstance(module, entry) or isinstance(unwrap(module), entry)]
        if not found:
            there = Counter(block_type(module).__name__ for module in names.modules.values())
            raise ValueError(
                f"{argument}: no module of this {names.title} is a {entry.__name__}. Types there are "
                f"{_listed([name for name, _ in there.most_common()])}."
            )
    meant = [each for name in found for each in _modules(names, name, opened, kind)]
    if not meant:
        raise ValueError(f"{argument}: '{found[0]}' has no forward, and no modules inside.")
    yield from meant


def _modules(names: Names, name: str, opened: bool, kind: str | None) -> Iterator[tuple[str, str]]:
    """Yield a module; or its children, if it has no forward of its own or is a list that is to be opened."""
    inner = unwrap(names.modules[name])
    if runs(inner) and not (opened and isinstance(inner, CONTAINERS)):
        yield names.first[names.modules[name]], kind or names.kind(name)
        return
    for child in children(inner):
        yield from _modules(names, names.first[child], False, kind or name_pattern(f"{name}.*" if name else "*"))


# Messages


def _called(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, which is no torch.nn.Module"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _similar(names: Names, entry: str) -> str:
    """Name modules that the entry may mean, and others: paths and patterns that match something."""
    there = list(dict.fromkeys(name_pattern(name) for name in names.modules if name))
    if not there:
        return "It has no modules inside."
    anywhere = [f"*.{name.rpartition('.')[2]}" for name in there if "." in name]
    exact = [name for name in names.modules if name] if re.search(r"\d", entry) else []
    close = get_close_matches(entry, dict.fromkeys([*there, *anywhere, *exact]), 3)
    said = f"Close to it: {', '.join(map(repr, close))}. " if close else ""
    outermost = sorted(there, key=lambda name: name.count("."))
    return f"{said}Modules there are {_listed(list(map(repr, outermost)))}."
