"""What the first passes of a model show: plain data, which the ranks of a model share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from .._text import milliseconds, register, size
from ..device.base import usable
from ..planner import Variant, choose, frontier
from ..schedule.costs import LayerCost, Link, Saved
from ..schedule.plan import Plan
from .costs import HOST_SECONDS, scaled_cost
from .meter import Peak

MORE = 0.005  # part of the limit: less additional memory before a pass changes nothing
LARGEST = 2**20  # times the measured inputs that are looked at
ROUNDING = 0.01  # part of the limit that is left free with inputs of another size
SMALLER = 0.9  # of a peak: the next choice that a report names
NO_LINK = Link(1.0, 1.0)  # nothing is copied, so its rates do not matter

T = TypeVar("T")


@dataclass(frozen=True)
class Fit:
    """What a training pass with inputs of some size would take, as the planner predicts it; ``print`` tells it.

    Parameters
    ----------
    tokens : int
        Elements of the largest of the inputs, such as batch times sequence of `input_ids`.
    measured_tokens : int
        Those of the passes that were measured.
    plan : Plan
        The fastest plan that was found for them within the limit, or the leanest, if none is.
    limit_bytes, host_bytes : int, optional
        Device and host memory that the pass may take.

    Examples
    --------
    >>> from actoffload.schedule import Plan
    >>> plan = Plan(2, names=("a", "b"), nbytes=(2**30, 2**30), seconds=0.25, peak_bytes=3 * 2**30)
    >>> print(actoffload.Fit(32768, 8192, plan, limit_bytes=4 * 2**30))
    Inputs of 32768 elements (4.00 x the measured ones) fit: predicted peak 3.00 GiB of 4.00 GiB, pass 250.00 ms. \
Of 2 groups 0 are offloaded and 0 recomputed.
    """

    tokens: int
    measured_tokens: int
    plan: Plan
    limit_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def factor(self) -> float:
        """How many times as large as the measured inputs these are."""
        return self.tokens / self.measured_tokens

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of device memory."""
        return self.plan.peak_bytes or 0

    @property
    def seconds(self) -> float:
        """The predicted time of the forward and the backward."""
        return self.plan.seconds or 0.0

    @property
    def fits(self) -> bool:
        """Whether such a pass is expected to be within the limits."""
        device = self.limit_bytes is None or self.peak_bytes <= self.limit_bytes
        return device and (self.host_bytes is None or self.plan.offloaded_bytes <= self.host_bytes)

    def __str__(self) -> str:
        plan, limit = self.plan, "" if self.limit_bytes is None else f" of {size(self.limit_bytes)}"
        inputs = f"Inputs of {self.tokens} elements ({self.factor:.2f} x the measured ones)"
        peak = f"predicted peak {size(self.peak_bytes)}{limit}"
        done = f"Of {len(plan.names)} groups {len(plan.offloaded)} are offloaded and {len(plan.recomputed)} recomputed."
        if self.fits:
            return f"{inputs} fit: {peak}, pass {milliseconds(self.seconds)}. {done}"
        if self.host_bytes is not None and plan.offloaded_bytes > self.host_bytes:
            host = f"{size(plan.offloaded_bytes)} of host memory of {size(self.host_bytes)}"
            return f"{inputs} do not fit: they would take {host}."
        return f"{inputs} do not fit: {peak}. {done}"


class Room(NamedTuple):
    """What a rank has for a pass."""

    limit: int | None = None  # bytes of device memory
    peak: Peak = Peak()  # of the leanest pass
    link: Link | None = None  # with all ranks copying; None if nothing can be copied


@dataclass
class Findings:
    """What the first passes have shown so far, and the plan that follows from it."""

    plan: Plan | None = None  # that is tried, and in the end kept
    budget: int | None = None  # bytes of device memory that the program allows
    limit: int | None = None  # bytes of device memory that a pass may take
    short: int = 0  # bytes that earlier plans counted on and did not find
    reserve: int = 0  # bytes by which the limit is smaller for the rank that takes most
    device_bytes: int | None = None  # that the device has
    largest: int = 0  # bytes of the largest tensor
    size: int = 0  # elements of the inputs
    tokens: int = 0  # elements of the largest of the inputs
    in_flight: int = 1  # passes whose memory is needed at once
    allocated_before: int = 0  # bytes of device memory before a pass, for which the plan is
    # Bytes that a pass takes in this rank beyond those in the first rank, whose memory counts in all else
    more: int = 0
    shift: int = 0  # the same before a pass
    bare: Peak = field(default_factory=Peak)  # of a pass in which everything is kept, expected or measured
    excess: int = 0  # bytes by which passes took more memory than the costs of groups add up to
    gradients: tuple[tuple[int, ...], ...] = ()  # bytes that each group finds at its four borders, new in the pass
    outside: float = 0.0  # seconds of a pass before its first group and behind its last one
    pace: float = 1.0  # measured seconds of a pass with the plan, by the seconds that were expected

    # The costs that were measured
    names: tuple[str, ...] = ()  # of the groups, in execution order
    ways: Sequence[tuple[Variant, ...]] = ()  # to run each group, the first of them without replay; empty if not known
    link: Link | None = None  # with all ranks copying; None if nothing can be offloaded
    host_limit: int | None = None  # bytes of host memory that a pass may take

    def for_all(self, rooms: Sequence[Room], own: Room, allocated: int) -> Findings:
        """Return what the first rank found, for one with its `own` room; the plan is for the largest inputs of all."""
        largest = max(room.peak.elements for room in rooms)  # [guard: ranks whose inputs were short]
        found = self._scaled(largest / self.size) if largest > self.size > 0 else replace(self)
        links = [room.link for room in rooms if room.link is not None]
        found.link = Link.slowest(links) if links else None  # [guard: the slowest link of all ranks]
        least = rooms[0].peak.at(largest)
        found.more, found.shift = own.peak.at(largest) - least, allocated - self.allocated_before
        if self.limit is not None:
            limits = [room.limit - room.peak.at(largest) for room in rooms if room.limit is not None]
            found.limit = least + min(limits)
            found.reserve = self.limit - found.limit
        return found

    def most(self, factor: float = 1.0) -> int | None:
        """Return the bytes that a pass may take, with `factor` times as large tensors; None if that is not known."""
        most = usable(self.device_bytes, round(factor * self.largest), self.budget)
        return None if most is None else max(most - self.short, 0)

    def chosen(self, **changes: Any) -> Plan:
        """Return the best plan by the costs that were measured; `changes` replace arguments of the planner."""
        known = {"limit": self.limit, "without_bytes": self.bare.nbytes or None, "excess": self.excess}
        plan = self.expected(self._planned(choose, **{**known, **changes}))
        if not (self.reserve and plan.because):
            return plan
        more = f"Another rank takes {size(self.reserve)} more than the one that decides."
        return replace(plan, because=f"{plan.because} {more}")

    def expected(self, plan: Plan) -> Plan:
        """Return a plan by costs of groups with the peak and the times that are expected of a whole pass."""
        if plan.peak_bytes is not None:
            plan = replace(plan, peak_bytes=plan.peak_bytes + self.excess)
        if plan.seconds is None or plan.baseline_seconds is None:
            return plan
        seconds, baseline = plan.seconds + self.outside, plan.baseline_seconds + self.outside
        return replace(plan, seconds=self.pace * seconds, baseline_seconds=self.pace * baseline)

    def frontier(self) -> tuple[Plan, ...]:
        """Return the plans that are worth having."""
        return tuple(map(self.expected, self._planned(frontier)))

    def _planned(self, search: Callable[..., T], **changes: Any) -> T:
        """Return what a function of the planner finds by the costs that were measured."""
        known = {"host_seconds": HOST_SECONDS, "host_limit": self.host_limit if self.link else 0}
        return search(self.names, self.ways, self.link or NO_LINK, **{**known, **changes})

    def fit(self, tokens: int, limit: int | None = None, host_bytes: int | None = None, *, proves: bool = False) -> Fit:
        """Return what a pass with inputs of another size would take, by the plan that is the fastest for them.

        By default the `limit` is the memory of the device, or the budget.  If the pass `proves`, it has to leave room
        for one tensor more: each value is made again beside the one that is there.
        """
        assert self.plan is not None
        now, then = self.most(), self.most(max(tokens / self.tokens, 1.0))
        if limit is not None:
            limit -= self.reserve
        else:  # larger tensors need a larger reserve
            limit = self.limit if self.limit is None or now is None or then is None else self.limit - now + then
        if proves and limit is not None:
            saved = (each.nbytes for group in self.ways for way in group for each in way.cost.saved)
            limit -= math.ceil(tokens / self.tokens * max(saved, default=0))
        measured = tokens == self.tokens and limit == self.limit
        room = {} if host_bytes is None else {"host_limit": host_bytes}
        most = None if limit is None else round((1 - ROUNDING) * limit)  # sizes are rounded up
        plan = self.plan if measured else self._scaled(tokens / self.tokens).chosen(limit=most, **room)
        return Fit(tokens, self.tokens, plan, limit, host_bytes)

    def largest_fit(self, limit: int | None = None, host_bytes: int | None = None) -> Fit:
        """Return the largest inputs that fit, to about one percent; the smallest that do not, if none do."""

        def trains(tokens: int) -> bool:
            return self.fit(tokens, limit, host_bytes, proves=True).fits

        least, most = (self.tokens if self.fit(self.tokens, limit, host_bytes).fits else 0), self.tokens
        while most < LARGEST * self.tokens and trains(most):
            least, most = most, 2 * most
        while most - least > max(least // 100, 1):
            between = (least + most) // 2
            least, most = (between, most) if trains(between) else (least, between)
        return self.fit(max(least, 1), limit, host_bytes)

    def _scaled(self, factor: float) -> Findings:
        """Return what passes with inputs of `factor` times the size are expected to show."""
        scaled = []
        for group, gradients in zip(self.ways, self.gradients, strict=True):
            fixed = [self.allocated_before + nbytes for nbytes in gradients]
            scaled.append(tuple(way.map(partial(scaled_cost, factor=factor, fixed=fixed)) for way in group))
        return replace(
            self,
            ways=scaled,
            size=round(factor * self.size),
            tokens=round(factor * self.tokens),
            bare=Peak(),
            excess=math.ceil(max(factor, 1.0) * self.excess),
            outside=factor * self.outside,
        )

    @cached_property
    def next_choice(self) -> str:
        """What a peak smaller than that of the final plan would cost, in a sentence; empty if that is not known."""
        plan, peak = self.plan, None if self.plan is None else self.plan.peak_bytes
        if plan is None or not self.ways or peak is None or not plan.baseline_seconds:
            return ""
        found = self.chosen(limit=round(peak * SMALLER))
        if found.seconds is None or found.peak_bytes is None or found.peak_bytes >= peak:
            return ""
        cost = found.seconds / (found.baseline_seconds or plan.baseline_seconds)
        peaks = f"A peak of {size(found.peak_bytes)} instead of {size(peak)}"
        budget = f'memory_budget="{math.ceil(found.peak_bytes / 2**20)}MiB"'
        return f"{peaks} would cost at most {cost:.2f} x the time of a pass without offloading: {budget}."

    def fits(self, elements: int, in_use: int = 0) -> bool:
        """Return whether a pass with the plan is within the limit, or takes no more than it did when it was planned.

        `elements` are those of its inputs, `in_use` the bytes allocated before it: an optimizer allocates states late.
        """
        if self.limit is None:
            return True
        plan, known = self.plan, self.bare
        if plan is not None and plan.peak_bytes is not None:
            known = Peak(plan.peak_bytes, self.size, self.allocated_before)
        # Where other passes may be in progress, `in_use` says nothing.
        counts = self.in_flight == 1 and in_use - self.shift - known.allocated > MORE * self.limit
        return known.at(elements, in_use - self.shift if counts else 0) <= max(self.limit, known.nbytes)

    def peak_in(self, peak: Peak) -> int:
        """Return a peak in this rank as it would be in the first one, with the inputs of the plan; 0 if not known."""
        if self.in_flight > 1 or not peak.nbytes:
            return 0
        # [guard: peaks of passes with smaller inputs or less memory before]
        return max(peak.at(self.size, self.allocated_before + self.shift) - self.more, 0)


register(Findings, Peak, Room, Variant, LayerCost, Saved, Link)
