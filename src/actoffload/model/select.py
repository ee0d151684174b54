"""The modules that the arguments ``layers``, ``keep`` and ``plan`` of `offload` mean.

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

Names are compared without the parts that wrappers add (``module.``, ``_orig_mod.``, ``_checkpoint_wrapped_module.``),
and, where nothing has that name, with them.  Of a wrapper and the module in it, which have the same name then, the
wrapper is meant.

A plan names groups, each a module and never those in it.  It may be of the same model in other wrappers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from .._folding import fold_names
from .._warnings import warn
from .followed import group_name, split_group_name
from .module_tree import (
    CONTAINERS,
    Named,
    Names,
    block_type,
    children,
    find_stacks,
    names_of,
    runs,
    shapes,
    starred,
    unwrap,
)

__all__ = ["Chosen", "choose", "choose_planned", "find_kept", "split_default"]

_EXPECTED = "a dotted path or glob pattern, a module, a module type, or an iterable of these"


class Chosen(NamedTuple):
    """A module that an argument means, with its name in ``root.named_modules()``."""

    name: str
    module: Module
    kind: str  # modules of one kind are scheduled alike


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


def choose(
    root: Module | Names, layers: str | Module | type[Module] | Iterable[Any] | None, *, alone: bool = False
) -> tuple[Chosen, ...]:
    """Return the modules that `layers` means, in registration order, each once; at least one.

    Repeated blocks, which None and ``...`` mean, are of the kind ``"layer"``; `alone` is that of `find_stacks`.
    Otherwise the kind is the pattern, the name of the class, or the path with ``*`` in place of indices; with the name
    of the module's class after it if modules of several classes would be of one kind.  The first entry that means a
    module decides.
    """
    names = names_of(root)
    default, entries = split_default(layers)
    meant: dict[Module, str] = {}
    if default:
        stacks = find_stacks(names.root, alone=True) if alone else names.stacks
        meant = {block: "layer" for stack in stacks for block in stack}
        if not meant and not entries:
            raise ValueError(_nothing_repeats(names))
    blocks = set(meant)
    for entry, alone in _entries(names, entries, "layers"):
        for module, kind in _meaning(names, entry, alone, "layers"):
            meant.setdefault(module, kind)  # [guard: first entry that means a module]
    if not meant:
        raise ValueError(f"layers is empty; expected None for the repeated blocks, {_EXPECTED}.")
    return _in_order(names, _by_class(meant, blocks))


def choose_planned(root: Module | Names, groups: Sequence[str]) -> tuple[tuple[Chosen, ...], tuple[str, ...]]:
    """Return the modules of the groups that a plan names, as `choose` does, and what these groups are called in `root`.

    A plan of a model is one of the same model in wrappers too, and the other way round.  Warns if repeated blocks are
    not in the plan, although blocks with the same parameters are.
    """
    names, meant, called = names_of(root), dict[Module, str](), list[str]()
    for group in groups:
        module, part = split_group_name(group)
        named = names.of_group(module)
        if named is None or not runs(unwrap(named.module)):
            raise ValueError(
                f"plan has the group '{module}', which is no module of this {names.title} that runs: give a plan "
                f"of the same model. {_siblings(names, module) or _similar(names, module)}"
            )
        first = names.first[named.module]
        meant.setdefault(named.module, names.kind(first))
        called.append(group_name(first.full, part))
    missing = _unplanned(names, set(meant))
    if missing:
        blocks = fold_names([names.first[block].clean for block in missing], most=6)
        warn(
            f"plan does not have the blocks {blocks} of this {names.title}, which are kept, although it has others of "
            "their list: it may be the plan of a smaller model. Give a plan of the same model."
        )
    return _in_order(names, _by_class(meant)), tuple(called)


def _unplanned(names: Names, planned: Set[Module]) -> list[Module]:
    """Return the repeated blocks that are in no group of a plan, although blocks with the same parameters are."""
    missing = []
    for stack in names.stacks:
        alike = {(block_type(block), shapes(block)) for block in stack if block in planned}
        missing += [
            block
            for block in stack
            if (block_type(block), shapes(block)) in alike
            and planned.isdisjoint(block.modules())
            and any(parameter.requires_grad for parameter in block.parameters())
        ]
    return missing


def _by_class(kinds: Mapping[Module, str], blocks: Set[Module] = frozenset()) -> dict[Module, str]:
    """Return the kinds with the name of the class where modules of several classes, blocks aside, are of one kind."""
    classes = {(kind, block_type(module)) for module, kind in kinds.items() if module not in blocks}
    numbers = Counter(kind for kind, _ in classes)
    several = {kind for kind, number in numbers.items() if number > 1}  # [guard: kinds of several classes]
    return {m: f"{kind} ({block_type(m).__name__})" if kind in several else kind for m, kind in kinds.items()}


def find_kept(
    root: Module | Names, keep: str | Module | type[Module] | Iterable[Any]
) -> tuple[tuple[str, Module], ...]:
    """Return the modules that `keep` means, with names, in registration order; a ``Sequential`` is itself here."""
    names = names_of(root)
    found = dict(meant for entry, _ in _entries(names, keep, "keep") for meant in _meaning(names, entry, False, "keep"))
    return tuple(each[:2] for each in _in_order(names, found))


def _in_order(names: Names, kinds: Mapping[Module, str]) -> tuple[Chosen, ...]:
    return tuple(Chosen(names.first[m].full, m, kinds[m]) for m in names.first if m in kinds)


# Entries


def _entries(names: Names, given: Any, argument: str) -> Iterator[tuple[Any, bool]]:
    """Yield the single entries of an argument, and whether each is all of it."""
    if isinstance(given, CONTAINERS) and given not in names.first:
        # model.layers[:8] is a new list of modules of the model.
        yield from ((child, False) for child in children(given))
    elif isinstance(given, (str, Module, type)) or given is ...:
        yield given, True
    elif _is_several(given):
        yield from ((entry, False) for entry in given)
    else:
        check_entries(argument, given)


def check_entries(argument: str, given: Any) -> None:
    """Raise a `TypeError` or `ValueError` for entries of `layers` or `keep` that no model has."""
    if not (_is_several(given) or isinstance(given, (str, Module, type)) or given is ...):
        raise TypeError(f"{argument} got {_called(given)}; expected {_EXPECTED}.")
    entries = [given] if not _is_several(given) else [] if isinstance(given, Iterator) else given
    for entry in entries:
        if not (isinstance(entry, (str, Module)) or entry is ... or _is_module_class(entry)):
            raise TypeError(f"{argument} has {_called(entry)} among its entries; expected {_EXPECTED}.")
        if entry == "":
            raise ValueError(f"{argument} has an empty name; expected {_EXPECTED}.")


def _is_module_class(entry: object) -> bool:
    return isinstance(entry, type) and issubclass(entry, Module)


def _is_several(given: Any) -> bool:
    single = (str, Module, type, Mapping, bytes, Tensor)
    return isinstance(given, Iterable) and not isinstance(given, single)


def _meaning(names: Names, entry: Any, alone: bool, argument: str) -> Iterator[tuple[Module, str]]:
    """Yield the modules that an entry means, with their kinds; see [Note: what an entry means]."""
    found: list[Named]
    kind: str | None = None
    opened = False
    if isinstance(entry, str):
        named = names.at(entry)
        found, opened = ([] if named is None else [named]), argument == "layers"
        if named is None and any(sign in entry for sign in "*?["):
            found, kind, opened = names.matching(entry), entry, False
        if not found:
            of_class = any(block_type(named.module).__name__ == entry for named in names.all)
            hint = f"It is the name of a class: pass the class, {entry}." if of_class else _similar(names, entry)
            raise ValueError(f"{argument}: '{entry}' matches no module of this {names.title}. {hint}")
    elif isinstance(entry, Module):
        if entry not in names.first:  # [guard: module of another model]
            raise ValueError(
                f"{argument} has a {type(entry).__name__} that is no part of this {names.title}: pass modules of the "
                "model itself, not of a copy of it or of a model around it."
            )
        found, opened = [names.first[entry]], alone
    elif _is_module_class(entry):
        # A wrapper stands for what it wraps: both have one clean name, and the wrapper comes first.
        by_name: dict[str, Named] = {}
        for named in names.all:
            if isinstance(named.module, entry) or isinstance(unwrap(named.module), entry):
                by_name.setdefault(named.clean, named)
        found, kind = list(by_name.values()), entry.__name__
        if not found:
            there = Counter(block_type(named.module).__name__ for named in names.all)
            raise ValueError(
                f"{argument}: no module of this {names.title} is a {entry.__name__}. Types there are "
                f"{_listed([name for name, _ in there.most_common()])}."
            )
    else:
        raise TypeError(f"{argument} has {_called(entry)} among its entries; expected {_EXPECTED}.")
    meant = [each for named in found for each in _modules(names, named, opened, kind)]
    if not meant:
        raise ValueError(f"{argument}: '{found[0].clean}' has no forward, and no modules inside.")
    yield from meant


def _modules(names: Names, named: Named, opened: bool, kind: str | None) -> Iterator[tuple[Module, str]]:
    """Yield a module; or its children, if it has no forward of its own or is a list that is to be opened."""
    inner = unwrap(named.module)
    if runs(inner) and not (opened and isinstance(inner, CONTAINERS)):
        yield named.module, kind or names.kind(named)
        return
    of_list = starred(f"{named.clean}.*" if named.clean else "*")
    for child in children(inner):
        yield from _modules(names, names.first[child], False, kind or of_list)


# Messages


def _called(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, which is no torch.nn.Module"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _siblings(names: Names, group: str) -> str:
    """Name the modules whose names differ from that of a group in their indices; an empty text if there are none."""
    there = [named.clean for named in names.all if starred(named.clean) == starred(group)]
    return f"This {names.title} has {fold_names(there, most=6)}." if there and starred(group) != group else ""


def _similar(names: Names, entry: str) -> str:
    """Name modules that the entry may mean, and others: patterns that match something."""
    there = list(dict.fromkeys(starred(named.clean) for named in names.all if named.clean))
    if not there:
        return "It has no modules inside."
    pool = [*there, *(named.clean for named in names.all if named.clean)] if re.search(r"\d", entry) else there
    close = get_close_matches(entry, dict.fromkeys(pool), 3)
    ends = {name.rpartition(".")[2]: name for name in there}
    for end in get_close_matches(entry.rpartition(".")[2], ends, 2):
        close.append(f"*.{end}" if "." in ends[end] else end)
    said = f"Close to it: {', '.join(repr(name) for name in dict.fromkeys(close))}. " if close else ""
    whole = next((named.clean for named in names.all if starred(named.clean) == "*"), "")  # as "*" matches everything
    first = sorted((whole if name == "*" else name for name in there), key=lambda name: name.count("."))
    return f"{said}Modules there are {_listed([repr(name) for name in first])}."


def _nothing_repeats(names: Names) -> str:
    lists, outer = dict[str, str](), list[str]()
    for named in names.all:
        inside = children(named.module)
        if isinstance(named.module, CONTAINERS) and inside:
            types = Counter(block_type(child).__name__ for child in inside)
            members = _listed([f"{number} {name}" for name, number in types.most_common()], 3)
            path = starred(named.clean)
            lists.setdefault(path, f"'{path}' ({members})" if path else f"the model itself ({members})")
        elif named.clean and "." not in named.clean:
            outer.append(f"'{named.clean}' ({block_type(named.module).__name__})")
    there = "It has no modules inside."
    if lists or outer:
        there = f"Its lists are {_listed(list(lists.values()))}." if lists else f"Its modules are {_listed(outer)}."
    return (
        f"Found no repeated blocks in this {names.title}: no list of two or more modules of one type. {there} Say "
        "which modules to offload: layers= takes names of modules, patterns like '*.mlp', modules or types."
    )
