"""What layers, stages and the link cost: the input of the simulations, and the times that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .._arguments import check_bytes, check_fits, check_kinds, check_seconds, check_whole
from .pipeline import Computation


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd saves in a layer and that may be offloaded.

    Parameters
    ----------
    nbytes : int
        Size in bytes; at least 1.
    saved_at, needed_at : float
        When forward saves it and when backward needs it, as fractions of the layer's forward and backward time.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    nbytes: int
    saved_at: float = 1.0
    needed_at: float = 0.0

    def __post_init__(self) -> None:
        check_fits("the size of a tensor, at least 1 byte", lambda value: value >= 1, nbytes=self.nbytes)
        for name, section in (("saved_at", "forward"), ("needed_at", "backward")):
            expected = f"a fraction of the layer's {section} time, from 0.0 to 1.0"
            check_fits(expected, lambda value: 0.0 <= value <= 1.0, **{name: getattr(self, name)})


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Compute times of one layer, the tensors that it saves, and the other memory that the device holds meanwhile.

    Parameters
    ----------
    forward, backward : float
        Seconds of compute without any waiting.
    saved : tuple of Saved
        In the order in which forward saves them.
    host_forward, host_backward : float
        Seconds in which the host queues this compute and that of the gap before it; 0 if not known.
    gap_forward, gap_backward : float
        Seconds of compute before the forward and before the backward: since the forward of the previous layer or the
        begin of the step, and since the backward of the layer behind it, for the last layer since its own forward.
    other_bytes : tuple of int
        Bytes on the device apart from `saved`, such as weights and gradients, at four times: when forward starts, when
        it ends, when backward starts, when it ends.
    forward_temporary, backward_temporary : int
        Bytes that are allocated for a time inside, above the larger of what is allocated at the start and at the end.
    gap_forward_temporary, gap_backward_temporary : int
        The same of the gaps, such as the logits of a loss.
    kept_bytes : int
        Bytes that it keeps on the device from the end of its forward to the end of its backward, beside `saved`, which
        cannot be offloaded: casts of weights under autocast.
    unpacks_at_once : bool
        Whether backward needs all saved tensors when it starts and frees them when it ends, and forward writes all
        before it saves the first, as in a compiled layer.

    Examples
    --------
    >>> from actoffload.schedule import LayerCost
    >>> cost = LayerCost.even(1000, forward=0.010, backward=0.020, pieces=4)
    >>> [(saved.nbytes, saved.saved_at, saved.needed_at) for saved in cost.saved]
    [(250, 0.25, 0.75), (250, 0.5, 0.5), (250, 0.75, 0.25), (250, 1.0, 0.0)]
    """

    forward: float
    backward: float
    saved: tuple[Saved, ...] = ()
    _: KW_ONLY
    host_forward: float = 0.0
    host_backward: float = 0.0
    gap_forward: float = 0.0
    gap_backward: float = 0.0
    other_bytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    forward_temporary: int = 0
    backward_temporary: int = 0
    gap_forward_temporary: int = 0
    gap_backward_temporary: int = 0
    kept_bytes: int = 0
    unpacks_at_once: bool = False

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "host_forward", "host_backward", "gap_forward", "gap_backward"):
            check_seconds(**{name: getattr(self, name)})
        temporaries = "forward_temporary", "backward_temporary", "gap_forward_temporary", "gap_backward_temporary"
        for name in (*temporaries, "kept_bytes"):
            check_bytes(**{name: getattr(self, name)})
        expected, four = "four numbers of bytes, each 0 or more", self.other_bytes
        check_fits(expected, lambda value: len(value) == 4 and all(level >= 0 for level in value), other_bytes=four)
        if not isinstance(self.saved, Iterable) or not all(isinstance(each, Saved) for each in self.saved):
            raise TypeError(f"saved is {self.saved!r}; expected a tuple of Saved.")
        object.__setattr__(self, "other_bytes", tuple(self.other_bytes))
        object.__setattr__(self, "saved", tuple(self.saved))
        for earlier, later in pairwise(self.saved):
            if later.saved_at < earlier.saved_at:
                raise ValueError(
                    f"A tensor saved at {later.saved_at} comes after one saved at {earlier.saved_at}; "
                    "list the saved tensors in the order in which forward saves them."
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all saved tensors."""
        return sum(saved.nbytes for saved in self.saved)

    @property
    def order_of_use(self) -> tuple[int, ...]:
        """Positions in `saved` as backward needs them; of two needed at once, the last saved comes first.

        A backward that unpacks all of them at once does it in the order in which they were saved.
        """
        if self.unpacks_at_once:
            return tuple(range(len(self.saved)))
        return tuple(sorted(range(len(self.saved)), key=lambda k: (self.saved[k].needed_at, -k)))

    def in_batches(self, nbytes: int) -> LayerCost:
        """Return the cost where copies to the host wait until they have `nbytes` bytes, or the forward has ended.

        >>> [each.saved_at for each in LayerCost.even(1000, 0.010, 0.020, pieces=5).in_batches(400).saved]
        [0.4, 0.4, 0.8, 0.8, 1.0]
        """
        saved, batch = list[Saved](), list[Saved]()
        for each in self.saved:
            batch.append(each)
            if sum(one.nbytes for one in batch) >= nbytes:
                saved += [Saved(one.nbytes, each.saved_at, one.needed_at) for one in batch]
                batch = []
        return replace(self, saved=(*saved, *(Saved(one.nbytes, 1.0, one.needed_at) for one in batch)))

    def with_bytes(self, factor: float) -> LayerCost:
        """Return the same layer with `factor` times the bytes of each saved tensor, rounded up."""
        check_fits("a number of times, finite and 0 or more", lambda value: 0 <= value < math.inf, factor=factor)
        return replace(self, saved=tuple(replace(each, nbytes=math.ceil(each.nbytes * factor)) for each in self.saved))

    @classmethod
    def even(cls, nbytes: int, forward: float, backward: float, pieces: int = 8) -> LayerCost:
        """Return a layer that saves `nbytes` in equal pieces at equal distances; backward needs the last one at once.

        There are fewer pieces if there are fewer bytes than that.  The last one takes the remainder.
        """
        check_whole(nbytes=nbytes, least=0)
        check_whole(pieces=pieces, least=1)
        pieces = min(pieces, nbytes)
        sizes = [nbytes // pieces] * (pieces - 1) + [nbytes // pieces + nbytes % pieces] if pieces else []
        return cls(forward, backward, spread_evenly(sizes))


def spread_evenly(sizes: Sequence[int]) -> tuple[Saved, ...]:
    """Return tensors that are saved at equal distances, and needed in reverse order; those without bytes are none."""
    count = len(sizes)
    return tuple(Saved(nbytes, (k + 1) / count, (count - 1 - k) / count) for k, nbytes in enumerate(sizes) if nbytes)


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between device and host.

    Without `both` the two directions are independent: a copy is not slower while one runs the other way.

    Parameters
    ----------
    d2h, h2d : float
        Bytes per second from device to host and from host to device; infinity is allowed.
    both : float, optional
        Bytes per second of both directions in sum while both are busy.  The direction that was busy first keeps its
        bandwidth, and the other has what is left.
    """

    d2h: float
    h2d: float
    both: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("d2h", self.d2h), ("h2d", self.h2d), ("both", self.both)):
            if value is not None or name != "both":
                check_fits("bytes per second, more than 0", lambda value: value > 0, **{name: value})

    @staticmethod
    def slowest(links: Iterable[Link]) -> Link:
        """Return the lowest rates of some links: those of ranks, which wait for each other."""
        known = list(links)
        return Link(
            min(link.d2h for link in known),
            min(link.h2d for link in known),
            min((link.both for link in known if link.both is not None), default=None),
        )

    def end(self, start: float, seconds: float, busy: float, *, back: bool) -> float:
        """Return when copies end that take some seconds alone, while the other direction is busy until a time."""
        own, other = (self.h2d, self.d2h) if back else (self.d2h, self.h2d)
        if busy <= start or self.both is None or self.both >= own + other:
            return start + seconds
        rest, together = max(self.both - other, 0.0) / own, busy - start
        if rest and seconds <= rest * together:
            return start + seconds / rest
        return start + together + (seconds - rest * together)


def copies_out(cost: LayerCost, link: Link) -> tuple[float, float]:
    """Return the seconds of the copies to the host, and from the start of forward until they are done."""
    total = end = 0.0
    for saved in cost.saved:
        seconds = saved.nbytes / link.d2h
        total += seconds
        end = max(end, saved.saved_at * cost.forward) + seconds
    return total, end


def copies_back(cost: LayerCost, link: Link) -> tuple[float, float]:
    """Return the seconds of the copies back, and by how much they must start before backward does."""
    total, ahead = 0.0, float("-inf")
    for saved in reversed(cost.saved):
        total += saved.nbytes / link.h2d
        needed = 0.0 if cost.unpacks_at_once else saved.needed_at * cost.backward
        ahead = max(ahead, total - needed)
    return total, ahead


# Stages of a pipeline


@dataclass(frozen=True, slots=True)
class SplitCost:
    """How the backward of a group is split into that of its inputs and that of its weights.

    Parameters
    ----------
    input_seconds, weight_seconds : float
        Seconds of compute of each.
    """

    input_seconds: float
    weight_seconds: float

    def __post_init__(self) -> None:
        check_seconds(input_seconds=self.input_seconds, weight_seconds=self.weight_seconds)


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on a stage.

    Parameters
    ----------
    groups : tuple of LayerCost
        The groups of the stage, in order of the forward.  Gaps are compute between them.
    splits : tuple of SplitCost
        For each group, if its backward can be split.  If empty, the input backward computes nothing and the weight
        backward is the full backward, as on PyTorch's first stage.
    boundary_bytes : int
        Bytes of the stage's input and output, unless they are among what the groups save, that are kept from the start
        of a microbatch's forward to the end of its full or weight backward.
    other_bytes : int
        Bytes that are always on the device: weights, the state of the optimizer, gradients that stay between steps.
    output_bytes : int
        Bytes of the output, unless it is saved, that are kept from a forward to the end of the step: the last stage
        returns it.
    gradient_bytes : tuple of int
        For each group the bytes of gradients of its weights that the first full or weight backward of a step allocates,
        and that stay until the step ends; none if empty.
    between_bytes : int
        Bytes that the input backward of a microbatch leaves on the device until the end of its weight backward, beside
        what the groups save: the gradients of which the weight backward computes those of the weights.

    Raises
    ------
    ValueError
        If there are splits or gradients, but not one entry for each group, or a number is negative.
    """

    groups: tuple[LayerCost, ...]
    splits: tuple[SplitCost, ...] = ()
    boundary_bytes: int = 0
    other_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: tuple[int, ...] = ()
    between_bytes: int = 0

    def __post_init__(self) -> None:
        check_kinds(LayerCost, groups=self.groups)
        check_kinds(SplitCost, splits=self.splits)
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "splits", tuple(self.splits))
        object.__setattr__(self, "gradient_bytes", tuple(self.gradient_bytes))
        for what, given in (("splits", self.splits), ("gradients", self.gradient_bytes)):
            if given and len(given) != len(self.groups):
                raise ValueError(f"There are {len(given)} {what} for {len(self.groups)} groups; give one for each.")
        for nbytes in self.gradient_bytes:
            check_bytes(gradient_bytes=nbytes)
        for name in ("boundary_bytes", "other_bytes", "output_bytes", "between_bytes"):
            check_bytes(**{name: getattr(self, name)})

    @property
    def nbytes(self) -> int:
        """Bytes that all groups save in one forward."""
        return sum(cost.nbytes for cost in self.groups)


# Times of the copies and of the compute of stages, in one number for each purpose


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
