"""Times of the copies and of the compute of the stages, in one number for each purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .costs import LayerCost, Link, copies_back, copies_out
from .pipeline import Computation, SplitCost, StageCost

__all__ = ["GroupTimes", "Part", "Piece", "StageTimes"]


class Piece(NamedTuple):
    """Copies of a group that run one right after the other: those of one saved tensor, or of all of them."""

    nbytes: int
    tensors: int
    latency: float  # seconds before the copies, which no other copy slows down
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


@dataclass(slots=True)
class GroupTimes:
    """Copies of one group in seconds."""

    cost: LayerCost
    nbytes: int
    out: float  # the copies to the host
    out_ready: float  # from the start of forward until the first copy can start
    out_after: float  # until all are done, if the queue is free
    back: float  # the copies back
    back_ahead: float  # by which they must start before a full backward does, without a stall
    input_ahead: float  # the same for an input backward
    again_bytes: int  # what a weight backward needs again
    again: float
    link: Link

    @staticmethod
    def of(cost: LayerCost, split: SplitCost | None, link: Link) -> GroupTimes:
        """Return the times of a group, whose backward may be split."""
        out, after = copies_out(cost, link)
        back, ahead = copies_back(cost, link)
        # The input backward needs the tensors at the same parts of a shorter time.
        input_ahead = ahead if split is None else copies_back(replace(cost, backward=split.input_seconds), link)[1]
        ready = cost.saved[0].saved_at * cost.forward if cost.saved else 0.0
        again = split.kept if split is not None else 0
        seconds = link.latency * len(cost.saved) + again / link.h2d if again else 0.0
        return GroupTimes(cost, cost.nbytes, out, ready, after, back, ahead, input_ahead, again, seconds, link)

    def pieces(self, *, exact: bool) -> tuple[Piece, ...]:
        """Return the pieces of the group: each tensor if they are `exact`, otherwise all of them in one."""
        saved, link = self.cost.saved, self.link
        if exact:
            return tuple(
                Piece(each.nbytes, 1, link.latency, each.nbytes / link.d2h, 0.0, each.nbytes / link.h2d)
                for each in saved
            )
        one = Piece(self.nbytes, len(saved), 0.0, self.out, self.out_after - self.out_ready, self.back)
        return (one,) if saved else ()

    def uses(self, computation: Computation, *, exact: bool) -> tuple[Use, ...]:
        """Return where a computation comes to each piece, in order."""
        cost = self.cost
        if not exact:
            lead = {
                Computation.BACKWARD: self.back - self.back_ahead,
                Computation.BACKWARD_INPUT: self.back - self.input_ahead,
            }
            at = self.out_ready if computation is Computation.FORWARD else 0.0
            return (Use(0, at, 0.0, lead.get(computation, 0.0)),) if cost.saved else ()
        if computation is Computation.FORWARD:
            places = [(k, each.saved_at) for k, each in enumerate(cost.saved)]
            return tuple(Use(k, at * cost.forward, at * cost.host_forward) for k, at in places)
        if cost.unpacks_at_once:
            return tuple(Use(k, 0.0, 0.0) for k in cost.order_of_use)
        places = [(k, cost.saved[k].needed_at) for k in cost.order_of_use]
        return tuple(Use(k, at * cost.backward, at * cost.host_backward) for k, at in places)


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
        return [GroupTimes.of(group, split, self.link) for group, split in pairs]

    @cached_property
    def pieces(self) -> list[tuple[Piece, ...]]:
        """The pieces of each group."""
        return [group.pieces(exact=self.exact) for group in self.groups]

    @cached_property
    def parts(self) -> dict[Computation, list[Part]]:
        """The compute of the groups in each computation, in order of execution; none if it computes nothing."""
        forward, backward, inputs, weights = list[Part](), list[Part](), list[Part](), list[Part]()
        for k, group in enumerate(self.groups):
            cost = group.cost
            own = Part(
                gap=cost.gap_forward,
                seconds=cost.forward,
                host=cost.host_forward,
                temporary=cost.forward_temporary,
                gap_temporary=cost.gap_forward_temporary,
                kept=cost.kept_bytes,
                levels=cost.other_bytes[:2],
                uses=group.uses(Computation.FORWARD, exact=self.exact),
                at_once=self.exact and cost.unpacks_at_once,
                frees=False,
                last=False,
            )
            forward.append(own)
            full = replace(
                own,
                gap=cost.gap_backward,
                seconds=cost.backward,
                host=cost.host_backward,
                temporary=cost.backward_temporary,
                gap_temporary=cost.gap_backward_temporary,
                kept=-cost.kept_bytes,
                levels=cost.other_bytes[2:],
                uses=group.uses(Computation.BACKWARD, exact=self.exact),
                frees=True,
                last=True,
            )
            backward.insert(0, full)
            if not self.cost.splits:
                continue
            split = self.cost.splits[k]  # neither half frees anything before it ends
            both = split.input_seconds + split.weight_seconds
            host = full.host * (split.input_seconds / both if both else 1.0)
            uses = group.uses(Computation.BACKWARD_INPUT, exact=self.exact)
            half = replace(full, seconds=split.input_seconds, host=host, kept=0, uses=uses, frees=False, last=False)
            inputs.insert(0, half)
            uses = group.uses(Computation.BACKWARD_WEIGHT, exact=self.exact)
            late = full.host - host
            weights.insert(0, replace(half, gap=0.0, seconds=split.weight_seconds, host=late, uses=uses, last=True))
        return {
            Computation.FORWARD: forward,
            Computation.BACKWARD: backward,
            Computation.BACKWARD_INPUT: inputs,
            Computation.BACKWARD_WEIGHT: weights if self.cost.splits else backward,
        }

    @cached_property
    def gradients(self) -> list[int]:
        """Bytes of the gradients of each group, in the order of the backward."""
        return list(reversed(self.cost.gradient_bytes or (0,) * len(self.groups)))

    @cached_property
    def recomputed(self) -> int:
        """Bytes that the input backward leaves for the weight backward, beside the saved ones."""
        return sum(split.recomputed for split in self.cost.splits)
