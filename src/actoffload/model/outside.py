"""Patterns to add to the argument ``layers``: the modules outside of the groups that save most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

from torch.nn import Module

from .module_names import CONTAINERS, Named, Names, block_type, children, runs, unwrap

__all__ = ["patterns", "written"]

COVERS = 0.85  # of the bytes of a module: what its parts must save to be chosen in its place
LARGE = 1 / 8  # of all bytes: above this a module is divided into parts, if they cover it
FEW = 3  # largest number of modules that are alike and are divided too

Family: TypeAlias = tuple[Named, ...]  # modules whose names differ in numbers only


def patterns(root: Module, saved: Mapping[Module, int], everything: int, groups: Set[Module]) -> dict[str, int]:
    """Return the modules that save most outside of the groups, with their bytes, most first.

    A key is a name, several with commas between, or a pattern, which matches no others but groups and modules that save
    as well.  `saved` has the bytes by the innermost module that saved them; `everything` is the size of all activations
    in bytes.
    """
    names = Names(root)
    by_name = {named.full: named for named in names.first.values()}
    sums = Counter[str]()
    for module, nbytes in saved.items():
        if module in names.first and module is not root:
            sums.update(dict.fromkeys(_above(names.first[module].full, by_name), nbytes))
    found = Counter[str]()
    for family in _families([by_name[name] for name in sums], ""):
        for chosen in _parts(family, [by_name[name] for name in sums], sums, everything):
            found.update(_patterns(names, chosen, sums, groups))
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _above(name: str, by_name: Mapping[str, Named]) -> list[str]:
    """Return a name and those of the modules around it that have a forward; the root excepted."""
    parts = name.split(".")
    around = (".".join(parts[: k + 1]) for k in range(len(parts)))
    return [name for name in around if name in by_name and runs(unwrap(by_name[name].module))]


def _families(modules: Sequence[Named], inside: str) -> list[Family]:
    """Return the outermost modules, or those in a module, in families."""
    families: dict[str, list[Named]] = {}
    for named in sorted(modules, key=lambda named: named.full.count(".")):
        around = (other.full for family in families.values() for other in family)
        if named.full.startswith(inside) and not any(named.full.startswith(f"{name}.") for name in around):
            families.setdefault(re.sub(r"\d+", "*", named.clean), []).append(named)
    return [family for alike in families.values() for family in _of_one_class(alike)]


def _of_one_class(alike: Sequence[Named]) -> list[Family]:
    """Return modules with names alike as one family, without those of a class of which there is only one."""
    count = Counter(block_type(named.module) for named in alike)
    several = tuple(named for named in alike if count[block_type(named.module)] > 1)
    return [*([several] if several else []), *((named,) for named in alike if named not in several)]


def _parts(family: Family, modules: Sequence[Named], sums: Mapping[str, int], everything: int) -> list[Family]:
    """Return a family, or the families in its members if these are large and the parts cover them."""
    nbytes = [sums[named.full] for named in family]
    if len(family) > FEW and max(nbytes) <= LARGE * everything:
        return [family]
    inner: dict[str, list[Named]] = {}
    for named in family:
        for part in _families(modules, f"{named.full}."):
            inner.setdefault(re.sub(r"\d+", "*", part[0].clean), []).extend(part)
    found = [
        part
        for alike in inner.values()
        for each in _of_one_class(alike)
        for part in _parts(each, modules, sums, everything)
    ]
    several = sum(sums[named.full] for part in found if len(part) > 1 for named in part)
    return found if several >= (COVERS if len(family) > 1 else 0.5) * sum(nbytes) else [family]


def _patterns(names: Names, family: Family, sums: Mapping[str, int], groups: Set[Module]) -> dict[str, int]:
    """Return patterns for a family: one with stars, or one for each number of digits, or else the names."""
    for digit, sign in ((r"\d+", "*"), (r"\d", "[0-9]")):
        parts: dict[str, list[Named]] = {}
        for named in family:
            pattern = re.sub(digit, sign, named.clean) if len(family) > 1 else named.clean
            parts.setdefault(pattern, []).append(named)
        if all(_means(names, pattern, part, sums, groups) for pattern, part in parts.items()):
            break
    else:
        parts = {", ".join(named.clean for named in family): list(family)}
    return {pattern: sum(sums[named.full] for named in part) for pattern, part in parts.items()}


def _means(names: Names, pattern: str, family: Sequence[Named], sums: Mapping[str, int], groups: Set[Module]) -> bool:
    """Whether a pattern matches the modules of a family, and no others but groups and modules that save as well."""
    if len(family) == 1:
        return pattern == family[0].clean or [named.module for named in names.matching(pattern)] == [family[0].module]
    found, needed = {named.module for named in names.matching(pattern)}, {named.module for named in family}
    return needed <= found and all(module in groups or names.first[module].full in sums for module in found)


def written(root: Module, given: Any) -> list[Any] | None:
    """Return the entries of ``layers`` or ``keep`` as strings, classes and ``...``; None for None."""
    if given is None:
        return None
    names = Names(root)
    if isinstance(given, CONTAINERS) and given not in names.first:
        given = children(given)
    entries = [given] if isinstance(given, (str, Module, type)) or given is ... else list(given)
    return [names.first[entry].clean if isinstance(entry, Module) else entry for entry in entries]
