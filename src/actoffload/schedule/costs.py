"""What layers, stages and the link cost: the input of the simulations, and the times that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from .._arguments import check_bytes, check_fits, check_kinds, check_seconds, check_whole
from .orders import Computation


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
    weight_backward : float
        Seconds of `backward` that compute gradients of weights alone, where a stage of a pipeline does that later.
    gradient_bytes : int
        Bytes of gradients of its weights that the first full or weight backward of a step of a pipeline allocates, and
        that stay until the step ends.
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
    weight_backward: float = 0.0
    gradient_bytes: int = 0
    unpacks_at_once: bool = False

    def __post_init__(self) -> None:
        gaps = "gap_forward", "gap_backward", "weight_backward"
        for name in ("forward", "backward", "host_forward", "host_backward", *gaps):
            check_seconds(**{name: getattr(self, name)})
        temporaries = "forward_temporary", "backward_temporary", "gap_forward_temporary", "gap_backward_temporary"
        for name in (*temporaries, "kept_bytes", "gradient_bytes"):
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
    def input_backward(self) -> float:
        """Seconds of `backward` without those of the weights."""
        return max(self.backward - self.weight_backward, 0.0)

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


# Stages of a pipeline


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on a stage.

    Parameters
    ----------
    groups : tuple of LayerCost
        The groups of the stage, in order of the forward.  Gaps are compute between them.
    boundary_bytes : int
        Bytes of the stage's input and output, unless they are among what the groups save, that are kept from the start
        of a microbatch's forward to the end of its full or weight backward.
    other_bytes : int
        Bytes that are always on the device: weights, the state of the optimizer, gradients that stay between steps.
    output_bytes : int
        Bytes of the output, unless it is saved, that are kept from a forward to the end of the step: the last stage
        returns it.
    between_bytes : int
        Bytes that the input backward of a microbatch leaves on the device until the end of its weight backward, beside
        what the groups save: the gradients of which the weight backward computes those of the weights.
    split : bool
        Whether its backward can be split.  Otherwise the input backward computes nothing and the weight backward is the
        full backward, as on PyTorch's first stage.

    Raises
    ------
    ValueError
        If a number is negative.
    """

    groups: tuple[LayerCost, ...]
    boundary_bytes: int = 0
    other_bytes: int = 0
    output_bytes: int = 0
    between_bytes: int = 0
    split: bool = False

    def __post_init__(self) -> None:
        check_kinds(LayerCost, groups=self.groups)
        object.__setattr__(self, "groups", tuple(self.groups))
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


class Part(NamedTuple):
    """The compute of one group in one step."""

    gap: float
    seconds: float
    host: float
    temporary: int  # bytes allocated for a time
    gap_temporary: int
    levels: tuple[int, int]  # bytes beside those of the rank, where it starts and where it ends
    uses: tuple[Use, ...]
    at_once: bool  # it writes all before it saves any, and frees all when it ends
    kept: int = 0  # bytes that it keeps, or frees if negative, beside the saved ones
    gradients: int = 0  # bytes that stay from the first such step on
    frees: bool = False  # it frees what it uses
    last: bool = False  # nothing uses it later


class GroupTimes:
    """Copies of one group in seconds, which are `exact` to the tensor, or of all of them as one piece."""

    def __init__(self, cost: LayerCost, link: Link, *, split: bool, exact: bool) -> None:
        self.cost, self.nbytes, self._link, self._split, self._exact = cost, cost.nbytes, link, split, exact
        # The copies to the host, and from the start of forward until all are done, if the queue is free.
        self.out = self.out_after = 0.0
        for saved in cost.saved:
            seconds = saved.nbytes / link.d2h
            self.out += seconds
            self.out_after = max(self.out_after, saved.saved_at * cost.forward) + seconds
        # From the start of forward until the first copy can start.
        self.out_ready = cost.saved[0].saved_at * cost.forward if cost.saved else 0.0
        # The copies back, and by how much they must start before a backward does, without a stall.
        self.back, self.back_ahead = 0.0, float("-inf")
        self.input_ahead = self.back_ahead
        backward = cost.input_backward if split else cost.backward
        for saved in reversed(cost.saved):
            self.back += saved.nbytes / link.h2d
            needed_at = 0.0 if cost.unpacks_at_once else saved.needed_at
            self.back_ahead = max(self.back_ahead, self.back - needed_at * cost.backward)
            self.input_ahead = max(self.input_ahead, self.back - needed_at * backward)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the group."""
        saved, link = self.cost.saved, self._link
        if self._exact:
            return tuple(Piece(each.nbytes, 1, each.nbytes / link.d2h, 0.0, each.nbytes / link.h2d) for each in saved)
        one = Piece(self.nbytes, len(saved), self.out, self.out_after - self.out_ready, self.back)
        return (one,) if saved else ()

    def _uses(self, computation: Computation) -> tuple[Use, ...]:
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

    def part(self, computation: Computation) -> Part:
        """Return the compute of the group in a computation."""
        cost, split = self.cost, self._split and computation is not Computation.BACKWARD
        at_once = self._exact and cost.unpacks_at_once
        if computation is Computation.FORWARD:
            temporaries, levels = (cost.forward_temporary, cost.gap_forward_temporary), cost.other_bytes[:2]
            times = cost.gap_forward, cost.forward, cost.host_forward
            return Part(*times, *temporaries, levels, self._uses(computation), at_once, kept=cost.kept_bytes)
        temporaries, levels = (cost.backward_temporary, cost.gap_backward_temporary), cost.other_bytes[2:]
        times, gradients = (cost.gap_backward, cost.backward, cost.host_backward), cost.gradient_bytes
        uses = self._uses(computation if split else Computation.BACKWARD)
        full = Part(*times, *temporaries, levels, uses, at_once, -cost.kept_bytes, gradients, frees=True, last=True)
        if not split:
            return full
        # Neither half frees anything before it ends.
        first = cost.host_backward * (cost.input_backward / cost.backward if cost.backward else 1.0)
        half = full._replace(kept=0, frees=False)
        if computation is Computation.BACKWARD_INPUT:
            return half._replace(seconds=cost.input_backward, host=first, gradients=0, last=False)
        return half._replace(gap=0.0, seconds=cost.weight_backward, host=cost.host_backward - first)


class StageTimes:
    """The steps of one stage, with copies that are `exact` to the tensor, or one piece for each group."""

    def __init__(self, cost: StageCost, link: Link, *, exact: bool) -> None:
        self.cost = cost
        self.groups = [GroupTimes(group, link, split=cost.split, exact=exact) for group in cost.groups]
        self.pieces = [group.pieces for group in self.groups]
        # The compute of the groups in each computation, in order of execution; none if it computes nothing.
        self.parts = {
            Computation.FORWARD: [group.part(Computation.FORWARD) for group in self.groups],
            Computation.BACKWARD_INPUT: list[Part](),
        }
        halves = Computation.BACKWARD_INPUT, Computation.BACKWARD_WEIGHT
        for computation in (Computation.BACKWARD, *(halves if cost.split else halves[1:])):
            self.parts[computation] = [group.part(computation) for group in reversed(self.groups)]
