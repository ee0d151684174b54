"""Time the operators of recomputed groups on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from .._torch.tensors import storage_address, tree_leaves
from ..device.base import Backend, StreamEvent, current_stream
from ..planner import OperatorCost
from ..recompute import COSTLY, Reads, Trace, named, saveable

__all__ = ["OperatorTimes"]

EVENTS = 1e-5  # seconds that two events of an operator are apart, at most, if it runs nothing on the device


class _Run(NamedTuple):
    operator: Any
    number: int
    begun: StreamEvent
    ended: StreamEvent
    sizes: tuple[int, ...]  # bytes of the outputs that can be saved, each with memory of its own


class OperatorTimes:
    """Times each operator in the forward of the groups that are recomputed in one pass, with two events each.

    The events are on the stream of the group.  What runs on another one takes none of its time, and its outputs are not
    worth saving: inside of a group FSDP2 gathers the weights of the next one.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._runs: dict[int, list[_Run]] = {}  # by group
        self._known: dict[int, tuple[Reads, Trace]] = {}

    def of(self, group: int, reads: Reads, trace: Trace) -> Callable[[Any, int, partial[Any]], Any]:
        """Return a function that runs and times an operator of a group, given the number of its calls before.

        `reads` says which outputs recomputation reads, and `trace` which operators it runs for what.
        """
        if group in self._runs:  # only its first call is timed
            return lambda operator, number, run: run()
        runs, backend = self._runs.setdefault(group, []), self._backend
        stream = current_stream(backend)
        self._known[group] = reads, trace

        def timed(operator: Any, number: int, run: partial[Any]) -> Any:
            begun = backend.record_timed(stream)
            outputs = run()
            ended = backend.record_timed(stream)
            sizes: tuple[int, ...] = ()
            # [guard: output of another stream -> True]
            if current_stream(backend) == stream and saveable(operator, run.args, run.keywords):
                read = set(map(storage_address, _tensors((run.args, run.keywords))))
                made = [of for of in _tensors(outputs) if of.numel() and storage_address(of) not in read]
                sizes = tuple([of.nbytes for of in made])
            runs.append(_Run(operator, number, begun, ended, sizes))
            return outputs

        return timed

    def costs(self) -> dict[int, list[OperatorCost]]:
        """Return the operators of each group in the order in which they ran.

        Groups that run the same operators with outputs of the same sizes take the same time: the median.  What the
        shortest takes, if it is so little that it ran nothing on the device, is that of two events: all are less by it.
        """
        elapsed = self._backend.elapsed
        alike: dict[tuple[tuple[Any, int, tuple[int, ...]], ...], list[int]] = defaultdict(list)
        for group, runs in self._runs.items():
            reads, _ = self._known[group]
            keys = [(run.operator, run.number) for run in runs]
            sizes = [run.sizes if key in reads else () for key, run in zip(keys, runs, strict=True)]
            alike[tuple((*key, of) for key, of in zip(keys, sizes, strict=True))].append(group)
        found = {}
        for operators, groups in alike.items():
            times = [[elapsed(run.begun, run.ended) for run in self._runs[group]] for group in groups]
            usual = [median(of) for of in zip(*times, strict=True)]
            none = min(max(min(usual, default=0.0), 0.0), EVENTS)
            _, trace = self._known[groups[-1]]
            costs = [
                OperatorCost(
                    named(operator, number),
                    max(seconds - none, 0.0),
                    sizes,
                    costly=operator in COSTLY,
                    returned=trace.results.get((operator, number), 0),
                )
                for (operator, number, sizes), seconds in zip(operators, usual, strict=True)
            ]
            if len(trace.reads) == len(costs):  # [guard: group that is not traced]
                costs = [
                    replace(of, reads=reads, needed=needed)
                    for of, reads, needed in zip(costs, trace.reads, trace.needed, strict=True)
                ]
            found.update(dict.fromkeys(groups, costs))
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [of for of in tree_leaves(tree) if isinstance(of, torch.Tensor)]
