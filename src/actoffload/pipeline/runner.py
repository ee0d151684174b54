"""The steps of a schedule on one rank: measure first, then plan together with the other ranks, then follow the plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._pipelining import runs_backward
from ..engine import tensor_marks
from ..engine.layer import tensors_in
from ..schedule.pipeline import Step
from ..schedule.pipeline_plan import PipelinePlan
from .conductor import Conductor
from .exchange import Measured, Settings, disagreement, gather
from .follow import unfollow
from .stages import RankStage

__all__ = ["Runner"]

logger = logging.getLogger("actoffload")


class Runner:
    """Follows the steps of a schedule; every rank of the pipeline has one.

    Parameters
    ----------
    followed : sequence
        The stages of the rank and the schedule.
    stages : sequence of RankStage
        The stages, followed.
    conductor : Conductor
        Of the rank.
    settings : Settings
        The arguments of this rank.
    group : ProcessGroup, optional
        The ranks of the pipeline.
    """

    def __init__(
        self, followed: Sequence[Any], stages: Sequence[RankStage], conductor: Conductor, settings: Settings, group: Any
    ) -> None:
        self._followed, self.stages, self.conductor = tuple(followed), tuple(stages), conductor
        self._settings, self._group = settings, group
        self.plans: tuple[PipelinePlan, ...] = ()  # of all ranks
        self.number = 0  # of steps with backward that began
        self.installed = True

    # Steps

    @contextmanager
    def step(self, schedule: Any) -> Iterator[None]:
        """Follow one step of the schedule."""
        training = runs_backward(schedule) and torch.is_grad_enabled()
        if training:
            self._before()
        self.conductor.begin(training=training)
        failed = True
        try:
            yield
            failed = False
        finally:
            self.conductor.end(failed=failed)

    @contextmanager
    def computing(self, stage: Any, step: Step, inputs: Any = ()) -> Iterator[None]:
        """Follow one computation of a stage; the inputs of a step are kept, because the caller has them until it ends."""
        for tensor in tensors_in(inputs):
            tensor_marks.keep(tensor)
        with self.conductor.computing(stage, step):
            yield

    def _before(self) -> None:
        self.number += 1
        if self.number == 1:
            wrong = disagreement(gather(self._settings, self._group))
            if wrong:
                self.remove()
                raise ValueError(wrong)

    def remove(self) -> None:
        """Follow the schedule no longer, and end offloading in its stages."""
        if self.installed:
            self.installed = False
            unfollow(self._followed)
            for stage in self.stages:
                stage.handle.remove()
            self.conductor.engine.close()
