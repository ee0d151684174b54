"""The stages of a rank: their groups, and how the forwards of their modules are followed.

They are followed by the plan of the rank; before there is one, everything is offloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from torch.nn import Module, Parameter

from ..engine.passes import ModelPass
from ..engine.statistics import Reason
from ..model.follow import FollowedModule, ModelState, handle_of, refuse_scripted
from ..model.groups import Names, find_modules
from ..model.replays import OperatorTimes
from ..model.steering import PassSettings, Steering
from ..replay.policy import Policy
from ..schedule.orders import Event, When
from ..schedule.plan import Action, Do, Plan
from ..schedule.schedules import GroupSchedule, leanest, leanest_calls
from ..tune.meter import saved_in, shared_bytes
from .conductor import Conductor

GROWN = 64  # a group may save this part more than in the plan


Group = tuple[tuple[int, int], ...]
"""What a group saves: place and bytes of each storage."""


def _size(group: Group) -> int:
    return sum(nbytes for _, nbytes in group)


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
        self.entries = names.entries
        state = ModelState(modules, conductor.engine)
        policies = {} if policy is None else dict.fromkeys(range(len(state.groups)), policy)
        super().__init__(state, GroupSchedule(), policies)
        self.saved: tuple[Group, ...] = ()  # in forwards that were followed whole, at most
        self._groups_of_saved: tuple[int, ...] = ()  # which they are
        self.replayed: frozenset[int] = frozenset()  # groups, in such a forward
        self._ran: frozenset[int] = frozenset()  # groups that ever ran
        self.outside = 0  # bytes that are saved outside of the groups or kept, at most
        self.operators: OperatorTimes | None = None  # times the operators of recomputed groups
        self.changed = False  # groups saved more bytes in a forward in which not all were followed

    def recompute(self, policies: Mapping[str, Policy]) -> None:
        """Recompute other groups from the next forward on, by their names, also those that were skipped."""
        self._always = {each.group: policies[each.name] for each in self.state.groups if each.name in policies}
        self.saved = ()

    @property
    def known(self) -> bool:
        """Whether the groups of the latest forward are those of which `saved` is: a forward may skip groups."""
        return bool(self.saved) and self._groups_of_saved == self.state.order

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each group saves."""
        return tuple(map(_size, self.saved))

    @property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of the gradients that the weights of each group do not have yet, in the order of the latest forward."""
        seen, found = set[Parameter](), list[int]()
        for group in self.state.order:
            new = set(self.state.groups[group].module.parameters()) - seen
            missing = (weight for weight in new if weight.requires_grad and weight.grad is None)
            found.append(sum(getattr(weight, "_local_tensor", weight).nbytes for weight in missing))
            seen |= new
        return tuple(found)

    @property
    def groups(self) -> list[FollowedModule]:
        """The groups in the order of the latest forward."""
        return [self.state.groups[group] for group in self.state.order]

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
        return PassSettings(plan_for, self._always, scoped, self.operators, begun)

    def pass_ends(self, done: ModelPass, sequence: Sequence[int]) -> None:
        """Learn the order of the groups, and what they save."""
        super().pass_ends(done, sequence)
        if done.model is None:  # the metadata inference, whose inputs nothing else references
            return
        saved = saved_in(done.layers)
        if done.partly:
            sizes = zip(map(_size, saved), self.sizes, strict=False)
            self.changed |= not self.known or any(has_grown(now, before) for now, before in sizes)
            return
        kept = (done.kept_outside.get(reason, (0, 0))[1] for reason in (Reason.OUTSIDE, Reason.KEPT))
        self.outside = max(self.outside, sum(kept) + shared_bytes(done.layers))
        if not self.saved or self._groups_of_saved != tuple(sequence):
            self.saved, self._groups_of_saved = tuple(saved), tuple(sequence)
            layers = zip(sequence, done.layers, strict=True)
            self.replayed = frozenset(group for group, layer in layers if layer.recomputed)
            self._ran = self._ran.union(sequence)
        else:  # a plan serves groups that save less, too, such as experts that get fewer tokens
            # What is kept has no place, so a measured group is not replaced by an equal one.
            pairs = zip(saved, self.saved, strict=True)
            self.saved = tuple(new if _size(new) > _size(old) else old for new, old in pairs)

    def plan(self) -> Plan:
        """Return which groups of the first microbatch are offloaded, as a plan of this stage alone."""
        order, plan = self.state.order, self._conductor.plan
        chosen = range(len(order)) if plan is None else self._conductor.offloaded(self.index, 0)
        calls = [call for k in range(len(order) - 1) if k in chosen for call in leanest_calls(k)]
        because, nbytes = "" if plan is None else plan.because, self.state.log.bytes_of(order)
        return Plan.of(max(len(order), 1), calls, names=self.names, nbytes=nbytes, because=because)
