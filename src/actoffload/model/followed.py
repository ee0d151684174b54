"""The followed modules of a model, and the settings with which a pass follows them.

`[Note: modes]`  Where the whole forward is followed, saved-tensor hooks are installed once, around the call of the
model, and the calls of its modules only change the group that packs.  Every saved tensor then costs host time, also in
groups that keep everything.  A plan that was chosen from measurements needs no more than the tensors of the groups that
it offloads: there the hooks are installed around these groups alone, and a forward that offloads nothing runs without.
Of a group that is recomputed and not offloaded they see the inputs only.  Those that all groups have, such as the
angles of rotary embeddings, it keeps until its backward, so a copy of them from another group would free nothing.
"""

from __future__ import annotations

import enum
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch.nn import Module

from .._torch.autograd import in_transform, saved_tensor_hooks, saved_tensor_hooks_disabled
from ..engine.hooks import unpack
from ..engine.passes import ModelPass
from ..planner import GroupPlan
from ..replay import Policy, Program
from ..schedule.execution_order import GroupKey
from ..schedule.plan import Roles

__all__ = [
    "DELETED",
    "DROPPED",
    "GROUP",
    "KEPT",
    "ROOT",
    "FollowedModule",
    "Mode",
    "PassSettings",
    "Steering",
    "TakeTimes",
    "group_name",
    "lost_modules",
    "obstacle_to_hooks",
    "split_group_name",
]

ROOT, GROUP, KEPT, DROPPED = "root", "group", "kept", "dropped"

_WHOLE = "(the whole model)"

TakeTimes: TypeAlias = Callable[[int, Program, Mapping[int, tuple[Any, Any]]], None]


class Mode(enum.Enum):
    """Where saved-tensor hooks are installed in a forward; see [Note: modes]."""

    IDLE = "nowhere"
    SCOPED = "in the groups that are offloaded or recomputed"
    WHOLE = "in the whole forward"


@dataclass(frozen=True, slots=True)
class PassSettings:
    """Settings of one pass: the mode, the expected order of the groups, and what a plan for an order means."""

    mode: Mode
    order: Sequence[GroupKey] = ()
    roles_of: Callable[[tuple[GroupKey, ...]], Roles] = lambda order: Roles.keep_all(len(order))
    recompute: Mapping[int, Policy] = field(default_factory=dict)  # by group: what is saved where it is recomputed
    take_times: TakeTimes | None = None  # takes the times of the operators of a group
    begun: Callable[[ModelPass[GroupKey]], None] | None = None  # called with the pass before its first group


class Steering(Protocol):
    """Decides how the forwards of a model are followed, and sees what they did."""

    def forward_begins(self, inputs: tuple[Any, Any], *, alone: bool, busy: bool) -> PassSettings:
        """Return how the forward that begins now is followed.

        Parameters
        ----------
        inputs : tuple
            Arguments and keyword arguments of the module that is called.
        alone : bool
            A group is called, and not the model itself.
        busy : bool
            Another thread runs a forward of the model.
        """

    def forward_ends(self, output: Any) -> None:
        """Note that the model returns `output`."""

    def pass_ends(
        self, done: ModelPass[GroupKey], sequence: Sequence[GroupKey]
    ) -> tuple[Steering, Callable[[], None]] | None:
        """Note a followed forward that has ended, and the sequence of its groups; not called in `Mode.IDLE`.

        Returns what steers from now on, and what to call when no forward is in progress; None for no change.
        """

    @property
    def settling(self) -> bool:
        """Whether passes are measured for a plan that is not final."""

    def retire(self) -> None:
        """Stop measuring: the model is followed no longer, or something else steers."""

    def plan(self) -> GroupPlan:
        """Return the present plan."""

    def costs(self) -> Any:
        """Return the `Findings` of the plan; raise a `RuntimeError` if nothing was measured."""

    def facts(self) -> dict[str, Any]:
        """Return what is known of whole steps, as fields of `Report`."""


@dataclass(eq=False)
class FollowedModule:
    """A module whose calls are followed.  It is referenced weakly, because the module itself refers to this object."""

    role: str  # ROOT, GROUP or KEPT; DROPPED for one that turned out to be no group
    name: str
    ref: weakref.ref[Module]
    group: int = -1  # its index among the chosen modules
    kind: str = ""  # groups of one kind are scheduled alike
    compiled: bool = False  # it was called in a model that is compiled as a whole

    @property
    def module(self) -> Module:
        """The module, which must still exist."""
        found = self.ref()
        assert found is not None
        return found


def group_name(name: str, part: int = 0) -> str:
    """Return what plans and reports call a group: a readable name of its module, and which part of it."""
    return (name or _WHOLE) + (f" (part {part + 1})" if part else "")


def split_group_name(name: str) -> tuple[str, int]:
    """Return the name of the module of a group, and which part of it the group is.

    >>> from actoffload.model.followed import group_name, split_group_name
    >>> split_group_name(group_name("layers.0", 1)), split_group_name(group_name(""))
    (('layers.0', 1), ('', 0))
    """
    number = re.search(r" \(part (\d+)\)$", name)
    module, part = (name, 0) if number is None else (name[: number.start()], int(number[1]) - 1)
    return "" if module == _WHOLE else module, part


DELETED = (
    "Nothing is offloaded: the module that was passed to offload has been deleted. Keep a reference to it, or pass the "
    "model that its parts belong to, with layers=[...]."
)


def lost_modules(modules: Iterable[FollowedModule]) -> str:
    """Return a sentence about the first followed module that does not exist any more; empty if all do."""
    lost = [followed.name for followed in modules if followed.ref() is None and followed.role not in (ROOT, DROPPED)]
    if not lost:
        return ""
    return (
        f"The module '{lost[0]}' has been replaced or deleted since offload was called; what took its place is not "
        "offloaded. Call remove() of the handle, then offload again."
    )


def obstacle_to_hooks() -> str | None:
    """Return where a forward runs if saved-tensor hooks installed now would not receive its saved tensors."""
    if in_transform():
        return (
            "inside torch.func.grad, jvp and other transforms, which do not support saved-tensor hooks. Use "
            "torch.func.functional_call with torch.autograd.grad or backward."
        )
    if saved_tensor_hooks_disabled() is not None:
        return (
            "inside torch.autograd.graph.disable_saved_tensors_hooks, which forbids saved-tensor hooks. Call the model "
            "outside of that block."
        )
    hooks = saved_tensor_hooks()
    if hooks is None:
        return None
    if hooks[1] is unpack:
        return "inside the forward of another offloaded model or layer, which offloads its tensors. Offload one only."
    return (
        "under saved-tensor hooks of another library, such as those of torch.utils.checkpoint around the whole model "
        "or torch.autograd.graph.save_on_cpu. Use them around parts of the model only."
    )
