"""What one rank of a pipeline can offload: the lowest peak at no cost, the least bytes for a peak, and a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from .pipeline_placement import RankPlacement, place_rank
from .pipeline_profile import RankProfile

__all__ = ["Knobs", "RankChoices"]

TRIALS = 12
"""Numbers of parts that are tried before the best is looked for between them."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the user allows; None for no limit.

    Parameters
    ----------
    fraction : float, optional
        Fraction of the bytes of each microbatch that may be offloaded.
    delta_bytes : int, optional
        Rank `r` may offload ``r * delta_bytes`` bytes less of each microbatch.
    max_inflight : int, optional
        Groups that may be copied to the host at a time.
    """

    fraction: float | None = None
    delta_bytes: int | None = None
    max_inflight: int | None = None

    @property
    def given(self) -> bool:
        """Whether they say how much is offloaded."""
        return self.fraction is not None or self.delta_bytes is not None


@dataclass
class RankChoices:
    """The placements of one rank.

    Parameters
    ----------
    profile : RankProfile
        The rank.
    rank : int
        Its number.
    knobs : Knobs
        What may be offloaded.
    margin : float
        As in `place_rank`.
    """

    profile: RankProfile
    rank: int
    knobs: Knobs
    margin: float
    _placed: dict[tuple[int, bool], RankPlacement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds, candidates = self.profile.kinds(), self.profile.candidates
        each = [candidates[members[0]].nbytes for _, members in kinds]
        room = sum(each) * (1.0 if self.knobs.fraction is None else self.knobs.fraction)
        room -= self.rank * (self.knobs.delta_bytes or 0)
        self.possible: list[list[int]] = []
        self.idle: list[list[int]] = []  # those for which there is time
        for nbytes, (seconds, members) in zip(each, kinds, strict=True):
            if nbytes <= room:
                room -= nbytes
                self.possible.append(members)
                self.idle += [members] if seconds > 0 else []
        self.parts = self.profile.parts(self.idle)
        self.splits = any(of.split for of in candidates)

    def _place(self, number: int, again: bool, limit: float = inf) -> RankPlacement:
        """Return the placement of the first parts."""
        parts = self.parts if limit == inf else self.profile.parts(self.possible)
        chosen = [k for part in parts[:number] for k in part]
        return place_rank(
            self.profile,
            chosen,
            chosen if again else (),
            limit,
            margin=self.margin,
            max_inflight=self.knobs.max_inflight,
        )

    def free(self, number: int) -> RankPlacement:
        """Return the placement of the first parts, as far as they cost no time, that has the smaller peak."""
        found = [self._known(number, again) for again in ((False, True) if self.splits else (False,))]
        return min(found, key=lambda placement: placement.peak_bytes)

    def _known(self, number: int, again: bool) -> RankPlacement:
        if (number, again) not in self._placed:
            self._placed[number, again] = self._place(number, again)
        return self._placed[number, again]

    def everything(self) -> RankPlacement:
        """Return the placement of all that the knobs allow."""
        return self.free(len(self.parts))

    def lowest(self) -> int:
        """Return the number of parts with the smallest peak at no cost."""
        count = len(self.parts)
        step = max(count // TRIALS, 1)
        best = min(range(0, count + 1, step), key=self._peak, default=0)
        while step > 1:
            step = (step + 1) // 2 if step > 2 else 1
            near = (best - step, best, best + step)
            best = min((n for n in near if 0 <= n <= count), key=self._peak)
        return best

    def _peak(self, number: int) -> tuple[int, int]:
        return self.free(number).peak_bytes, number

    def reaching(self, target: int) -> RankPlacement:
        """Return a placement of few bytes with a peak of at most `target` at no cost, or with the smallest."""
        low, high = 0, self.lowest()
        target = max(target, self.free(high).peak_bytes)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.free(middle).peak_bytes <= target else (middle + 1, high)
        placement = self.free(high).copy()
        placement.trim(target)
        return placement

    def within(
        self, budget: int, seconds: Callable[[RankPlacement], float], free: float, trials: int = TRIALS
    ) -> tuple[RankPlacement, float] | None:
        """Return the placement within a budget that takes the least time, and that time; None if none was found.

        Of those that take at most `free` seconds the one of the fewest bytes is returned; with few `trials` the first.
        """
        found: tuple[RankPlacement, float] | None = None
        for placement in self._forced(budget, trials):
            if placement.peak_bytes > budget:
                continue
            placement.trim(budget)
            took = seconds(placement)
            if found is None or (max(took, free), placement.nbytes) < (max(found[1], free), found[0].nbytes):
                found = placement, took
            if took <= free and trials < TRIALS:
                break
        return found

    def _forced(self, budget: int, trials: int) -> Iterator[RankPlacement]:
        count = len(self.profile.parts(self.possible))
        for number in range(count, 0, -max(count // trials, 1)):
            for again in (False, True) if self.splits else (False,):
                yield self._place(number, again, budget)

    def smallest(self) -> RankPlacement:
        """Return the placement with the smallest peak that can be had at any cost."""
        count = len(self.profile.parts(self.possible))
        found = [self._place(count, again, 0) for again in ((False, True) if self.splits else (False,))]
        return min(found, key=lambda placement: placement.peak_bytes)
