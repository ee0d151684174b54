"""The ways to run a group: without recomputation, and recomputed with more or fewer outputs of operators saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from ..schedule.costs import LayerCost, Saved

__all__ = ["OperatorCost", "Variant", "replay_ways", "variants", "with_host", "within", "worth_saving"]

COSTLY = 4.0  # times the time for each byte of operators that only read and write memory
CHEAP = 0.25  # of the bytes of operators that are not known to be costly are outputs of such ones, at least
STEPS = 12  # into which the outputs that are worth saving are divided
MORE = 4  # into which the other outputs are divided


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One operator of a recomputed group.

    Parameters
    ----------
    name : str
        The operator, and how often the group has called it before, as ``aten.mm.default#2``.
    seconds : float
        Time of the device.
    sizes : tuple of int
        Bytes of each output; none if they cannot be saved, or are not needed.
    costly : bool
        Whether it is known to take much time for the bytes of its outputs.
    reads : tuple of int
        Positions of the operators whose outputs it reads.
    needed : bool
        Whether autograd needs its outputs; otherwise it runs again only if one reads them that does.
    returned : int
        Bytes of the output that the group returns; 0 if none is.  It counts as an input of the next group, which saves
        it in any case.
    unsaved : tuple of int
        Positions of the operators of which it reads results that autograd does not save: these run again with it, also
        where other results of theirs stay.
    segment : int
        The part of the group that calls it: what one part saves is made again, used and freed before the next.
    kept : int
        Bytes of its saved results that can be made again, but not be offloaded: casts of weights.
    """

    name: str
    seconds: float
    sizes: tuple[int, ...]
    costly: bool = False
    reads: tuple[int, ...] = ()
    needed: bool = True
    returned: int = 0
    unsaved: tuple[int, ...] = ()
    segment: int = 0
    kept: int = 0

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

    @property
    def density(self) -> float:
        """Seconds that a saved byte is worth."""
        return self.seconds / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a group.

    Parameters
    ----------
    cost : LayerCost
        What it costs.
    saves : tuple of str, optional
        Names of the operators whose outputs are saved where the group is recomputed; empty if all of it is run again.
        None for a group that is not recomputed.
    read_again : int, optional
        Bytes of what it saves that the weight backward of a split backward reads; None for as many as are known of the
        group without recomputation.
    """

    cost: LayerCost
    saves: tuple[str, ...] | None = None
    read_again: int | None = None


def with_host(groups: Sequence[Sequence[Variant]], factor: float) -> list[tuple[Variant, ...]]:
    """Return the ways to run groups with the times of the host multiplied by a factor.

    Where steps are short, the host decides what a plan takes: a group of which outputs of operators are saved is much
    work for it.  On a machine that others use it may be twice as slow in one step as in the next, so what one step
    showed of it says little.

    Examples
    --------
    >>> from actoffload.planner.variants import Variant, with_host
    >>> from actoffload.schedule import LayerCost
    >>> group = (Variant(LayerCost(0.010, 0.020, host_forward=0.004, host_backward=0.001)),)
    >>> [[way]] = with_host([group], 2.0)
    >>> way.cost.host_forward, way.cost.host_backward
    (0.008, 0.002)
    """

    def scaled(way: Variant) -> Variant:
        cost = way.cost
        forward, backward = factor * cost.host_forward, factor * cost.host_backward
        return replace(way, cost=replace(cost, host_forward=forward, host_backward=backward))

    return [tuple(map(scaled, group)) for group in groups]


def seconds_again(operators: Sequence[OperatorCost], saved: Collection[str]) -> float:
    """Return how long those of the operators take that run again if the outputs of some, given by name, are saved."""
    pairs = zip(operators, _again(operators, saved), strict=True)
    return sum(each.seconds for each, again in pairs if again)


@lru_cache(maxsize=256)  # groups are alike
def worth_saving(operators: tuple[OperatorCost, ...]) -> tuple[OperatorCost, ...]:
    """Return the operators whose saved outputs save much time for their bytes, the best one first.

    An output saves the time of its operator, and of those that run again for nothing else.  Matrix products,
    convolutions and attention are worth it, and what follows them cheaply; the others only read and write memory.
    """
    known = sorted((of for of in operators if of.nbytes and not of.costly), key=lambda of: of.density)
    left, floor = CHEAP * sum(of.nbytes for of in known), 0.0
    for of in known:
        floor = of.density
        left -= of.nbytes
        if left <= 0:
            break
    found = _best_first(operators, (), lambda of, density: of.costly or density >= COSTLY * floor > 0)
    now = seconds_again(operators, {of.name for of in found})
    for each in list(found):  # some are not read any more
        others = [other for other in found if other is not each]
        if seconds_again(operators, {of.name for of in others}) <= now:
            found = others
    return tuple(found)


@lru_cache(maxsize=256)
def less_worth_saving(operators: tuple[OperatorCost, ...]) -> tuple[OperatorCost, ...]:
    """Return the other operators whose saved outputs save time, the best one first."""
    return tuple(_best_first(operators, worth_saving(operators), lambda of, density: True))


def _best_first(
    operators: Sequence[OperatorCost],
    saved: Sequence[OperatorCost],
    may: Callable[[OperatorCost, float], bool],
) -> list[OperatorCost]:
    """Return operators beside those that are saved, the one first whose output saves most time for its bytes.

    `may` says of an operator, and of the seconds for each byte, whether it is taken.
    """
    known, found = [of for of in operators if of.nbytes and of not in saved], list[OperatorCost]()
    names = {of.name for of in saved}
    now = seconds_again(operators, names)
    while True:
        best, most, then = None, 0.0, now
        for of in known:
            if of.name in names:
                continue
            left = seconds_again(operators, {*names, of.name})
            density = (now - left) / of.nbytes
            if density > most and may(of, density):
                best, most, then = of, density, left
        if best is None:
            return found
        found.append(best)
        names.add(best.name)
        now = then


def within(operators: Sequence[OperatorCost], seconds: float) -> tuple[OperatorCost, ...]:
    """Return operators with times that are right if all of them take so long together.

    Where the host is slower than the device, each waits for it while it is timed alone: all for about as long.
    """
    left = sorted((of.seconds for of in operators), reverse=True)
    while left and sum(left) - len(left) * left[-1] > seconds:
        left.pop()
    late = max((sum(left) - seconds) / len(left), 0.0) if left else 0.0
    return tuple([replace(of, seconds=max(of.seconds - late, 0.0)) for of in operators])


def variants(
    plain: LayerCost,
    recomputed: LayerCost,
    operators: tuple[OperatorCost, ...] = (),
    whole: LayerCost | None = None,
) -> tuple[Variant, ...]:
    """Return the ways to run a group, from the most bytes saved to none; the first is without recomputation.

    Parameters
    ----------
    plain : LayerCost
        The group without recomputation.
    recomputed : LayerCost
        The group when it was recomputed, and the outputs of the operators that are worth it were saved.
    operators : tuple of OperatorCost
        All operators of the group, with times as `within` its forward.
    whole : LayerCost, optional
        The group when all of it was recomputed; by default what follows from the operators.

    Notes
    -----
    The outputs that take the least time for their bytes are run again first.  An output that is not saved is allocated
    for a time in forward, and again in backward; beside that, memory is as in that of `recomputed` and `whole` which
    needs more.  A further output that is saved comes on top of that: it may have been freed where most is needed.
    Forward does the same work in each, but the device may have waited for the host; in backward the host may have
    waited for copies.  A way that saves as much as the group does without recomputation is left out.
    """
    if whole is not None:  # which ran without hooks of each operator
        plain = replace(plain, host_forward=min(plain.host_forward, whole.host_forward))
        whole = _with_work_of(replace(whole, forward=plain.forward), plain)
    recomputed = _with_work_of(replace(recomputed, forward=plain.forward), plain)
    dense = worth_saving(operators)
    least = seconds_again(operators, {of.name for of in dense})
    found = [Variant(plain)]
    more = less_worth_saving(operators)
    for number in _steps([of.nbytes for of in more], MORE):
        saves = tuple(of.name for of in (*dense, *more[:number]))
        cost = _with(recomputed, operators, more[:number], least - seconds_again(operators, saves))
        cost = replace(cost, backward=max(cost.backward, plain.backward))  # operators seem slower one by one
        if number and recomputed.nbytes < cost.nbytes < plain.nbytes:
            found.append(Variant(cost, saves))
    found.append(Variant(recomputed, tuple(of.name for of in dense)))
    for number in _steps([of.nbytes for of in dense], STEPS):
        saves = tuple(of.name for of in dense[:number])
        cost = _without(recomputed, dense[number:], seconds_again(operators, saves) - least)
        if whole is not None:
            cost = _at_most(cost, recomputed, whole)
        if not number:  # run without dispatch modes
            host = plain.host_forward, plain.host_forward + plain.host_backward
            cost = replace(cost, host_forward=host[0], host_backward=host[1]) if whole is None else whole
        found.append(Variant(cost, saves))
    return tuple(found)


def replay_ways(whole: LayerCost, operators: tuple[OperatorCost, ...]) -> tuple[Variant, ...]:
    """Return the ways to run a group, from the most bytes saved to none; the first is without recomputation.

    Parameters
    ----------
    whole : LayerCost
        The group when all of it was recomputed.
    operators : tuple of OperatorCost
        All of its operators, with times as `within` its forward.

    Notes
    -----
    The saved outputs of the operators are ordered by the seconds that each byte spares, so that the ways lie on a
    convex curve of bytes against seconds.  What is made again lies on the device one segment at a time; what `whole`
    needs beyond the largest segment, such as gradients, every way needs.
    """
    order = _worth_in_order(operators)
    every, total = seconds_again(operators, ()), sum(each.seconds for each in operators)
    largest = _transient(operators, ())
    times = list(accumulate((each.seconds for each in operators), initial=0.0))
    found = []
    for number in (len(order), *_steps([each.nbytes for each in order], STEPS)):
        names = {each.name for each in order[:number]}
        again = seconds_again(operators, names)
        transient = _transient(operators, names)
        backward = max(whole.backward - (every - again), whole.forward)
        saved = list(whole.saved)
        for k, each in enumerate(operators):
            if each.name in names:
                place = times[k + 1] / total if total else (k + 1) / len(operators)
                saved += [Saved(nbytes, min(place, 1.0), max(1.0 - place, 0.0)) for nbytes in each.own]
        saved.sort(key=lambda each: each.saved_at)
        spared = whole.host_forward * (1 - count_again(operators, names) / max(count_again(operators, ()), 1))
        cost = replace(
            whole,
            backward=backward,
            saved=tuple(saved),
            host_backward=max(whole.host_backward - spared, 0.0),
            forward_temporary=max(whole.forward_temporary - largest, 0) + transient,
            backward_temporary=max(whole.backward_temporary - largest, 0) + transient,
        )
        found.append(Variant(cost, tuple(each.name for each in order[:number])))
    if not order:
        return (Variant(whole),)
    plain = replace(found[0].cost, kept_bytes=whole.kept_bytes + sum(each.kept for each in operators))
    return (Variant(plain), *found[1:])


def _again(operators: Sequence[OperatorCost], saved: Collection[str]) -> list[bool]:
    needed = [each.needed for each in operators]
    again = [False] * len(operators)
    for k in reversed(range(len(operators))):
        if again[k] or (needed[k] and operators[k].name not in saved):
            again[k] = True
            for other in operators[k].reads:
                needed[other] = True
            for other in operators[k].unsaved:
                again[other] = True
    return again


def count_again(operators: Sequence[OperatorCost], saved: Collection[str]) -> int:
    """Return how many of the operators run again if the outputs of some, given by name, are saved."""
    return sum(_again(operators, saved))


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
    now = seconds_again(operators, names)
    heap = [(-inf, k) for k, each in enumerate(operators) if each.nbytes]
    found = []
    while heap:
        _, k = heappop(heap)
        each = operators[k]
        spares = now - seconds_again(operators, {*names, each.name})
        density = spares / each.nbytes
        if heap and density < -heap[0][0]:
            heappush(heap, (-density, k))
            continue
        found.append(each)
        names.add(each.name)
        now -= spares
    return tuple(found)


def _with_work_of(cost: LayerCost, plain: LayerCost) -> LayerCost:
    """Return the cost of a recomputed group in whose backward the host does no more than its forward and backward."""
    return replace(cost, host_backward=min(cost.host_backward, plain.host_backward + cost.host_forward))


def _at_most(cost: LayerCost, dense: LayerCost, whole: LayerCost) -> LayerCost:
    """Return a cost with the temporary memory of that of two others which needs more."""

    def temporary(of_dense: int, of_whole: int) -> int:
        return max(max(of_whole + whole.nbytes, of_dense + dense.nbytes) - cost.nbytes, 0)

    return replace(
        cost,
        forward_temporary=temporary(dense.forward_temporary, whole.forward_temporary),
        backward_temporary=temporary(dense.backward_temporary, whole.backward_temporary),
    )


def _steps(sizes: Sequence[int], steps: int) -> Iterator[int]:
    """Yield how many outputs are saved, from all but some to none, at about equal distances of bytes."""
    before, total = len(sizes), sum(sizes)
    for step in range(1, steps):
        until, number = total * (steps - step) / steps, 0
        while number < len(sizes) and until >= sizes[number]:
            until -= sizes[number]
            number += 1
        if 0 < number < before:
            yield number
            before = number
    if sizes:
        yield 0


def _with(
    cost: LayerCost, operators: Sequence[OperatorCost], more: Collection[OperatorCost], seconds: float
) -> LayerCost:
    """Return the cost of a group in which further outputs are saved and not run again, which spares some seconds."""
    backward = max(cost.backward - seconds, 0.0)
    scale = cost.backward / backward if backward else 1.0
    saved = [replace(each, needed_at=min(each.needed_at * scale, 1.0)) for each in cost.saved]
    for of in more:
        place = (operators.index(of) + 1) / len(operators)
        saved += [Saved(nbytes, place, 1 - place) for nbytes in of.own]
    saved.sort(key=lambda each: each.saved_at)
    return replace(cost, backward=backward, saved=tuple(saved))


def _without(cost: LayerCost, again: Sequence[OperatorCost], seconds: float) -> LayerCost:
    """Return the cost of a group in which some outputs are run again instead of saved, which takes some seconds."""
    less, saved, gone = Counter(nbytes for of in again for nbytes in of.own), list[Saved](), 0
    backward = cost.backward + seconds
    scale = cost.backward / backward if backward else 1.0
    for each in cost.saved:
        if less[each.nbytes]:
            less[each.nbytes] -= 1
            gone += each.nbytes
        else:
            saved.append(replace(each, needed_at=each.needed_at * scale))
    return replace(
        cost,
        backward=backward,
        saved=tuple(saved),
        forward_temporary=cost.forward_temporary + gone,
        backward_temporary=cost.backward_temporary + gone + sum(of.returned for of in again),
    )
