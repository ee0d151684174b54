"""What layers, stages and the link cost: the input of the simulations, and the times that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from .._arguments import check_bytes, check_fits, check_kinds, check_seconds, check_whole


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd saves in a layer and that may be offloaded.

    Parameters
    ----------
    nbytes : int
        Size in bytes; at least 1.
    saved_at, needed_at : float
        When forward saves it and when backward needs it, as fractions of the layer's forward and backward time.
    tensors : int
        For how many tensors it stands, which are copied together.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    nbytes: int
    saved_at: float = 1.0
    needed_at: float = 0.0
    tensors: int = 1

    def __post_init__(self) -> None:
        check_fits("the size of a tensor, at least 1 byte", lambda value: value >= 1, nbytes=self.nbytes)
        for name, section in (("saved_at", "forward"), ("needed_at", "backward")):
            expected = f"a fraction of the layer's {section} time, from 0.0 to 1.0"
            check_fits(expected, lambda value: 0.0 <= value <= 1.0, **{name: getattr(self, name)})


# Fields of a cost, in the order in which the parts of a layer run.
TIMES = "gap_forward", "forward", "gap_backward", "backward"
TEMPORARIES = "gap_forward_temporary", "forward_temporary", "gap_backward_temporary", "backward_temporary"


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Compute times of one layer, the tensors that it saves, and the other memory on the device.

    Parameters
    ----------
    forward, backward : float
        Seconds of compute without any waiting.
    saved : tuple of Saved
        In the order in which forward saves them.
    host_forward, host_backward : float
        Seconds in which the host queues this compute and that of the gap before it; 0 if not known.
    gap_forward, gap_backward : float
        Seconds of compute between the layers, before the forward and before the backward.
    other_bytes : tuple of int
        Bytes on the device apart from `saved`, such as weights, where forward starts and ends, and backward does.
    forward_temporary, backward_temporary : int
        Bytes that are allocated for a time inside, above the larger of what is allocated at the start and at the end.
    gap_forward_temporary, gap_backward_temporary : int
        The same of the gaps, such as the logits of a loss.
    kept_bytes : int
        Bytes from the end of forward to the end of backward that cannot be offloaded: casts of weights.
    weight_backward : float
        Seconds of `backward` for gradients of weights, where a stage of a pipeline computes these later.
    gradient_bytes : int
        Bytes of these gradients, from the first full or weight backward of a step of a pipeline to the end of the step.
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
        seconds = *TIMES, "host_forward", "host_backward", "weight_backward"
        check_seconds(**{name: getattr(self, name) for name in seconds})
        check_bytes(**{name: getattr(self, name) for name in (*TEMPORARIES, "kept_bytes", "gradient_bytes")})
        expected, four = "four numbers of bytes, each 0 or more", self.other_bytes
        check_fits(expected, lambda value: len(value) == 4 and all(level >= 0 for level in value), other_bytes=four)
        if not isinstance(self.saved, Iterable) or not all(isinstance(each, Saved) for each in self.saved):
            raise TypeError(f"saved is {self.saved!r}; expected a tuple of Saved.")
        object.__setattr__(self, "other_bytes", tuple(self.other_bytes))
        object.__setattr__(self, "saved", tuple(self.saved))
        times = [each.saved_at for each in self.saved]
        if times != sorted(times):
            raise ValueError(f"Tensors are saved at {times}; list them in the order in which forward saves them.")

    @property
    def nbytes(self) -> int:
        """Bytes of all saved tensors."""
        return sum(saved.nbytes for saved in self.saved)

    @property
    def input_backward(self) -> float:
        """Seconds of `backward` without those of the weights."""
        return max(self.backward - self.weight_backward, 0.0)

    def in_batches(self, nbytes: int) -> LayerCost:
        """Return the cost where copies to the host wait until they have `nbytes` bytes, or the forward has ended.

        >>> [each.saved_at for each in LayerCost.even(1000, 0.010, 0.020, pieces=5).in_batches(400).saved]
        [0.4, 0.4, 0.8, 0.8, 1.0]
        """
        saved, batch = list[Saved](), list[Saved]()
        for each in self.saved:
            batch.append(each)
            if sum(one.nbytes for one in batch) >= nbytes:
                saved += [replace(one, saved_at=each.saved_at) for one in batch]
                batch = []
        return replace(self, saved=(*saved, *(replace(one, saved_at=1.0) for one in batch)))

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
        Bytes per second in sum while both are busy: the direction that was busy first keeps its own, and the other has
        what is left.
    """

    d2h: float
    h2d: float
    both: float | None = None

    def __post_init__(self) -> None:
        rates = {"d2h": self.d2h, "h2d": self.h2d} | ({} if self.both is None else {"both": self.both})
        check_fits("bytes per second, more than 0", lambda value: value > 0, **rates)

    @staticmethod
    def slowest(links: Iterable[Link]) -> Link:
        """Return the lowest rates of some links: those of ranks, which wait for each other."""
        d2h, h2d, both = zip(*((link.d2h, link.h2d, link.both) for link in links), strict=True)
        return Link(min(d2h), min(h2d), min((each for each in both if each is not None), default=None))

    def end(self, start: float, seconds: float, busy: float, *, back: bool) -> float:
        """Return when copies end that take some seconds alone, while the other direction is busy until a time."""
        if busy <= start or self.both is None or self.both >= self.d2h + self.h2d:
            return start + seconds
        own, other = (self.h2d, self.d2h) if back else (self.d2h, self.h2d)
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
        Bytes of input and output, unless groups save them, from the start of a microbatch's forward to the end of its
        full or weight backward.
    other_bytes : int
        Bytes that are always on the device: weights, the state of the optimizer, gradients that stay between steps.
    output_bytes : int
        Bytes of the output, unless it is saved, from a forward to the end of the step: the last stage returns it.
    between_bytes : int
        Bytes from the input backward of a microbatch to the end of its weight backward, beside what the groups save.
    split : bool
        Whether its backward can be split.  Otherwise the weight backward is the full one, as on PyTorch's first stage.

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
        names = "boundary_bytes", "other_bytes", "output_bytes", "between_bytes"
        check_bytes(**{name: getattr(self, name) for name in names})

    @property
    def nbytes(self) -> int:
        """Bytes that all groups save in one forward."""
        return sum(cost.nbytes for cost in self.groups)
