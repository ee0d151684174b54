"""What a handle prints: the choice of groups; and the note on an out-of-memory error."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence

import torch

from .._text import fold, fold_names, numberless, size
from .._torch.subclasses import plain_parts
from .._torch.tensors import address
from ..device.base import Backend
from ..engine.passes import ModelPass
from ..engine.statistics import Reason
from ..report.build import on_device
from ..schedule.plan import Plan
from .follow import GROUP, KEPT, FollowedModule, ModelState
from .steering import Steering


def describe(state: ModelState, plan: Plan, condition: str) -> str:
    """Return which groups were chosen and which of them are offloaded; it is "paused", "removed" or empty."""
    names, kinds = state.names(), state.kinds(state.order)
    shown = f" ({condition})" if condition else ""
    lines = [f"offload of {state.root.name}{shown}: {len(plan.offloaded)} of {len(names)} groups are offloaded"]
    for of_kind in fold(range(len(kinds)), kinds.__getitem__):
        offloaded = [names[k] for k in of_kind if k in plan.offloaded]
        kept = [names[k] for k in of_kind if k not in plan.offloaded]
        lines.append(f"  {kinds[of_kind[0]]}: {len(offloaded)} of {len(of_kind)} offloaded")
        lines += [f"    offloaded  {fold_names(offloaded, most=6)}"] if offloaded else []
        lines += [f"    kept       {fold_names(kept, most=6)}"] if kept else []
    if plan.recomputed:
        lines.append(f"  {len(plan.recomputed)} of {len(names)} groups are recomputed")
    if excluded := [module.name for module in state.modules if module.role is KEPT]:
        lines.append(f"  keep: {fold_names(excluded, most=6)}")
    if plan.because:
        lines.append(f"  {plan.because}")
    return "\n".join(lines)


def coverage_warning(state: ModelState) -> str | None:
    """Return a warning if the groups cover less than half of what the latest forward saved, else None."""
    latest = state.log.full
    coverage = None if latest is None else latest.report.coverage
    if latest is None or coverage is None or coverage >= 0.5:
        return None
    skipped = [group.name for group in state.groups if group.name not in latest.names]
    because = "it is saved by the code of the model's own forward or by gradients in it."
    if skipped:
        because = f"{fold_names(skipped)} were not called. If the model uses them by a method, call `block(x)`."
    return (
        f"The groups of this {state.root.name} cover {coverage:.0%} of what its forward saves. The rest is "
        f"kept, because {because}"
    )


# Errors

TITLE = "actoffload: "
LARGE = 0.1  # of the memory in use: from here on a part is worth advice
MOST = 4  # lines of groups
WIDE = 5  # outputs by inputs of a linear module, from which on it is a head with logits


def what_holds_memory(
    state: ModelState, done: ModelPass | None, calls: Sequence[FollowedModule], steering: Steering
) -> Iterator[str]:
    """Yield the lines of a note on an out-of-memory error: what holds the memory, and what would help.

    `done` is the pass, None in a forward that is not followed; `calls` are those in progress in this thread.
    """
    model, plan, backend = state.root.module, steering.plan(), state.engine.backend
    again = {plan.names[k] for k in (*plan.offloaded, *plan.recomputed)}
    kept = {name: nbytes for name, nbytes in zip(plan.names, plan.nbytes, strict=False) if name not in again}
    saved, outside, refused, replayed = kept, 0, 0, bool(plan.recomputed)
    if done is not None:
        replayed = any(layer.recomputed is not None for layer in done.layers)
        with done.lock:
            layers = list(zip(state.names(done.order.started), done.layers, strict=False))
            # In a pass that is followed in part, kept groups are not.
            saved = {name: max(on_device(layer), kept.get(name, 0) if done.partly else 0) for name, layer in layers}
            refused = sum(each.nbytes for _, layer in layers for each in layer.living() if each.refused)
            # What was saved since the last group is not counted yet.
            outside = done.kept_outside.get(Reason.OUTSIDE, [0, 0])[1] + on_device(done.between)

    # What holds the memory
    weights, in_groups = [*model.parameters(), *model.buffers()], "saved tensors of groups"
    parts = {
        "weights and buffers": _nbytes(backend, weights),
        "gradients": _nbytes(backend, (weight.grad for weight in weights if weight.grad is not None)),
        "optimizer states": _nbytes(backend, _states({id(weight) for weight in weights})),
        in_groups: sum(saved.values()),
        "saved tensors outside of groups": outside,
    }
    known, limit = sum(parts.values()), backend.memory_limit()
    used = backend.in_use() or known
    parts["everything else: temporary tensors, inputs, what the program keeps"] = max(used - known, 0)
    where = f"in the forward of {calls[-1].name}" if calls else "in backward"
    yield f"{TITLE}{size(used)}{f' of {size(limit)}' if limit else ''} were in use {where}:"
    for name, nbytes in parts.items():
        if nbytes:
            yield f"  {size(nbytes)}: {name}"
        if name == in_groups:
            rows = fold(((name, own) for name, own in saved.items() if own), lambda row: (numberless(row[0]), row[1]))
            largest = sorted(rows, key=lambda row: -len(row) * row[0][1])
            for row in largest[:MOST]:
                yield f"    {size(row[0][1])}{' each' if len(row) > 1 else ''}: {fold_names([each for each, _ in row])}"
            if len(largest) > MOST:
                yield f"    {size(sum(own for row in largest[MOST:] for _, own in row))}: other groups"

    # What would help
    yield "What would help:"
    if steering.next_choice:
        yield f"- {steering.next_choice}"
    elif parts[in_groups] >= LARGE * used and not replayed:
        most = size(parts[in_groups])
        yield f"- recompute=True: most of {most} would not be saved, and backward runs the operators again."
    if refused:
        found = f"the host had no page-locked memory for {size(refused)}"
        yield f"- {found}: a larger max_host_bytes, or more free host memory; it takes as many bytes there."
    head = _head(model) if calls and done is not None and calls[-1].role is not GROUP else ""
    if head:
        yield (
            f"- no group ran, so the logits of `{head}` may be the peak: a loss that does not keep them all, such as "
            "use_liger_kernel=True of the Trainer, at nearly no cost."
        )
    if outside >= LARGE * used:
        yield (
            f"- torch.utils.checkpoint around what no group covers, or its modules in layers: up to "
            f"{size(outside)} less, and these parts run again in backward."
        )
    less = (parts[in_groups] + outside) // 2
    half = f"at least {size(less)} less" if less else "half of what a step allocates"
    yield f"- half the batch with twice the gradient accumulation: {half}, at some throughput."


def _nbytes(backend: Backend, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors on the device, those of local shards where they are sharded."""
    parts = [part for tensor in tensors for part in plain_parts(tensor) if part.device.type == backend.type]
    return sum({address(part.untyped_storage()): part.untyped_storage().nbytes() for part in parts}.values())


def _states(weights: set[int]) -> Iterator[torch.Tensor]:
    """Yield the states of all optimizers of these weights."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            for weight, state in getattr(found, "state", {}).items():
                if id(weight) in weights:
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _head(model: torch.nn.Module) -> str:
    """Return the name of the linear module with the most outputs, if they are many more than its inputs."""
    linear = [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    wide = [(each.out_features, name) for name, each in linear if each.out_features >= WIDE * each.in_features]
    return max(wide)[1] if wide else ""
