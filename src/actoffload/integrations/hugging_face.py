"""A callback for the Trainer of Hugging Face Transformers, and for those that derive from it."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from transformers import TrainerCallback

from . import FitCallback


class OffloadCallback(FitCallback, TrainerCallback):
    """Offload the model of a Hugging Face Trainer while it trains.

    Works with ``transformers.Trainer`` and the trainers of TRL, which derive from it.  Every rank offloads its own
    model at the start of ``train()`` and removes the handle at its end.  After an exception the handle stays
    until the next ``train()``, or until ``callback.handle.remove()``.

    Parameters
    ----------
    report_at : int or None
        Optimizer step, counted from the start of ``train()``, after which the report is logged: with one rank as soon
        as the plan is final, if that is later; at the end of shorter trainings.  None logs nothing.
    log : callable, optional
        Called with the text of the report, on rank 0.  By default it is printed, above progress bars.
    arguments
        Those of `actoffload.offload`, such as ``memory_budget="24GiB"``.

    Attributes
    ----------
    handle : OffloadHandle or None
        Handle of the latest training.
    report : Report or None
        Report of the latest training, from the step `report_at` or from the end; smaller last batches are passed over.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Module, **_: Any) -> None:  # type: ignore[override]
        """Offload the model."""
        self._begin(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the report if this is the step for it."""
        self._step(lead=state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the report if no step did, and remove the handle."""
        self._end(lead=state.is_world_process_zero)
