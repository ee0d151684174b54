"""What one thread runs of a followed model: its pass, and the calls of modules that have not returned yet."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .._torch.autograd import SavedTensorHooks
from ..engine.eligibility import ModelTensors
from ..engine.hooks import Pack, Packer
from ..engine.layer import Layer
from ..engine.passes import ModelPass
from ..schedule.execution_order import GroupKey
from .conduct import Conduct, FollowedModule, Mode
from .replays import Begun

__all__ = ["Call", "ThreadState"]


@dataclass(eq=False, slots=True)
class Call:
    """A call of a followed module that has not returned yet."""

    of: FollowedModule
    part: int = 0
    layer: Layer | None = None
    replay: Begun | None = None


class ThreadState(threading.local):
    """The pass and the calls of one thread."""

    def __init__(self) -> None:
        self.current: ModelPass[GroupKey] | None = None
        self.owned: ModelTensors | None = None
        self.calls: list[Call] = []
        self.hooks: SavedTensorHooks | None = None  # of the forward, installed or not
        self.scoped = False  # they are installed in groups that are offloaded
        self.conduct = Conduct(Mode.IDLE)
        self.idle = False  # a forward runs that is not followed
        self.backends = 0  # length of `running.backends` outside of the outermost call
        # A gradient taken inside a forward saves tensors in autograd's threads, which share this object.
        self.packer = Packer()
        self.between: Pack | None = None  # packs what no group saves
