"""Follows one model as it runs: which of its groups runs in a thread, and what autograd saves there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch

from .._torch import unsupported
from .._torch.modules import opaque, tracing
from .._torch.tensors import (
    NO_BACKWARD,
    SavedTensorHooks,
    backward_id,
    in_transform,
    leaves,
    saved_tensor_hooks,
    saved_tensor_hooks_disabled,
)
from .._warnings import explainers, warn
from ..engine.eligibility import ModelTensors, ModuleTensors, running
from ..engine.hooks import Packer, unpack
from ..engine.layer import Layer
from ..engine.passes import ModelPass, pass_in_backward
from ..replay.tracer import remove_tracers
from ..schedule.schedules import ExecutionOrder
from .follow import GROUP, KEPT, REASON, ROOT, FollowedModule, lost_modules, unfollow
from .replays import Replays, RunningCall
from .reporting import TITLE, coverage_warning, what_holds_memory
from .steering import PassSettings, Steering


@dataclass(eq=False, slots=True)
class Call:
    """A call of a followed module that has not returned yet."""

    followed: FollowedModule
    layer: Layer | None = None
    replay: RunningCall | None = None


class ThreadState(threading.local):
    """The pass and the calls of one thread."""

    def __init__(self) -> None:
        self.current: ModelPass | None = None
        self.owned: ModelTensors | None = None
        self.calls: list[Call] = []
        self.hooks: SavedTensorHooks | None = None  # of the forward, installed or not
        self.settings = PassSettings()
        self.idle = False  # a forward runs that is not followed
        self.backends = 0  # length of `running.backends` outside of the outermost call
        # A gradient taken inside a forward saves tensors in autograd's threads, which share this object.
        self.packer = Packer()


DELETED = (
    "Nothing is offloaded: the module that was passed to offload has been deleted. Keep a reference to it, or pass the "
    "model that its parts belong to, with layers=[...]."
)
IN_BACKWARD = (
    "Nothing is offloaded in this forward, which runs inside of a backward; outside of one it is. If "
    "torch.utils.checkpoint is around the whole model, checkpoint parts of the model only."
)


class Tracker:
    """Turns the calls of a model's modules into passes."""

    def __init__(self, steering: Steering) -> None:
        state = self.state = steering.state
        self.steering, self._engine = steering, state.engine
        self._thread = ThreadState()
        self.warned: list[str] = []
        self._running: set[int] = set()  # threads in a forward
        self._retiring = False  # its modules are followed until no forward runs any more
        self.replays = Replays(state.modules, state.engine.backend, state.engine.limit().nbytes)
        self._stopped = unsupported() is not None
        self.pauses = WeakSet[object]()  # what pauses offloading, while it is alive
        self._latest: Callable[[], ModelPass | None] = lambda: None  # a weak reference to the latest pass
        explainers.add(self)

    @property
    def depth(self) -> int:
        """Number of followed calls in progress in this thread."""
        return len(self._thread.calls)

    @property
    def paused(self) -> bool:
        """Whether no forward is followed that begins now."""
        return self._stopped or len(self.pauses) > 0

    # Begin

    def begin(
        self, followed: FollowedModule, args: Any, kwargs: Any, *, compiled: bool = False
    ) -> Callable[..., Any] | None:
        """Begin the forward of a module; return what calls it if backward runs it again as a whole."""
        thread = self._thread
        followed.compiled = compiled
        if thread.idle:
            return None
        if backward_id() != NO_BACKWARD:  # [guard: recomputation in backward]
            # Checkpointing with saved-tensor hooks was warned about in the forward.
            if followed.role is ROOT and not self.paused and torch.is_grad_enabled() and saved_tensor_hooks() is None:
                self.warn_once(IN_BACKWARD)
            return None
        if thread.hooks is None and not self._begin_forward(followed, args, kwargs):
            return None
        if followed.role is not KEPT and any(each.followed.role is GROUP for each in thread.calls):
            return None  # [guard: calls inside of a group] which are a part of it
        call = Call(followed)
        thread.calls.append(call)
        if followed.role is GROUP:
            assert thread.current is not None
            assert thread.owned is not None
            owned = ModuleTensors(followed.module, thread.owned)
            call.layer = thread.current.group_start(followed.group, leaves((args, kwargs)), owned)
        self._resume()
        return None if call.layer is None else self._replay(call, call.layer, args, kwargs)

    def _begin_forward(self, followed: FollowedModule, args: Any, kwargs: Any) -> bool:
        """Begin a forward of the model, or of a group that is called alone; return whether it is followed."""
        thread = self._thread
        self._finish()
        if self.paused or not torch.is_grad_enabled() or tracing():  # [guard: forward that is traced]
            return False
        root = self.state.root.ref()
        if root is None:  # [guard: model that is deleted]
            self.warn_once(DELETED)
            return False
        if self.state.meet is not None:
            meet, self.state.meet = self.state.meet, None
            meet()
        current, alone = thread.current, followed.role is not ROOT
        # [guard: pass of a loop over the groups -> False]
        if alone and current is not None and not current.open:
            thread.current = None
            self._learn(current)  # [guard: learned order of a loop] its forward ends with no call of the root
            current = None
        settings = self.steering.forward_begins((args, kwargs), alone=alone, busy=bool(self._running))
        if settings is None:
            thread.calls.append(Call(followed))
            thread.idle = True
            self._running.add(threading.get_ident())  # thread in a forward that is not followed
            return False
        obstacle = _obstacle_to_hooks()
        if obstacle is not None:
            self.warn_once(f"Nothing is offloaded in a forward {obstacle}")
            return False
        self.replays.forward_begins()
        thread.settings = settings
        if not alone or current is None:
            for message in lost_modules(self.state.modules):
                self.warn_once(message)
            thread.owned = ModelTensors(root, thread.owned)
            order, owned = ExecutionOrder(self.state.order), ModuleTensors(None, thread.owned)
            current = ModelPass(self._engine, order, settings.plan_for, owned, partly=settings.scoped)
            if settings.begun is not None:
                settings.begun(current)
            thread.current, self._latest = current, ref(current)
        thread.packer = Packer()
        thread.backends = len(running.backends)
        thread.hooks = SavedTensorHooks(thread.packer.pack, unpack)
        if not settings.scoped:
            thread.hooks.install()  # [guard: saved-tensor hooks]
        running.backends.append(self._engine.backend)  # [guard: is_cpu_offload_enabled in a forward]
        self._running.add(threading.get_ident())
        if not alone:
            current.take_inputs(leaves((args, kwargs)))
        return True

    def _replay(self, call: Call, layer: Layer, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """Begin to replay the call of a group; return what calls it if backward runs it again as a whole."""
        thread, followed = self._thread, call.followed
        policy = thread.settings.recompute.get(followed.group)
        if policy is None or not torch.is_grad_enabled():
            return None
        begun = self.replays.begin(followed, policy, thread.packer.split(), args, kwargs, thread.settings.operators)
        if begun is None:
            return None
        layer.recomputed = policy
        if not isinstance(begun, RunningCall):
            return begun
        call.replay = begun
        thread.packer.take_aside(begun.pack)
        return None

    def warn_once(self, message: str) -> None:
        """Warn, if that was not said before."""
        if message not in self.warned:
            self.warned.append(message)
            warn(f"{message} This is reported once.")

    def _resume(self) -> None:
        """Pack what is saved from here on for the innermost call, which begins or continues."""
        thread = self._thread
        current, call = thread.current, thread.calls[-1]
        assert current is not None
        if thread.settings.scoped and not self._install_here(current, call):
            return
        if call.followed.role is ROOT:
            thread.packer.take_for(current, current.between)
        elif call.followed.role is KEPT:
            thread.packer.take_for(current, current.withheld)
        else:
            assert call.layer is not None
            if call.replay is None:
                thread.packer.take_for(current, call.layer)
            else:
                thread.packer.take_aside(call.replay.pack)

    def _install_here(self, current: ModelPass, call: Call) -> bool:
        """Install the hooks for a group that is offloaded or recomputed, or remove them; see [Note: modes]."""
        thread, hooks = self._thread, self._thread.hooks
        assert hooks is not None
        if not hooks.suspend():  # [guard: hooks of the group before]
            thread.packer.take_for(current, current.between)  # the group before installed hooks of the program
            return False
        if call.layer is None or saved_tensor_hooks() is not None:
            return False
        if call.layer.index in current.plan.stay and call.followed.group not in thread.settings.recompute:
            return False
        hooks.install()
        return True

    # End

    def end(self, depth: int, output: Any) -> None:
        """End the forward of a module that returned `output`, before `unwind`; `depth` is that before `begin`."""
        thread = self._thread
        if len(thread.calls) <= depth:  # [guard: end of a call that was not begun]
            return
        call = thread.calls[-1]
        if call.followed.role is ROOT:
            self.steering.forward_ends(output)
        if thread.idle:
            return
        if call.replay is not None:
            self.replays.finish(call.replay, output)
            if call.layer is not None and call.replay.agrees:
                call.layer.remade_bytes = call.replay.program.dropped_bytes
            call.replay = None
        if call.layer is not None:
            self._end_group(call, output)
        thread.calls.pop()
        if thread.calls:
            self._resume()
        else:
            self._end_forward(finished=call.followed.role is ROOT)

    def unwind(self, depth: int) -> None:
        """End without an output what began since `depth` and has not ended; note that a thread is in no forward.

        An interrupt may stop it anywhere; called again, it does what is left.
        """
        thread = self._thread
        if thread.hooks is None and not depth:
            thread.calls.clear()
            thread.idle = False
            self._running.discard(threading.get_ident())  # [guard: thread whose forward has ended]
            self._finish()
        if len(thread.calls) <= depth and (depth or thread.hooks is None):
            return
        if thread.current is not None:
            thread.current.aborted = True  # [guard: aborted pass]
        try:
            while len(thread.calls) > depth:
                replay = thread.calls[-1].replay
                if replay is not None:
                    replay.give_up()  # [guard: tracer of a failed call]
                    thread.calls[-1].replay = None
                if thread.calls[-1].layer is not None:
                    self._end_group(thread.calls[-1], ())
                thread.calls.pop()
        finally:
            if not depth:
                self._end_forward(finished=False)  # [guard: end of a failed forward]
            elif thread.hooks is not None and thread.current is not None:
                # The model may handle the exception.
                # [guard: packer after a handled exception]
                thread.packer.take_for(thread.current, thread.current.between)

    def explain(self, error: BaseException, *, certain: bool = False) -> None:
        """Add a note to an out-of-memory error: what holds the memory, and what would help.

        `certain`: only if a backward of this model runs in this thread.
        """
        thread, done, inside = self._thread, self._latest(), pass_in_backward(self._engine)
        if isinstance(inside, ModelPass) and done is not None and inside.model == done.model:
            done, certain = inside, False
        calls = [call.followed for call in thread.calls]
        noted = any(note.startswith(TITLE) for note in getattr(error, "__notes__", ()))
        if not (noted or self._stopped) and (calls or (done is not None and not certain)):
            done = None if thread.idle else thread.current or done
            with suppress(Exception):  # the error matters more than the note
                error.add_note("\n".join(what_holds_memory(self.state, done, calls, self.steering)))

    def _end_group(self, call: Call, output: Any) -> None:
        current, layer = self._thread.current, call.layer
        assert current is not None
        assert layer is not None
        call.layer = None
        current.forward_end(layer)
        layer.owned.forget()  # [guard: weights that a group refers to]
        scoped = self._thread.settings.scoped and self._engine.recorder is None
        if not scoped or layer.index in current.plan.reached:
            layer.watch(leaves(output), current.backward_reached)

    def _end_forward(self, *, finished: bool) -> None:
        """Uninstall everything; each step may be repeated after an interrupt, and `hooks` is cleared last."""
        thread = self._thread
        current, hooks = thread.current, thread.hooks
        assert hooks is not None
        assert current is not None
        remove_tracers()  # [guard: modes that an interrupt left]
        hooks.remove()  # [guard: removal of the saved-tensor hooks]
        del running.backends[thread.backends :]  # [guard: is_cpu_offload_enabled after a forward]
        thread.packer.end()  # [guard: pass that the packer refers to]
        thread.hooks = None
        # [guard: end of a loop over the groups -> True]
        if finished or (current.order.complete and not current.aborted):
            current.forward_done()
            self._learn(current)
            if finished and self.state.checks_coverage and not current.aborted:
                self.state.checks_coverage = False
                message = coverage_warning(self.state)
                if message is not None:
                    warn(message)
            thread.current = None

    def _learn(self, current: ModelPass) -> None:
        if not current.aborted:  # [guard: order of an aborted pass -> True]
            self.steering.pass_ends(current, tuple(current.order.started))

    # Removal

    def retire(self) -> None:
        """Begin no further forward, and follow no module as soon as no forward is in progress in any thread."""
        self.steering.retire()
        self._stopped = self._retiring = True
        self._finish()

    def _finish(self) -> None:
        if not self._retiring or self._running:  # [guard: removal while a forward runs -> False]
            return
        unfollow(self.state.modules)
        self._engine.close()  # the last forward may have taken host memory after the handle was removed
        self._retiring = False


for _function in (Tracker.begin, Tracker.end, Tracker.unwind):
    opaque(_function, REASON)


def _obstacle_to_hooks() -> str | None:
    """Return where a forward runs if saved-tensor hooks installed now would not receive its saved tensors."""
    if in_transform():
        return (
            "inside torch.func.grad, jvp and other transforms, which do not support saved-tensor hooks. Use "
            "torch.func.functional_call with torch.autograd.grad or backward."
        )
    if saved_tensor_hooks_disabled() is not None:
        return "inside torch.autograd.graph.disable_saved_tensors_hooks. Call the model outside of that block."
    if saved_tensor_hooks() is None:
        return None
    return (
        "under other saved-tensor hooks, such as those of torch.utils.checkpoint, torch.autograd.graph.save_on_cpu or "
        "another offloaded model. Use them around parts of the model only, and offload one model."
    )
