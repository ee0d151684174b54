"""The ranks of one sharded or data-parallel model: they measure in the same passes, and follow one plan.

`[Note: ranks decide together]`  The ranks of a sharded or data-parallel model wait for each other in each layer.  If
each decided by itself, one would replay everything while another times its plan, and each would choose another
plan.  So the first rank decides: for each pass that is measured it posts its stage, and what is known by then, before
its own forward begins.  The others take that message at the start of the same pass, and run the same stage.  At the end
it posts the plan.  The memory of all ranks counts: each posts how much room it has, and the least is planned with.

When the plan no longer fits in a rank, the first one announces a pass that all ranks have still ahead, and that is a
multiple of a window.  The others look for an announcement at these passes only: a steady pass needs no message.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from ..._text import register
from ..._torch.modules import DATA_PARALLEL, active_data_parallel, default_store
from ..._warnings import warn
from ...planner import Variant
from ...schedule.costs import LayerCost, Link, Saved
from ...tune.exchange import LONE, Exchange, LostRankError, disagreement
from .findings import Findings, Room
from .metering import Peak, Stage

T = TypeVar("T")

WINDOW = 8  # passes between two looks for an announcement
FIRST = "in the first forward"
ALONE = (
    "So this rank decides alone from here on what is offloaded, and steps may take longer. Call the model equally "
    "often in all ranks, and end or change offloading in all of them."
)


@dataclass(frozen=True)
class Decision:
    """What a pass is for, and what is known; without a stage measuring is over."""

    stage: Stage | None
    found: Findings


register(Decision, Findings, Peak, Room, Stage, Variant, LayerCost, Saved, Link)


def ranks_of(model: Module) -> tuple[int, ...]:
    """Return the global ranks that run a model together, ascending; empty if it runs in this process alone.

    Its parameters are distributed over a device mesh, or it is wrapped for data parallelism: from outside, as a whole
    or in part.
    """
    if default_store is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return ()
    found = max(_groups_of(model), key=len, default=())
    return found if len(found) > 1 and dist.get_rank() in found else ()


def _groups_of(model: Module) -> Iterator[tuple[int, ...]]:
    meshes = {
        id(mesh): mesh for weight in model.parameters() if (mesh := getattr(weight, "device_mesh", None)) is not None
    }
    for mesh in meshes.values():
        yield tuple(sorted(mesh.mesh.flatten().tolist()))
    for module in (active_data_parallel(), *model.modules()):
        if any(base.__name__ in DATA_PARALLEL for base in type(module).__mro__):
            yield tuple(sorted(dist.get_process_group_ranks(module.process_group)))


class Ranks:
    """The ranks of one model, which meet in its first forward; see [Note: ranks decide together].

    Measuring and what follows it is one epoch, numbered from 0.  `arguments` are what this rank passed to `offload`.
    """

    def __init__(self, model: weakref.ref[Module], arguments: Mapping[str, str]) -> None:
        self._model, self._arguments = model, arguments
        self.exchange = LONE
        self._epoch = 0
        self._again: int | None = None  # pass with which the next epoch begins
        self._asked = False  # for a new epoch
        self._shown = False  # how much memory this rank has

    @property
    def follows(self) -> bool:
        """Whether another rank decides."""
        return not self.exchange.leads

    def meet(self) -> None:
        """Find the other ranks, and compare the arguments.

        Raises
        ------
        ValueError
            In all ranks, if arguments differ.
        """
        model = self._model()
        ranks = () if model is None else ranks_of(model)
        self.exchange = Exchange.of("model", ranks)
        problem = self._try("", self._compare)
        if problem:
            self.exchange = LONE
            raise ValueError(problem)

    def _compare(self) -> str:
        """Return what is wrong with the arguments of the ranks; empty if nothing is."""
        exchange, own = self.exchange, self._arguments
        if exchange.leads:
            others, missing = exchange.collect("arguments")
            if missing:
                warn(
                    f"{exchange.waited(missing, FIRST)} This rank goes on. Call actoffload.offload in all ranks of "
                    "a sharded or data-parallel model."
                )
            problem = disagreement({exchange.rank: own, **others})
            exchange.post("problem", (problem, own))
            return problem
        exchange.send("arguments", own)
        problem, theirs = exchange.receive(["problem"], FIRST)
        # It may have come too late.
        return problem or disagreement({exchange.leader: theirs, exchange.rank: own})

    def _try(self, otherwise: T, call: Callable[..., T], *arguments: Any) -> T:
        """Return what an exchange gives; once a rank that is needed is lost, this one decides alone."""
        try:
            return call(*arguments)
        except LostRankError as lost:
            self.exchange = LONE
            warn(f"{lost} {ALONE}")
            return otherwise

    # Measuring

    def decide(self, number: int, decision: Decision) -> None:
        """Post what a pass is for, if this rank decides; without a stage, for all passes that follow."""
        if self.exchange.leads:
            self._try(None, self.exchange.post, self._key("end" if decision.stage is None else number), decision)

    def decision(self, number: int) -> Decision | None:
        """Wait for what a pass is for; None if this rank decides alone from here on."""
        keys = self._key(number), self._key("end")
        found: Decision | None = self._try(None, self.exchange.receive, keys, f"in pass {number} of the model")
        return found

    def show_room(self, room: Room) -> None:
        """Post how much memory this rank has without offloading, as measured first."""
        if not self._shown:
            self._shown = True
            self._try(None, self.exchange.send, self._key("room"), room)

    def room_of_all(self, own: Room) -> Room:
        """Return the room with which a plan fits in all ranks."""
        none: tuple[dict[int, Any], list[int]] = {}, []
        others, missing = self._try(none, self.exchange.collect, self._key("room"))
        if missing:
            waited = self.exchange.waited(missing, "to measure")
            warn(f"{waited} Its memory counts no more. Call the model equally often in all ranks.")
        return own.for_all(others.values())

    # Later

    def begins_again(self, number: int, *, wanted: bool) -> bool:
        """Return whether a new epoch begins with this pass, which is a multiple of `WINDOW`.

        Where it is wanted, the leading rank announces it; another rank asks for it.
        """
        return wanted if self.exchange.alone else self._try(False, self._announced, number, wanted)

    def _announced(self, number: int, wanted: bool) -> bool:
        exchange, asked, announced = self.exchange, self._key("ask"), self._key("again")
        if exchange.leads:
            if self._again is None and (wanted or exchange.has(asked)):
                self._again = number + WINDOW
                exchange.post(announced, self._again)
        else:
            if self._again is None and exchange.has(announced):
                self._again = exchange.take(announced, len(exchange.ranks) - 1)
            if self._again is None and wanted and not self._asked:
                self._asked = True
                exchange.post(asked, True)
        if self._again is None or number < self._again:
            return False
        if exchange.leads and exchange.has(asked):
            exchange.take(asked)
        late, self._again = number > self._again, None
        self._asked = self._shown = False
        self._epoch += 1
        if late and not exchange.leads:
            self.show_room(Room())  # it may have missed the pass that shows its memory
        return True

    def leave(self) -> None:
        """Take no further part."""
        self.exchange.leave()
        self.exchange = LONE

    def _key(self, name: int | str) -> str:
        return f"{self._epoch}/{name}"
