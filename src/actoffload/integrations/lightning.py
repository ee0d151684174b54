"""A callback for the Trainer of Lightning, under both names of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.nn import Module

from . import FitCallback

# A program may have two names of one framework installed; it imported the one that it uses.
_old_name = "pytorch_lightning" in sys.modules or find_spec("lightning") is None
Callback: Any = import_module("pytorch_lightning" if _old_name else "lightning.pytorch").Callback


class LightningOffloadCallback(FitCallback, Callback):  # type: ignore[misc]
    """Offload a LightningModule while it is fitted.

    Every rank offloads its own module at the start of ``fit()`` and removes the handle at its end, also after an
    exception.

    Parameters
    ----------
    module : str, optional
        Dotted name of the module inside of the LightningModule that the training step calls, such as ``"model"``.  None
        means its only child that has parameters.  With several of these it means the LightningModule itself, whose
        training step has to call ``self(...)`` then: a training step that calls its children is offloaded, but not
        timed, and the report says so.
    report_at, log, arguments
        As in `OffloadCallback`, whose attributes it has; `report_at` counts batches from the start of ``fit()``.
    """

    def __init__(
        self,
        module: str | None = None,
        *,
        report_at: int | None = 20,
        log: Callable[[str], object] | None = None,
        **arguments: Any,
    ) -> None:
        if module is not None and not isinstance(module, str):
            raise TypeError(f'module is a {type(module).__name__}; expected a name, such as "model", or None.')
        super().__init__(report_at=report_at, log=log, **arguments)
        self.module = module

    def _chosen(self, whole: Module) -> Module:
        """Return the module to offload."""
        if self.module is not None:
            return whole.get_submodule(self.module)
        children = [child for child in whole.children() if any(True for _ in child.parameters())]
        return children[0] if len(children) == 1 else whole

    def on_fit_start(self, trainer: Any, pl_module: Module) -> None:
        """Offload the module."""
        self._begin(self._chosen(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the report if this is the batch for it."""
        self._step(lead=trainer.is_global_zero)

    def on_train_end(self, trainer: Any, pl_module: Module) -> None:
        """Log the report if no batch did, and remove the handle."""
        self._end(lead=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Module, exception: BaseException) -> None:
        """Remove the handle."""
        self._remove()

    def teardown(self, trainer: Any, pl_module: Module, stage: str) -> None:
        """Remove the handle of a fit that ran no batch."""
        self._remove()
