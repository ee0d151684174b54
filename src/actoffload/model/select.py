"""The modules of a model by name, and what ``layers``, ``keep`` and ``plan`` of `offload` mean.

[Note: what an entry means]
- A dotted path is the module of that name.  The path of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` means its
  children.
- A string with ``*``, ``?`` or ``[`` is a glob pattern, compared with whole dotted names; ``*`` also crosses dots.
- A module means itself, and must be part of the model.  A ``Sequential`` that is given alone means its children.
- A type means all modules of that class.
- ``...`` among other entries means the default as well: ``[..., "vision.blocks"]``.
- A module without a forward, such as a ``ModuleList``, is never called, so it always means its children.
- Of chosen modules inside of each other only the outermost counts, so groups are not nested.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.nn import Module

from .._text import fold_names, name_pattern
from .._torch.modules import registered
from .._warnings import warn
from .blocks import BLOCK, CONTAINERS, block_type, children, default_groups, find_stacks, inner_name, runs, unwrap
from .follow import GROUP, KEPT, ROOT, WHOLE, FollowedModule

MOST = 8  # modules that an error names
_EXPECTED = "a dotted path or glob pattern, a module, a module type, or an iterable of these"


# Names


class Names:
    """The names of the modules of a model; a wrapper has the name of what it wraps, and stands for it."""

    def __init__(self, root: Module) -> None:
        self.root, self.title = root, block_type(root).__name__
        self.modules: dict[str, Module] = {}  # in registration order; one that is registered twice has two names
        self.first: dict[Module, str] = {}  # the first name of each module, also of those in wrappers
        self._add(root, "", ())

    def _add(self, module: Module, name: str, above: tuple[Module, ...]) -> None:
        self.modules[name] = module
        while True:
            self.first.setdefault(module, name)
            inside = registered(module)[2]
            wrapped = inner_name(module)
            if wrapped is None and not name and list(inside) == ["module"]:
                wrapped = "module"  # around a whole model this is what engines and data parallel wrappers of others are
            if wrapped is None:
                break
            module = inside[wrapped]
        for part, child in inside.items():
            if child is not None and child is not module and child not in above:  # a circle of modules has no names
                self._add(child, f"{name}.{part}" if name else part, (*above, module))

    def matching(self, pattern: str) -> Mapping[str, str]:
        """Return the outermost names that match a glob pattern; the root has none to match."""
        return self.outermost({name: pattern for name in self.modules if name and fnmatchcase(name, pattern)})

    def outermost(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """Return the names of modules that are not inside of others among them, in registration order."""
        found = list[str]()
        for name in self.modules:  # a module is followed by those in it
            if name in kinds and not (found and name.startswith(found[-1] and f"{found[-1]}.")):
                found.append(name)
        return {name: kinds[name] for name in found}

    def kind(self, name: str) -> str:
        """Return a name with ``*`` in place of indices; the root has the name of its class."""
        return name_pattern(name) or self.title

    def chosen(self, role: str, kinds: Mapping[str, str]) -> list[FollowedModule]:
        """Return modules in registration order, each under its first name, with the kind that it has there."""
        found = ((name, module) for name, module in self.modules.items() if name in kinds)
        return [FollowedModule(role, name or WHOLE, weakref.ref(module), kind=kinds[name]) for name, module in found]


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


def find_modules(names: Names, layers: Any, keep: Any) -> list[FollowedModule]:
    """Return the modules to follow: the model, then its groups and the modules that are kept, by `layers` and `keep`.

    The model may be a stage of a pipeline.
    """
    kept = choose_kept(names, keep)
    groups = choose(names, layers, kept)
    if not groups:
        without = " beside those of keep" if kept else ""
        raise ValueError(f"This {names.title} has no modules inside that could be offloaded{without}.")
    both = {each.name for each in kept} & {each.name for each in groups}
    if both:
        raise ValueError(f"The module '{min(both)}' is chosen by layers and by keep: take it out of one of them.")
    for k, group in enumerate(groups):
        group.group = k
    return [FollowedModule(ROOT, type(names.root).__name__, weakref.ref(names.root)), *groups, *kept]


def choose(names: Names, layers: Any, kept: Iterable[FollowedModule] = ()) -> list[FollowedModule]:
    """Return the modules that `layers` means, in registration order, each once, without those inside of others.

    None and ``...`` mean the default groups without those that are `kept`.  The kind of others is the pattern, the name
    of the class, or the path with ``*`` in place of indices; with the name of the module's class after it if modules of
    several classes would be of one kind.  The first entry that means a module decides.
    """
    default, entries = split_default(layers)
    found, meant = dict[str, str](), dict[str, str]()
    for entry, alone in _entries(names, entries):
        for name, kind in _meaning(names, entry, alone, "layers"):
            meant.setdefault(name, kind)  # [guard: first entry that means a module]
    if not meant and not default:
        raise ValueError(f"layers is empty; expected None for the default groups, {_EXPECTED}.")
    if default:
        named, without = (
            {names.modules[name] for name in meant},
            [each.module for each in kept if each.module is not names.root],
        )
        groups = default_groups(names.root, without, named)
        found = {names.first[module]: kind for module, kind in groups if names.first[module]}
    others = {name: kind for name, kind in meant.items() if found.get(name) != BLOCK}  # [guard: named modules]
    kinds = names.outermost(found | others)
    others = {name: kind for name, kind in kinds.items() if name in others}
    return names.chosen(GROUP, kinds | _by_class(names, others))


def choose_kept(names: Names, keep: Any) -> list[FollowedModule]:
    """Return the modules that `keep` means, in registration order; a ``Sequential`` is itself here."""
    entries = _entries(names, keep)
    return names.chosen(KEPT, dict(meant for entry, _ in entries for meant in _meaning(names, entry, False, "keep")))


def planned_modules(names: Names, groups: Sequence[str]) -> list[Module]:
    """Return the modules of the groups that a plan names; warn about blocks that it lacks of a list that it has."""
    found = list[Module]()
    for group in groups:
        name = "" if group == WHOLE else group
        if name not in names.modules or not runs(unwrap(names.modules[name])):
            raise ValueError(
                f"plan has the group '{name}', which is no module of this {names.title} that runs: give a plan of the "
                f"same model. {_similar(names, name)}"
            )
        found.append(names.modules[name])
    planned, missing = set(found), list[str]()
    for stack in find_stacks(names.root):
        if not planned.isdisjoint(stack):
            others = (block for block in stack if planned.isdisjoint(block.modules()))
            missing += [names.first[each] for each in others if any(p.requires_grad for p in each.parameters())]
    if missing:
        warn(
            f"plan does not have the blocks {fold_names(missing, most=6)} of this {names.title}, which are kept, "
            "although it has others of their list: it may be the plan of a smaller model. Give a plan of the same "
            "model."
        )
    return found


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


def check_entries(layers: Any, keep: Any) -> None:
    """Raise a `TypeError` or `ValueError` for entries of `layers` or `keep` that no model has."""
    for argument, given in (("layers", ... if layers is None else layers), ("keep", keep)):
        entries: Any = [given] if not _is_several(given) else [] if isinstance(given, Iterator) else given
        for entry in entries:
            if entry is ... and argument == "keep":
                raise TypeError("keep has `...`, which means the default groups of `layers`; name the modules to keep.")
            is_class = isinstance(entry, type) and issubclass(entry, Module)
            if not (is_class or isinstance(entry, (str, Module)) or entry is ...):
                raise TypeError(f"{argument} has an entry {entry!r}; expected {_EXPECTED}.")
            if entry == "":
                raise ValueError(f"{argument} has an empty name; expected {_EXPECTED}.")


def _is_several(given: Any) -> bool:
    single = (str, Module, type, Mapping, bytes, Tensor)
    return isinstance(given, Iterable) and not isinstance(given, single)


def _meaning(names: Names, entry: Any, alone: bool, argument: str) -> Iterator[tuple[str, str]]:
    """Yield the first names of the modules that an entry means, with their kinds; see [Note: what an entry means]."""
    kind: str | None = None
    opened = False
    if isinstance(entry, str) and entry in names.modules:
        found, opened = [entry], argument == "layers"
    elif isinstance(entry, str):
        found, kind = [*names.matching(entry)], entry
        if not found:
            raise ValueError(f"{argument}: '{entry}' matches no module of this {names.title}. {_similar(names, entry)}")
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
            raise ValueError(f"{argument}: no module of this {names.title} is a {kind}. {_similar(names, kind)}")
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


def _similar(names: Names, entry: str) -> str:
    """Name modules that the entry may mean, and the outermost ones."""
    there = list(dict.fromkeys(name_pattern(name) for name in names.modules if name))
    if not there:
        return "It has no modules inside."
    anywhere = [f"*.{name.rpartition('.')[2]}" for name in there if "." in name]
    close = get_close_matches(entry, dict.fromkeys([*there, *anywhere]), 3)
    said = f"Close to it: {', '.join(map(repr, close))}. " if close else ""
    outermost = sorted(there, key=lambda name: name.count("."))[:MOST]
    more = f" and {len(there) - MOST} more" if len(there) > MOST else ""
    return f"{said}Modules there are {', '.join(map(repr, outermost))}{more}."
