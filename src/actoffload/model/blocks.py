"""The groups of a model without ``layers``: its repeated blocks, and the modules beside them.

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

from collections.abc import Collection, Iterable, Iterator

from torch.jit import ScriptModule
from torch.nn import DataParallel, Module, ModuleDict, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .._torch.modules import PARAMETRIZATIONS, WRAPPED_AS, is_compiled, registered

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


def find_stacks(root: Module) -> tuple[tuple[Module, ...], ...]:
    """Return the lists of repeated blocks of a model, each block once; see [Note: blocks, stages and parts]."""
    return _find_lists(root, leaves=False) or _find_lists(root, leaves=True)


def _find_lists(root: Module, *, leaves: bool) -> tuple[tuple[Module, ...], ...]:
    """Return the lists of composite blocks, or of blocks that are `leaves`."""
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
    return tuple(stacks)


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
