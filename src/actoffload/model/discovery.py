"""The groups of a model, chosen by what its modules save in a forward.

[Note: groups from measurement]
The first forward that builds a graph follows every module of the model (`candidates`), except what lies inside of
repeated or compiled blocks.  Where an inner module runs, the outer one is suspended, so each saved byte belongs to the
innermost followed module.  `measure` collects these bytes, and which module ran inside of which: calls count, not
names, because a forward may call the children of a module that it never calls itself.  `choose_groups` then walks from
the outermost modules inwards:

- If the repeated blocks of `find_stacks` save nearly everything, only they are walked through.
- A module that saves at most one eighth of all, or that is one of three or more that save about the same, is a group.
  A repeated block is a group up to three eighths: the blocks of a U-Net save very different amounts, and divided into
  convolutions, norms and activations the largest of them would be more groups than all others together.
- A larger one is divided into the modules inside of it.  If these do not save nearly all of it, it is a group as well:
  its own stretches, between the calls of the inner ones, are parts of that group.
- A module that saves next to nothing is no group; what it saves belongs to the module around it.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

from torch.jit import ScriptModule
from torch.nn import Module

from .._torch.modules import PARAMETRIZATIONS, is_compiled
from .._warnings import warn
from ..engine.passes import ModelPass
from ..engine.statistics import Reason
from ..report.build import PassStatistics, count_pass
from ..report.report import GroupReport
from ..schedule.execution_order import GroupKey, Roles
from .follow import DROPPED, GROUP, KEPT, ROOT, FollowedModule, ModelState
from .select import (
    CONTAINERS,
    Chosen,
    Names,
    block_type,
    children,
    choose,
    choose_kept,
    runs,
    shapes,
    split_default,
    unwrap,
    with_wrapped,
)
from .steering import PassSettings

__all__ = [
    "BLOCK",
    "MODULE",
    "Finder",
    "Measured",
    "candidates",
    "choose_groups",
    "coverage_warning",
    "find_groups",
    "followed_modules",
    "measure",
]


BLOCK, MODULE = "layer", "module"  # kinds of candidates: a repeated block, and any other module

ENOUGH = 0.8  # share of all saved bytes that groups cover where that is possible
_NEARLY = 0.85  # share of a module's bytes that the modules inside of it save if they replace it
_ALIKE = 3  # number of modules that are alike from which on they are not divided
_FEW, _MANY = 4, 128  # number of groups
_LEAST = 500  # a group saves at least this part of all
_BLOCK = 3  # how many times larger than another group a repeated block may be
# Largest and smallest part of all that a group saves; the later pairs are for models that the first does not fit.
_SIZES = ((8, _LEAST), (16, _LEAST), (32, _LEAST), (64, _LEAST), (8, 100), (64, 20 * _LEAST))


# Before the first forward


def find_groups(
    names: Names, layers: Any, keep: Any, *, by_blocks: bool
) -> tuple[tuple[Chosen, ...], tuple[Chosen, ...], bool]:
    """Return the modules that may be groups, those that are kept, and whether the first forward chooses.

    They are what ``layers`` and ``keep`` of `offload` mean in a model, or a stage of a pipeline.  Where `by_blocks`,
    repeated blocks are groups as they are; else the first forward shows what is divided.
    """
    kept = choose_kept(names, keep)
    default, others = split_default(layers)
    searching = default and not (by_blocks and names.stacks)
    named = choose(names, others if searching else layers) if others or not searching else ()
    chosen = candidates(names, named, kept) if searching else named
    if not chosen and kept and candidates(names):
        raise ValueError(
            f"keep names all modules of this {names.title} that could be offloaded: leave some of them out of keep."
        )
    if not chosen:
        raise ValueError(f"This {names.title} has no modules inside that could be offloaded.")
    both = {each.name for each in kept} & {each.name for each in chosen}
    if both:
        raise ValueError(f"The module '{min(both)}' is chosen by layers and by keep: take it out of one of them.")
    return chosen, kept, searching


def followed_modules(root: Module, groups: Iterable[Chosen], kept: Iterable[Chosen] = ()) -> list[FollowedModule]:
    """Return the modules to follow: the model, its groups and the modules that are kept."""
    return [
        FollowedModule(ROOT, type(root).__name__, weakref.ref(root)),
        *(FollowedModule(GROUP, each.name, weakref.ref(each.module), k, each.kind) for k, each in enumerate(groups)),
        *(FollowedModule(KEPT, each.name, weakref.ref(each.module)) for each in kept),
    ]


def candidates(names: Names, named: Iterable[Chosen] = (), kept: Iterable[Chosen] = ()) -> tuple[Chosen, ...]:
    """Return the modules to follow in the first forward, in registration order; the model itself is none.

    Modules that were `named` are groups in any case, and keep their kinds.  Modules that are `kept`, and those inside
    of them, are followed only if they are named.
    """
    blocks = {block for stack in names.stacks for block in stack}
    whole, left_out = _repeated(blocks), {each.module for each in kept if each.name}
    found = dict[str, str]()
    closed: tuple[str, ...] = ()  # what names begin with inside of a module that is not divided
    compiled: tuple[str, ...] = ()  # and inside of compiled code
    for name, module in names.modules.items():
        if name.startswith(closed):  # [guard: modules inside of repeated blocks]
            continue
        inside = (f"{name}." if name else "",)
        scripted = any(isinstance(each, ScriptModule) for each in with_wrapped(module))
        # [guard: kept modules]
        if module in left_out or scripted or name.rpartition(".")[2] == PARAMETRIZATIONS:
            closed = inside
            continue
        block = module in blocks
        if name and runs(module) and (block or not name.startswith(compiled)):  # [guard: modules in compiled code]
            found.setdefault(names.first[module], BLOCK if block else MODULE)
        if module in whole:
            closed = inside
        if not compiled or not name.startswith(compiled):
            compiled = inside if any(map(is_compiled, with_wrapped(module))) else ()
    named = [each for each in named if found.get(each.name) != BLOCK]  # [guard: named modules]
    return names.chosen(found | {each.name: each.kind for each in named})


def _repeated(blocks: Iterable[Module]) -> set[Module]:
    """Return blocks of which three or more have parameters of the same shapes: they will not be divided.

    A block that holds a list of modules with modules inside may be a stage, and stages save different numbers of bytes:
    they may be divided.  An MLP in a `Sequential` is no stage.
    """
    alike = defaultdict[tuple[object, ...], list[Module]](list)
    for block in blocks:
        lists = [each for each in children(unwrap(block)) if isinstance(each, CONTAINERS)]
        if not any(children(unwrap(child)) for each in lists for child in children(each)):
            alike[(block_type(block), shapes(block))].append(block)
    return {block for same in alike.values() if len(same) >= _ALIKE for block in same}


# In the first forward


@dataclass(slots=True)
class Measured:
    """What one followed module saved in a forward, in bytes, those inside of it excluded."""

    name: str
    saved: int
    around: tuple[str, ...] = ()  # the followed modules inside of which it ran each time, outermost first
    type: object = None
    block: bool = False

    @property
    def parent(self) -> str | None:
        """The innermost module around it."""
        return self.around[-1] if self.around else None


def measure(calls: Iterable[tuple[Chosen | FollowedModule, Sequence[str], int]]) -> list[Measured]:
    """Return the modules that ran, in the order of their first calls.

    Parameters
    ----------
    calls : iterable of tuple
        For each stretch of a call between those of others: the module, the names of the modules in whose calls it ran,
        outermost first, and the bytes that it saved itself.
    """
    found: dict[str, Measured] = {}
    for followed, around, nbytes in calls:
        if followed.name not in found:
            # Leaves in a Sequential repeat too, but they are no reason to divide the module around them.
            block = followed.kind == BLOCK and bool(children(unwrap(followed.module)))
            found[followed.name] = Measured(followed.name, 0, tuple(around), block_type(followed.module), block)
        measured = found[followed.name]
        measured.saved += nbytes
        same = takewhile(lambda pair: pair[0] == pair[1], zip(measured.around, around, strict=False))
        measured.around = tuple(name for name, _ in same)  # [guard: module that runs in several others]
    return list(found.values())


# After it


def choose_groups(modules: Sequence[Measured], outside: int = 0, named: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the modules that together cover what a forward saved, in the order of `modules`.

    Parameters
    ----------
    modules : sequence of Measured
        The modules that ran, in the order of their first calls, so that each comes after its parent.
    outside : int
        Bytes that were saved outside of all these.
    named : collection of str
        Modules that are groups in any case, if they saved anything.

    Examples
    --------
    >>> from actoffload.model.discovery import Measured, choose_groups
    >>> mixed = [Measured("stem", 5), *(Measured(f"stage.{k}", 20) for k in range(4)), Measured("norm", 0)]
    >>> choose_groups(mixed)
    ('stem', 'stage.0', 'stage.1', 'stage.2', 'stage.3')
    """
    tree = _Tree(modules)
    everything = tree.inside + outside
    blocks = [
        measured for measured in modules if measured.block and not any(each.block for each in tree.parents(measured))
    ]
    in_blocks = sum(tree.total[measured.name] for measured in blocks)
    starts = [tree.children[None]]
    if in_blocks >= min(ENOUGH * everything, max(tree.inside - 0.05 * everything, ENOUGH * tree.inside)):
        starts.insert(0, blocks)

    def fit(names: Collection[str]) -> tuple[float, bool]:
        share = tree.covered(names) / everything if everything else 1.0
        return round(min(share, ENOUGH), 2), _FEW <= len(names) <= _MANY

    # Of choices that fit equally well, the first.
    chosen = max((tree.divide(start, *sizes) for start in starts for sizes in _SIZES), key=fit)
    return tuple(
        measured.name
        for measured in modules
        if measured.name in chosen or (measured.name in named and tree.total[measured.name])
    )


class _Tree:
    """The modules of one forward, each inside of its parent."""

    def __init__(self, modules: Sequence[Measured]) -> None:
        self.by_name = {measured.name: measured for measured in modules}
        self.total = {measured.name: measured.saved for measured in modules}
        self.children = defaultdict[str | None, list[Measured]](list)
        self.holds_blocks = set[str]()
        for measured in reversed(modules):
            self.children[measured.parent].insert(0, measured)
            if measured.parent is not None:
                self.total[measured.parent] += self.total[measured.name]
                if measured.block or measured.name in self.holds_blocks:
                    self.holds_blocks.add(measured.parent)
        self.inside = sum(self.total[measured.name] for measured in self.children[None])
        self.of_type = defaultdict[object, list[int]](list)
        for measured in modules:
            self.of_type[measured.type].append(self.total[measured.name])

    def parents(self, measured: Measured) -> Iterable[Measured]:
        """Yield the modules around one, the innermost first."""
        while measured.parent is not None:
            measured = self.by_name[measured.parent]
            yield measured

    def covered(self, names: Collection[str]) -> int:
        """Return the number of bytes that these save, those inside of them included, each counted once."""
        chosen = (self.by_name[name] for name in names)
        return sum(
            self.total[measured.name]
            for measured in chosen
            if not any(each.name in names for each in self.parents(measured))
        )

    def divide(self, start: Iterable[Measured], largest: int, smallest: int) -> set[str]:
        """Return the groups that cover these modules: of at most 1 / `largest` and at least 1 / `smallest` of all."""
        return set().union(
            *(self._cover(measured, self.inside / largest, self.inside / smallest) for measured in start)
        )

    def _cover(self, measured: Measured, largest: float, smallest: float) -> set[str]:
        total, inner = self.total[measured.name], self.children[measured.name]
        if not total or total < smallest:  # [guard: modules that save nothing]
            return set()
        most = _BLOCK * largest if measured.block else largest  # [guard: large repeated block]
        if not inner or (measured.name not in self.holds_blocks and (total <= most or self._alike(measured))):
            return {measured.name}
        found = set[str]().union(*(self._cover(each, largest, smallest) for each in inner))
        share = self.covered(found) / total
        if share >= _NEARLY:
            return found
        # [guard: outer module beside those inside of it]
        return {measured.name, *found} if share > 1 - _NEARLY else {measured.name}

    def _alike(self, measured: Measured) -> bool:
        """Return whether a module is one of three or more of a type that save about the same."""
        total = self.total[measured.name]
        same = sum(0.9 * total <= other <= 1.1 * total for other in self.of_type[measured.type])
        return same >= _ALIKE


# What is not covered


def coverage_warning(
    title: str, modules: Sequence[Measured], groups: Collection[str], outside: int, skipped: Sequence[str] = ()
) -> str | None:
    """Return a warning if the groups that were found cover less than half of the saved bytes, else None.

    `outside` are bytes that were saved outside of all followed modules.  Blocks that were `skipped` were not called:
    the model may use them by another method.
    """
    tree = _Tree(modules)
    covered, saved = tree.covered({measured.name for measured in modules} & set(groups)), tree.inside + outside
    if 2 * covered >= saved:
        return None
    share = covered / saved
    rest = f"The groups of this {title} cover {share:.0%} of what its forward saves. The rest is kept"
    if skipped:
        more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        return f"{rest}: '{skipped[0]}'{more} were not called. If the model uses them by a method, call `block(x)`."
    return (
        f"{rest}, because it is saved outside of the calls of its modules: by the code of the model's own forward or "
        "by gradients in it."
    )


# The forward in which the groups are chosen

SEARCH = "This first pass offloads all groups: it shows what each module saves, from which the groups are chosen."

Call: TypeAlias = tuple[int, int]
"""A call of a followed module: a number, and the module's group."""


class Finder:
    """Follow every module that may be a group in one forward, and choose the groups.

    Groups of another kind than those that were found by default were named by the program, and stay groups.

    Attributes
    ----------
    guesses : bool
        Whether no blocks are known, so that all modules may be groups.
    """

    def __init__(self, state: ModelState, *, guesses: bool = False) -> None:
        self._state, self.guesses = state, guesses
        # Where blocks are all that there is, their schedule is known.
        self._searches = any(followed.kind == MODULE for followed in state.groups)

    def settings(self, settings: PassSettings) -> PassSettings:
        """Return how a forward of the model is followed in which the groups are found."""
        if not self._searches:
            return settings
        roles = Roles.offload_all()
        return replace(settings, order=(), roles_of=lambda order: roles)

    def found(self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]) -> list[FollowedModule]:
        """Choose the groups by what the modules saved; return the modules that are none."""
        state, paths, latest = self._state, _paths(sequence), count_pass(done, sequence)
        chosen = self._choose(paths, latest)
        dropped = [followed for followed in state.groups if followed.name not in chosen]
        for followed in dropped:
            followed.role = DROPPED
        runs = list(_runs(paths, {followed.group for followed in state.groups if followed.role is not DROPPED}))
        state.plans.learn([run[1] for run in dict.fromkeys(runs) if run is not None])
        because = SEARCH if self._searches else ""
        state.log.take(replace(_regrouped(latest, runs), because=because), sequence)
        return dropped

    def _choose(self, paths: Sequence[Sequence[Call]], latest: PassStatistics) -> set[str]:
        """Return the names of the groups; warn if they are not most of the model."""
        groups, rows = self._state.groups, latest.groups
        modules = measure(
            (
                groups[path[-1][1]],
                [groups[group].name for _, group in path[:-1]],
                row.activation_bytes + layer.remade_bytes,
            )
            for path, (layer, row) in zip(paths, rows, strict=True)
        )
        others: dict[Reason, tuple[int, int]] = {
            reason: each for reason, each in (latest.outside or {}).items() if reason is not Reason.KEPT
        }
        outside = GroupReport("outside", kept=others).activation_bytes
        named = {group.name for group in groups if group.kind not in (BLOCK, MODULE)}
        chosen = {*choose_groups(modules, outside, named)}
        blocks = {group.name: group for group in groups if group.kind == BLOCK}
        if not chosen.isdisjoint(blocks):  # a block that was skipped, or dropped its path, saves something another time
            ran = {groups[path[-1][1]].name for path, (layer, _) in zip(paths, rows, strict=True) if layer.no_graph}
            chosen |= blocks.keys() - ran
        called = {measured.name for measured in modules}
        # [guard: group that was replaced before the first forward]
        skipped = [name for name, group in blocks.items() if name not in called and group.ref() is not None]
        warning = coverage_warning(self._state.root.name, modules, chosen, outside, skipped)
        if warning is not None:
            warn(warning)
        return chosen


def _paths(sequence: Sequence[GroupKey]) -> list[tuple[Call, ...]]:
    """Return for each part of a sequence the calls that are in progress there, outermost first.

    A call that goes on was around all since its part before.
    """
    paths = list[tuple[Call, ...]]()
    calls = list[tuple[int, GroupKey]]()  # in progress, seen from the end
    for number, key in enumerate(reversed(sequence)):
        if not calls or calls[-1][1] != GroupKey(key.group, key.part + 1):
            calls.append((number, key))
        calls[-1] = calls[-1][0], key
        paths.append(tuple((call, each.group) for call, each in calls))
        if not key.part:
            calls.pop()
    return paths[::-1]


def _runs(paths: Sequence[Sequence[Call]], groups: Collection[int]) -> Iterator[tuple[Call, GroupKey] | None]:
    """Yield which part of which call of a group each part belongs to, if only these are followed; None outside."""
    parts = Counter[Call]()
    before: Call | None = None
    for path in paths:
        call = next((call for call in reversed(path) if call[1] in groups), None)
        if call is not None and call != before:
            parts[call] += 1
        before = call
        yield None if call is None else (call, GroupKey(call[1], parts[call] - 1))


def _regrouped(latest: PassStatistics, runs: Sequence[tuple[Call, GroupKey] | None]) -> PassStatistics:
    """Return what a pass did as if only some of its groups had been followed."""
    outside = dict(latest.outside or {})
    places = [k for k, run in enumerate(runs) if run is not None]
    rows, before = [], None
    for run, (layer, row) in zip(runs, latest.groups, strict=True):
        if run is not None:
            rows.append((layer, replace(row, calls=int(run != before))))
        elif row.activation_bytes:
            count, nbytes = outside.get(Reason.OUTSIDE, (0, 0))
            outside[Reason.OUTSIDE] = count + row.storages, nbytes + row.activation_bytes
        before = run
    held = [each._replace(place=places.index(each.place)) for each in latest.held if each.place in places]
    sequence = tuple(run[1] for run in runs if run is not None)
    return replace(latest, groups=tuple(rows), held=tuple(held), outside=outside, sequence=sequence)
