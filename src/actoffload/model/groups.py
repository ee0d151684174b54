"""The groups of a model: its repeated blocks and modules beside them, or what `layers`, `keep` and `plan` mean.

[Note: blocks, stages and parts]
A *list* is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with two composite children of one type, or, as in the
stage of a pipeline, with a single one.  Lists are nested, and the question is at which depth the blocks are.  Lists
inside a block are its parts: experts, heads, branches.  Lists inside a *stage* hold the blocks: Swin, ConvNeXt.

Blocks are copies of each other, so two of them have parameters of the same shapes.  Stages differ in width or depth.
The search goes from the outside in.  It takes the first list that it meets and does not search its blocks.  If no two
of the members are alike, and half of them hold a list of blocks that are, these are stages: then the search goes on
inside, and what lies between them, such as a convolution that halves the resolution, is a block of its own.

Where no list has composite blocks, a ``ModuleList`` or ``ModuleDict`` of leaves counts.

[Note: modules beside the blocks]
What a module saves is not known before the first forward, so leaves are counted: modules without children.

- If all blocks of a type have the same width, and four of five leaves are in blocks, the blocks are all groups: the
  embedding, the last norm and the head of a transformer save less than one block.
- Otherwise the modules beside the blocks are groups, too: the stem of a ResNet may save as much as all of its blocks.
  Each is the outermost module that has no block inside and at most one eighth of all leaves; a larger one is divided
  into its children.  So a model without repeated blocks has groups.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import DataParallel, Module, ModuleDict, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .._text import fold_names, name_pattern
from .._torch.modules import PARAMETRIZATIONS, WRAPPED_AS, is_compiled, registered
from .._warnings import warn
from .follow import GROUP, KEPT, ROOT, WHOLE, FollowedModule

CONTAINERS = (ModuleList, ModuleDict, Sequential)


# Modules and wrappers


def inner_name(module: Module) -> str | None:
    """Return the attribute under which a wrapper holds its module; None for what is no wrapper.

    Wrappers are those of data parallelism, ``torch.compile``, activation checkpointing and the older FSDP.
    """
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    return next((name for name in WRAPPED_AS if registered(module)[2].get(name) is not None), None)


def with_wrapped(module: Module) -> Iterator[Module]:
    """Yield a module and, if it is a wrapper, what it wraps."""
    yield module
    while (name := inner_name(module)) is not None:
        module = module.get_submodule(name)
        yield module


def unwrap(module: Module) -> Module:
    """Return the module inside of all wrappers."""
    *_, inner = with_wrapped(module)
    return inner


def block_type(module: Module) -> type[Module]:
    """Return the class of the module inside of all wrappers."""
    return type(unwrap(module))


def children(module: Module) -> list[Module]:
    """Return the children in registration order, without parametrizations; one may be there twice."""
    return [child for name, child in registered(module)[2].items() if child is not None and name != PARAMETRIZATIONS]


def runs(module: Module) -> bool:
    """Return whether a module has a forward; a ``ModuleList`` has none and is never called."""
    return getattr(module.forward, "__func__", None) is not Module.forward  # a compiled module sets one on itself


def shapes(module: Module) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    """Return the names and shapes of the parameters of a module; None is the shape of a lazy one."""
    return tuple((name, None if is_lazy(p) else tuple(p.shape)) for name, p in module.named_parameters())


# Repeated blocks


def find_stacks(root: Module) -> list[tuple[Module, ...]]:
    """Return the lists of repeated blocks of a model, each block once; see [Note: blocks, stages and parts]."""
    for leaves in (False, True):  # blocks with children, or without
        stacks, visited, pending = list[tuple[Module, ...]](), set[Module](), [root]
        while pending:
            module = pending.pop()
            if module in visited:
                continue
            visited.add(module)
            blocks = [each for each in _members(module, leaves=leaves) if runs(each)]
            stages = [each for each in blocks if _is_stage(each)]
            if 2 * len(stages) >= len(blocks) and not _two_alike(blocks):  # [guard: stages, which are no blocks]
                blocks = [each for each in blocks if each not in stages]
            if blocks:
                stacks.append(tuple(dict.fromkeys(blocks)))
            pending += (child for child in reversed(children(module)) if child not in blocks)
        if stacks:
            break
    return stacks


def _is_stage(module: Module) -> bool:
    """Return whether a module is a list with two equal blocks, or holds one directly."""
    inner = unwrap(module)
    return any(_two_alike(_members(each)) for each in (inner, *map(unwrap, children(inner))))


def _members(module: Module, *, leaves: bool = False) -> list[Module]:
    """Return the composite children, or `leaves`, that make a module a list; none of other modules."""
    if not isinstance(module, (ModuleList, ModuleDict) if leaves else CONTAINERS):
        return []
    fit = (each for each in children(module) if bool(children(unwrap(each))) is not leaves)
    found = [each for each in fit if any(True for _ in each.parameters())]
    alone = len(found) == 1 and not (leaves or isinstance(module, Sequential))
    return found if alone or len(set(map(block_type, found))) < len(found) else []


def _two_alike(modules: Iterable[Module]) -> bool:
    """Return whether two of these have parameters of the same names and shapes, or are the same."""
    found = list(map(shapes, modules))
    return len(set(found)) < len(found)  # [guard: blocks that are alike -> False]


# The groups

BLOCK, MODULE = "layer", "module"  # kinds of groups: a repeated block, and a module beside the blocks

_ENOUGH = 0.8  # share of all leaves that blocks have if they are all groups
_LARGEST = 8  # a module beside the blocks has at most this part of all leaves


def default_groups(
    root: Module, kept: Iterable[Module] = (), named: Collection[Module] = ()
) -> Iterator[tuple[Module, str]]:
    """Yield the groups of a model without ``layers``, each with its kind: `BLOCK`, or `MODULE` beside the blocks.

    Modules that are `kept`, and those inside of them, are none.  Modules that are `named` are groups in any case:
    nothing beside the blocks contains them or lies inside of them.
    """
    left_out = {inner for module in kept for inner in module.modules()}
    blocks = {block for stack in find_stacks(root) for block in stack} - left_out
    largest, in_blocks = len(_leaves([root])) / _LARGEST, len(_leaves(blocks))
    # Parameters of one name have the same shape in all blocks of a type.
    known = {(block_type(block), name, shape) for block in blocks for name, shape in shapes(block)}
    same_width = len(known) == len({(kind, name) for kind, name, _ in known})
    only_blocks = same_width and in_blocks >= _ENOUGH * _LARGEST * largest
    chosen, visited = {*blocks, *named, *left_out}, set[Module]()
    pending = [(root, not only_blocks)]
    while pending:
        module, beside = pending.pop()
        scripted = any(isinstance(each, ScriptModule) for each in with_wrapped(module))
        if module in visited or module in left_out or scripted:  # [guard: kept modules]
            continue
        visited.add(module)
        if module in blocks:
            yield module, BLOCK
            continue
        compiled, inside = any(map(is_compiled, with_wrapped(module))), children(unwrap(module))
        holds_chosen = not chosen.isdisjoint({*module.modules()} - {module})
        large = bool(inside) and not compiled and len(_leaves([module])) > largest
        if module is root or module in named or holds_chosen or large or not runs(module):
            beside = beside and not compiled and module not in named  # [guard: modules in compiled code]
            pending += ((child, beside) for child in inside)
        elif beside:
            yield module, MODULE


def _leaves(modules: Iterable[Module]) -> set[Module]:
    """Return the modules without children inside of others."""
    return {inner for module in modules for inner in module.modules() if not children(inner)}


# Names

MOST = 8  # modules that an error names
_EXPECTED = "a dotted path or glob pattern, a module, a module type, or an iterable of these"


class Names:
    """The names of the modules of a model; a wrapper has the name of what it wraps, and stands for it.

    Of a `part` of a model, `missing` gets the entries of arguments that mean nothing here, with the reasons.
    """

    def __init__(self, root: Module, *, part: bool = False) -> None:
        self.root, self.title, self.part = root, block_type(root).__name__, part
        self.missing: dict[str, str] = {}
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

    def outermost(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """Return the names of modules that are not inside of others among them, in registration order."""
        found = list[str]()
        for name in self.modules:  # a module is followed by those in it
            if name in kinds and not (found and name.startswith(found[-1] and f"{found[-1]}.")):
                found.append(name)
        return {name: kinds[name] for name in found}

    def chosen(self, role: str, kinds: Mapping[str, str]) -> list[FollowedModule]:
        """Return modules in registration order, each under its first name, with the kind that it has there."""
        found = ((name, module) for name, module in self.modules.items() if name in kinds)
        return [FollowedModule(role, name or WHOLE, weakref.ref(module), kind=kinds[name]) for name, module in found]


# What arguments mean


def read_entries(argument: str, given: Any) -> list[Any]:
    """Return the entries of `layers` or `keep`; raise a `TypeError` or `ValueError` for those that no model has.

    A list of modules that `layers` has alone means its children.
    """
    if argument == "layers" and isinstance(given, Module) and isinstance(unwrap(given), CONTAINERS):
        return [*children(unwrap(given))]
    single = (str, Module, type, Mapping, bytes, Tensor)
    entries = [given] if isinstance(given, single) or not isinstance(given, Iterable) else list(given)
    for entry in entries:
        if entry is ... and argument == "keep":
            raise TypeError("keep has `...`, which means the default groups of `layers`; name the modules to keep.")
        is_class = isinstance(entry, type) and issubclass(entry, Module)
        if not (is_class or isinstance(entry, (str, Module)) or entry is ...):
            raise TypeError(f"{argument} has an entry {entry!r}; expected {_EXPECTED}.")
        if entry == "":
            raise ValueError(f"{argument} has an empty name; expected {_EXPECTED}.")
    return entries


def find_modules(names: Names, layers: Sequence[Any], keep: Sequence[Any]) -> list[FollowedModule]:
    """Return the modules to follow: the model, then its groups and the modules that are kept, by entries.

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


def choose(names: Names, layers: Sequence[Any], kept: Iterable[FollowedModule] = ()) -> list[FollowedModule]:
    """Return the modules that entries of `layers` mean, in registration order, each once, and none inside of another.

    ``...`` means the default groups without those that are `kept`.  The kind of others is the pattern, the name of the
    class, or the path with ``*`` in place of indices; with the class of the module if those of one kind have several.
    The first entry that means a module decides.
    """
    default, found, meant = ... in layers, dict[str, str](), dict[str, str]()
    for name, kind in _meant(names, [entry for entry in layers if entry is not ...], "layers"):
        meant.setdefault(name, kind)  # [guard: first entry that means a module]
    if not meant and not default:
        empty = f"layers is empty; expected None for the default groups, {_EXPECTED}."
        raise ValueError(next(iter(names.missing.values()), empty))
    if default:
        without = [each.module for each in kept if each.module is not names.root]
        groups = default_groups(names.root, without, {names.modules[name] for name in meant})
        found = {names.first[module]: kind for module, kind in groups if names.first[module]}
    others = {name: kind for name, kind in meant.items() if found.get(name) != BLOCK}  # [guard: named modules]
    kinds = names.outermost(found | others)
    classes = defaultdict[str, set[str]](set)
    for name in kinds.keys() & others.keys():
        classes[kinds[name]].add(block_type(names.modules[name]).__name__)
    for name in kinds.keys() & others.keys():
        if len(classes[others[name]]) > 1:  # [guard: kinds of several classes]
            kinds[name] += f" ({block_type(names.modules[name]).__name__})"
    return names.chosen(GROUP, kinds)


def choose_kept(names: Names, keep: Sequence[Any]) -> list[FollowedModule]:
    """Return the modules that entries of `keep` mean, in registration order; a ``Sequential`` is itself here."""
    return names.chosen(KEPT, dict(_meant(names, keep, "keep")))


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


# Entries


def _meant(names: Names, entries: Iterable[Any], argument: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the modules that entries mean, with their kinds."""
    for entry in entries:
        if isinstance(entry, CONTAINERS) and entry not in names.first:
            yield from _meant(names, children(entry), argument)  # model.layers[:8] is a new list of its modules
            continue
        try:
            yield from _meaning(names, entry, argument)
        except ValueError as error:
            if not names.part:  # another part may have it
                raise
            names.missing[str(entry)] = str(error)


def _meaning(names: Names, entry: Any, argument: str) -> Iterator[tuple[str, str]]:
    """Yield the first names of the modules that an entry means, with their kinds."""
    kind: str | None = None
    opened = False  # a list means its children
    if isinstance(entry, str) and entry in names.modules:
        found, opened = [entry], argument == "layers"
    elif isinstance(entry, str):
        kind = entry
        found = [*names.outermost({name: kind for name in names.modules if name and fnmatchcase(name, kind)})]
        if not found:
            raise ValueError(f"{argument}: '{entry}' matches no module of this {names.title}. {_similar(names, entry)}")
    elif isinstance(entry, Module):
        if entry not in names.first:  # [guard: module of another model]
            raise ValueError(
                f"{argument} has a {type(entry).__name__} that is no part of this {names.title}: pass modules of the "
                "model itself, not of a copy of it or of a model around it."
            )
        found = [names.first[entry]]
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
        yield names.first[names.modules[name]], kind or name_pattern(name) or names.title
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
