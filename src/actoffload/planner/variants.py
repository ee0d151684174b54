"""The ways to run a group: without recomputation, and with more or fewer outputs of its operators saved."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from ..schedule.costs import LayerCost, Saved

STEPS = 12  # into which the outputs of a group are divided


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One operator of a recomputed group."""

    name: str  # and how often the group has called it before, as "aten.mm.default#2"
    seconds: float  # of the device
    sizes: tuple[int, ...]  # bytes of each output; none if they cannot be saved, or are not needed
    reads: tuple[int, ...] = ()  # positions of the operators whose outputs it reads
    needed: bool = True  # by autograd; otherwise it runs again only if one reads its outputs that does
    # Bytes of the output that the group returns, or 0.  It counts as an input of the next group, which saves it anyway.
    returned: int = 0
    # Positions of the operators of which it reads results that autograd does not save: these run again with it, also
    # where other results of theirs stay.
    unsaved: tuple[int, ...] = ()
    segment: int = 0  # of the group: what one part saves is made again, used and freed before the next
    # Bytes of its saved results that are made again wherever the group is recomputed: casts of weights, and results
    # that another operator makes too.
    kept: int = 0
    gradient: int = 0  # bytes of its largest saved output, for which backward makes a gradient; 0 if it is no output
    # Bytes of its saved results that backward makes for a later segment, frees, and makes again for this one, unless
    # they are held.
    twice: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(self.sizes)

    @property
    def own(self) -> tuple[int, ...]:
        """Bytes of each output that counts in this group, if it is saved."""
        own = list(self.sizes)
        if self.returned in own:
            own.remove(self.returned)
        return tuple(own)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a group: what it costs, and which outputs are saved where it is recomputed."""

    cost: LayerCost
    saves: tuple[str, ...] | None = None  # names of operators; None for a group that is not recomputed
    held: LayerCost | None = None  # the cost if all that is made again stays until its last use; None if it is the same

    def map(self, change: Callable[[LayerCost], LayerCost]) -> Variant:
        """Return the way with its costs changed by a function."""
        return replace(self, cost=change(self.cost), held=None if self.held is None else change(self.held))


def correct_times(operators: Sequence[OperatorCost], seconds: float) -> tuple[OperatorCost, ...]:
    """Return operators with times that are right if all of them take so long together.

    Where the host is slower than the device, each waits for it while it is timed alone: all for about as long.
    """
    left = sorted((operator.seconds for operator in operators), reverse=True)
    while left and sum(left) - len(left) * left[-1] > seconds:
        left.pop()
    late = max((sum(left) - seconds) / len(left), 0.0) if left else 0.0
    return tuple([replace(operator, seconds=max(operator.seconds - late, 0.0)) for operator in operators])


def replay_ways(whole: LayerCost, operators: tuple[OperatorCost, ...]) -> tuple[Variant, ...]:
    """Return the ways to run a group, from the most bytes saved to none; the first is without recomputation.

    `whole` is the group when all of it was recomputed, with times of operators as `correct_times` makes them.

    The saved outputs of the operators are ordered by the seconds that each byte spares, so that the ways lie on a
    convex curve of bytes against seconds.  What is made again lies on the device one segment at a time; what `whole`
    needs beyond the largest segment, such as gradients, every way needs.  None needs more than `whole`, which frees a
    part within a segment.
    """
    order = _worth_in_order(operators)
    if not order:
        return (Variant(whole),)
    whole_again, total = operators_again(operators, ()), _seconds(operators)
    every = _seconds(whole_again) + _seconds(_repeated(whole_again, ()))
    largest, gradient = _transient(operators, ()), max((each.gradient for each in operators), default=0)
    # Less than a segment may lie on the device at a time, so that its bytes hide those of the gradients.
    hidden = max(whole.backward_temporary - largest, min(gradient, whole.backward_temporary - gradient), 0)
    times = list(accumulate((each.seconds for each in operators), initial=0.0))
    sums, found = list(accumulate(each.nbytes for each in order)), []
    fewer = {bisect_right(sums, sums[-1] * step / STEPS) for step in range(STEPS)} - {len(order)}
    for number in (len(order), *sorted(fewer, reverse=True)):
        names = {each.name for each in order[:number]}
        again = operators_again(operators, names)
        repeated = _repeated(again, names)
        transient = _transient(operators, names)
        backward = max(whole.backward - (every - (_seconds(again) + _seconds(repeated))), whole.forward)
        saved = list(whole.saved)
        for k, each in enumerate(operators):
            if each.name in names:
                place = times[k + 1] / total if total else (k + 1) / len(operators)
                saved += [Saved(nbytes, min(place, 1.0), max(1.0 - place, 0.0)) for nbytes in each.own]
        saved.sort(key=lambda each: each.saved_at)
        spared = whole.host_forward * (1 - len(again) / max(len(whole_again), 1))
        cost = replace(
            whole,
            backward=backward,
            saved=tuple(saved),
            host_backward=max(whole.host_backward - spared, 0.0),
            forward_temporary=min(max(whole.forward_temporary - largest, 0) + transient, whole.forward_temporary),
            backward_temporary=min(hidden + transient, whole.backward_temporary),
        )
        held = replace(
            cost,
            backward=max(backward - _seconds(repeated), whole.forward),
            backward_temporary=cost.backward_temporary + sum(each.twice for each in repeated),
            host_backward=max(cost.host_backward - whole.host_forward * len(repeated) / len(operators), 0.0),
        )
        found.append(Variant(cost, tuple(each.name for each in order[:number]), held=held if repeated else None))
    plain = replace(found[0].cost, kept_bytes=whole.kept_bytes + sum(each.kept for each in operators))
    return (Variant(plain), *(found if plain != found[0].cost else found[1:]))


def operators_again(operators: Sequence[OperatorCost], saved: Collection[str]) -> list[OperatorCost]:
    """Return the operators that run again if the outputs of some, given by name, are saved."""
    needed = [each.needed for each in operators]
    again = [False] * len(operators)
    for k in reversed(range(len(operators))):
        if again[k] or (needed[k] and operators[k].name not in saved):
            again[k] = True
            for other in operators[k].reads:
                needed[other] = True
            for other in operators[k].unsaved:
                again[other] = True
    return [each for each, runs in zip(operators, again, strict=True) if runs]


def _repeated(again: Sequence[OperatorCost], saved: Collection[str]) -> list[OperatorCost]:
    """Return those that run twice again, unless what they make is held."""
    return [each for each in again if each.twice and each.name not in saved]


def _seconds(operators: Iterable[OperatorCost]) -> float:
    return sum(each.seconds for each in operators)


def _transient(operators: Sequence[OperatorCost], saved: Collection[str]) -> int:
    """Return the bytes that are made again in the segment that makes most, if some outputs are saved."""
    segments = Counter[int]()
    for each in operators:
        if each.name not in saved:
            segments[each.segment] += each.nbytes
    return max(segments.values(), default=0)


@lru_cache(maxsize=256)  # groups are alike
def _worth_in_order(operators: tuple[OperatorCost, ...]) -> tuple[OperatorCost, ...]:
    """Return the operators with saved outputs, the one first that spares most seconds for each byte.

    What an output spares falls as others are saved, so an order by what it spared before is corrected lazily.
    """
    names: set[str] = set()
    now = _seconds(operators_again(operators, names))
    heap = [(-inf, k) for k, each in enumerate(operators) if each.nbytes]
    found = []
    while heap:
        _, k = heappop(heap)
        each = operators[k]
        spares = now - _seconds(operators_again(operators, {*names, each.name}))
        density = spares / each.nbytes
        if heap and density < -heap[0][0]:
            heappush(heap, (-density, k))
            continue
        found.append(each)
        names.add(each.name)
        now -= spares
    return tuple(found)
