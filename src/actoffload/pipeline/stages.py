"""The stages of a rank: their groups, and how the forwards of their modules are followed.

They are followed by the plan of the rank; before there is one, everything is offloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from torch.nn import Module, Parameter

from ..engine.passes import ModelPass
from ..engine.statistics import Reason
from ..model.follow import ModelState, handle_of, refuse_scripted
from ..model.groups import Names, find_modules
from ..model.replays import OperatorTimes
from ..model.steering import PassSettings, Steering
from ..planner import Variant
from ..replay.policy import Policy
from ..schedule.costs import LayerCost, StageCost
from ..schedule.orders import Event, Order, When
from ..schedule.plan import Action, Do, Plan
from ..schedule.schedules import GroupSchedule, leanest
from ..tune.costs import stage_cost, ways_of
from ..tune.meter import StepMeter, saved_sizes, shared_bytes
from .conductor import Conductor

GROWN = 64  # a group may save this part more than in the plan


def has_grown(now: int, before: int) -> bool:
    """Return whether a group saves so much more than before that another plan is made."""
    return now > before + before // GROWN


@lru_cache(maxsize=256)
def _forward_plan(layers: int, offloaded: frozenset[int] | None) -> Plan:
    """Return the plan of a forward that offloads some layers, which that of the rank frees; None: all, at once."""
    chosen = range(layers) if offloaded is None else sorted(k for k in offloaded if k < layers)
    calls = [(Event(When.FORWARD_START, k), Action(Do.OFFLOAD, k)) for k in chosen]
    if offloaded is None:
        calls += [(Event(When.FORWARD_END, k), Action(Do.RELEASE, k)) for k in chosen]
    return Plan.of(max(layers, 1), calls, rank=0)


class RankStage(Steering):
    """One stage of a rank: steers the forwards of its module; `policy` says what is saved of recomputed groups.

    Its `entries` are those of `layers` and `keep`, each with the reason if it means nothing in this stage; another
    stage may have it.  A module without groups, or one that is offloaded already, is a `ValueError`.
    """

    def __init__(self, stage: Any, conductor: Conductor, layers: Any, keep: Any, policy: Policy | None) -> None:
        self.index, self._conductor = int(stage.stage_index), conductor
        module = getattr(stage, "submod", None)
        if not isinstance(module, Module):
            raise ValueError(f"stage {self.index} has no module.")
        title = f"the module of stage {self.index}"
        refuse_scripted(module, f"stage {self.index}")
        if handle_of(module) is not None:
            raise ValueError(f"{title} is offloaded already: call remove() of its handle before offload(schedule).")
        names = Names(module, part=True)
        try:
            modules = find_modules(names, layers, keep)
        except ValueError as error:
            raise ValueError(f"{title}: {error}") from None
        self.entries, self.facts = names.entries, conductor.facts[self.index]
        state = ModelState(modules, conductor.engine)
        policies = {} if policy is None else dict.fromkeys(range(len(state.groups)), policy)
        super().__init__(state, GroupSchedule(), policies)
        self.saved: tuple[tuple[int, ...], ...] = ()  # by group: storages in forwards followed whole, at most
        self._sequence: tuple[int, ...] = ()  # of the groups that saved them
        self._replayed: frozenset[int] = frozenset()  # groups, in such a forward
        self._ran: frozenset[int] = frozenset()  # groups that ever ran
        self._outside = 0  # bytes that are saved outside of the groups or kept, at most
        self.timing = False  # the operators of recomputed groups are timed
        self._operators = OperatorTimes(conductor.engine.backend)
        self._gradients: tuple[int, ...] = ()  # bytes that the first backward of each group allocates for them
        self.ways: dict[str, tuple[Variant, ...]] = {}  # to run each group, by name, the first of them without replay
        self.changed = False  # groups saved more bytes in a forward in which not all were followed

    def recompute(self, policies: Mapping[str, Policy]) -> None:
        """Recompute other groups from the next forward on, by their names, also those that were skipped."""
        self._always = {each.group: policies[each.name] for each in self.state.groups if each.name in policies}
        self.saved = ()

    @property
    def known(self) -> bool:
        """Whether the groups of the latest forward are those of which `saved` is: a forward may skip groups."""
        return bool(self.saved) and self._sequence == self.state.order

    @property
    def traced(self) -> bool:
        """Whether the operators of all groups are known that are replayed, or what compiled ones save."""
        return self._operators.groups >= self._replayed.intersection(self.state.order)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each group saves."""
        return tuple(map(sum, self.saved))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups, in the order of the latest forward."""
        return self.state.names()

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings | None:
        """Return how the forward of a microbatch is followed.

        Of other forwards only the metadata inference is followed.  It calls the module; a loss may call a part of it.
        """
        conductor = self._conductor
        microbatch = conductor.forward_of(self.index)
        if microbatch is None and (alone or not conductor.training):
            return None
        if microbatch is None:  # the metadata inference of the schedule
            return PassSettings(lambda order: leanest(len(order)), self._always)
        offloaded, scoped = None, False
        if microbatch.planned:
            offloaded = conductor.offloaded(microbatch.stage, microbatch.number)
            if conductor.scoped and not self._adopts and not self.state.log.records:
                every = self._ran.issubset(self.state.order)  # otherwise those that were skipped may run again
                if every and conductor.idle and not self._always:
                    return None
                scoped = True
        begun = partial(conductor.pass_begins, microbatch)
        plan_for = lambda order: _forward_plan(len(order), offloaded)  # noqa: E731
        return PassSettings(plan_for, self._always, scoped, self._operators if self.timing else None, begun)

    def pass_ends(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Learn the order of the groups, and what they save."""
        super().pass_ends(done, sequence)
        if done.model is None:  # the metadata inference, whose inputs nothing else references
            return
        saved = saved_sizes(done.layers)
        if done.partly:
            self.changed |= not self.known or any(map(has_grown, map(sum, saved), self.sizes))
            return
        kept = (done.kept_outside.get(reason, (0, 0))[1] for reason in (Reason.OUTSIDE, Reason.KEPT))
        self._outside = max(self._outside, sum(kept) + shared_bytes(done.layers))
        if not self.saved or self._sequence != tuple(sequence):
            self.saved, self._sequence = tuple(saved), tuple(sequence)
            layers = zip(sequence, done.layers, strict=True)
            self._replayed = frozenset(group for group, layer in layers if layer.recomputed)
            self._ran = self._ran.union(sequence)
        else:  # a plan serves groups that save less, too, such as experts that get fewer tokens
            self.saved = tuple(max(pair, key=sum) for pair in zip(self.saved, saved, strict=True))

    def plan(self) -> Plan:
        """Return which groups of the first microbatch are offloaded, as a plan of this stage alone."""
        order, plan = self.state.order, self._conductor.plan
        offloaded = None if plan is None else self._conductor.offloaded(self.index, 0)
        because, nbytes = "" if plan is None else plan.because, self.state.log.bytes_of(order)
        found = _forward_plan(len(order), offloaded)
        return replace(found, rank=None, names=self.names, nbytes=nbytes, because=because)

    # Costs

    def note_gradients(self) -> None:
        """Note the bytes of the gradients that the weights of each group do not have yet."""
        seen, found = set[Parameter](), list[int]()
        for group in self.state.order:
            new = set(self.state.groups[group].module.parameters()) - seen
            missing = (weight for weight in new if weight.requires_grad and weight.grad is None)
            found.append(sum(getattr(weight, "_local_tensor", weight).nbytes for weight in missing))
            seen |= new
        self._gradients = tuple(found)

    def cost(self, order: Order, other_bytes: int = 0, meter: StepMeter | None = None) -> StageCost:
        """Return what the stage costs as its groups run now, in a step that was measured."""
        return stage_cost(self.index, self.saved, self.facts, order, self._outside, other_bytes, self._gradients, meter)

    def find_ways(self, cost: StageCost) -> None:
        """Find the ways to run each group.

        Backward comes to a replayed group with all that it saves, from which it replays.
        """
        groups, operators = self.state.order, self._operators
        batch = self.state.engine.backend.batch
        found = ways_of(groups, cost.groups, groups, operators.costs(), operators.saved, batch)
        every = [(own, *(way.map(_needed_at_once) for way in others)) for own, *others in found]
        self.ways = dict(zip(self.names, every, strict=True))

    def grow(self, plan: Plan) -> None:
        """Let the groups save as much more as one of them does than in a plan."""
        part = plan.part(self.index)
        if plan.names[part] == self.names:
            sizes = zip(self.sizes, plan.nbytes[part], strict=True)
            factor = max([1.0, *(now / planned for now, planned in sizes if planned)])
            grown = partial(LayerCost.with_bytes, factor=factor)
            self.ways = {name: tuple(way.map(grown) for way in ways) for name, ways in self.ways.items()}

    def outgrows(self, plan: Plan, cost: StageCost) -> bool:
        """Return whether there are other groups than when a plan was made with a cost, or larger tensors."""
        part, kept = plan.part(self.index), self.facts.boundary + self._outside
        # What a recomputed group saves may be counted with the group before it, which has a size to compare with.
        sizes = (pair for pair in zip(self.sizes, plan.nbytes[part], strict=False) if pair[1] or not self.ways)
        pairs = (kept, cost.boundary_bytes + cost.output_bytes), *sizes
        return plan.names[part] != self.names or any(has_grown(*pair) for pair in pairs)


def _needed_at_once(cost: LayerCost) -> LayerCost:
    return replace(cost, saved=tuple(replace(each, needed_at=0.0) for each in cost.saved))
