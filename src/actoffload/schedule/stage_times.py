"""Times of the copies and of the compute of the stages, in one number for each purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .costs import LayerCost, Link, copies_back, copies_out
from .pipeline import Computation, SplitCost, StageCost


class Piece(NamedTuple):
    """Copies of a group that run one right after the other: those of one saved tensor, or of all of them."""

    nbytes: int
    tensors: int
    out: float  # seconds of the copies to the host
    out_lag: float  # from where the first can start until all are done at the earliest
    back: float  # seconds of the copies to the device


class Use(NamedTuple):
    """Where a computation saves or needs a piece."""

    piece: int
    seconds: float  # from the start of the compute of the group
    host: float  # the same of the host
    lead: float = 0.0  # seconds before the end of its copies back from which on compute may use it


@dataclass(slots=True)
class Part:
    """The compute of one group in one step."""

    gap: float
    seconds: float
    host: float
    temporary: int  # bytes allocated for a time
    gap_temporary: int
    kept: int  # bytes that it keeps, or frees if negative, beside the saved ones
    levels: tuple[int, int]  # bytes beside those of the rank, where it starts and where it ends
    uses: tuple[Use, ...]
    at_once: bool  # it writes all before it saves any, and frees all when it ends
    frees: bool  # it frees what it uses
    last: bool  # nothing uses it later


class GroupTimes:
    """Copies of one group in seconds, which are `exact` to the tensor, or of all of them as one piece."""

    def __init__(self, cost: LayerCost, split: SplitCost | None, link: Link, *, exact: bool) -> None:
        self.cost, self.nbytes, self._link, self._exact = cost, cost.nbytes, link, exact
        # The copies to the host, and from the start of forward until all are done, if the queue is free.
        self.out, self.out_after = copies_out(cost, link)
        # From the start of forward until the first copy can start.
        self.out_ready = cost.saved[0].saved_at * cost.forward if cost.saved else 0.0
        # The copies back, and by how much they must start before a full backward does, without a stall.
        self.back, self.back_ahead = copies_back(cost, link)
        self.input_ahead = self.back_ahead
        if split is not None:  # the input backward needs the tensors at the same parts of a shorter time
            self.input_ahead = copies_back(replace(cost, backward=split.input_seconds), link)[1]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the group."""
        saved, link = self.cost.saved, self._link
        if self._exact:
            return tuple(Piece(each.nbytes, 1, each.nbytes / link.d2h, 0.0, each.nbytes / link.h2d) for each in saved)
        one = Piece(self.nbytes, len(saved), self.out, self.out_after - self.out_ready, self.back)
        return (one,) if saved else ()

    def uses(self, computation: Computation) -> tuple[Use, ...]:
        """Return where a computation comes to each piece, in order."""
        cost = self.cost
        if not self._exact:
            lead = {
                Computation.BACKWARD: self.back - self.back_ahead,
                Computation.BACKWARD_INPUT: self.back - self.input_ahead,
            }
            at = self.out_ready if computation is Computation.FORWARD else 0.0
            return (Use(0, at, 0.0, lead.get(computation, 0.0)),) if cost.saved else ()
        if computation is Computation.FORWARD:
            return tuple(
                Use(k, each.saved_at * cost.forward, each.saved_at * cost.host_forward)
                for k, each in enumerate(cost.saved)
            )
        parts = [(k, 0.0 if cost.unpacks_at_once else cost.saved[k].needed_at) for k in cost.order_of_use]
        return tuple(Use(k, part * cost.backward, part * cost.host_backward) for k, part in parts)


@dataclass
class StageTimes:
    """The steps of one stage, with copies that are `exact` to the tensor, or one piece for each group."""

    cost: StageCost
    link: Link
    exact: bool

    @cached_property
    def groups(self) -> list[GroupTimes]:
        """The groups, in order of the forward."""
        splits = self.cost.splits or (None,) * len(self.cost.groups)
        pairs = zip(self.cost.groups, splits, strict=True)
        return [GroupTimes(group, split, self.link, exact=self.exact) for group, split in pairs]

    @cached_property
    def pieces(self) -> list[tuple[Piece, ...]]:
        """The pieces of each group."""
        return [group.pieces for group in self.groups]

    @cached_property
    def parts(self) -> dict[Computation, list[Part]]:
        """The compute of the groups in each computation, in order of execution; none if it computes nothing."""
        found = {computation: list[Part]() for computation in Computation}
        for group, split in zip(self.groups, self.cost.splits or (None,) * len(self.groups), strict=True):
            cost = group.cost
            own = Part(
                gap=cost.gap_forward,
                seconds=cost.forward,
                host=cost.host_forward,
                temporary=cost.forward_temporary,
                gap_temporary=cost.gap_forward_temporary,
                kept=cost.kept_bytes,
                levels=cost.other_bytes[:2],
                uses=group.uses(Computation.FORWARD),
                at_once=self.exact and cost.unpacks_at_once,
                frees=False,
                last=False,
            )
            full = replace(
                own,
                gap=cost.gap_backward,
                seconds=cost.backward,
                host=cost.host_backward,
                temporary=cost.backward_temporary,
                gap_temporary=cost.gap_backward_temporary,
                kept=-cost.kept_bytes,
                levels=cost.other_bytes[2:],
                uses=group.uses(Computation.BACKWARD),
                frees=True,
                last=True,
            )
            found[Computation.FORWARD].append(own)
            found[Computation.BACKWARD].insert(0, full)
            if split is None:
                found[Computation.BACKWARD_WEIGHT].insert(0, full)
                continue
            # Neither half frees anything before it ends.
            both = split.input_seconds + split.weight_seconds
            host = full.host * (split.input_seconds / both if both else 1.0)
            uses = group.uses(Computation.BACKWARD_INPUT)
            half = replace(full, seconds=split.input_seconds, host=host, kept=0, uses=uses, frees=False, last=False)
            found[Computation.BACKWARD_INPUT].insert(0, half)
            uses, late = group.uses(Computation.BACKWARD_WEIGHT), full.host - host
            other = replace(half, gap=0.0, seconds=split.weight_seconds, host=late, uses=uses, last=True)
            found[Computation.BACKWARD_WEIGHT].insert(0, other)
        return found

    @cached_property
    def gradients(self) -> list[int]:
        """Bytes of the gradients of each group, in the order of the backward."""
        return list(reversed(self.cost.gradient_bytes or (0,) * len(self.groups)))
