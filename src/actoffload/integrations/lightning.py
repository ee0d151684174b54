"""A callback for the Trainer of Lightning, under both names of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.nn import Module

from .fit import FitCallback

__all__ = ["LightningOffloadCallback"]


class LightningOffloadCallback(FitCallback):
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
    report_at : int or None
        Batch, counted from the start of ``fit()``, after which the report is logged: with one rank as soon as the plan
        is final, if that is later; at the end of shorter fits.  None logs nothing.
    log : callable, optional
        Called with the text of the report, on rank 0.  By default it is printed, above progress bars.
    arguments
        Those of `actoffload.offload`, such as ``memory_budget="24GiB"``.

    Attributes
    ----------
    handle : OffloadHandle or None
        Handle of the latest fit.
    report : Report or None
        Report of the latest fit, from the batch `report_at` or from the end; smaller last batches are passed over.

    Raises
    ------
    ImportError
        If Lightning is not installed.
    TypeError
        If an argument is not one of `actoffload.offload`.
    ValueError
        At the start of ``fit()``, if the LightningModule has no such module, or if several children have parameters
        and it has no ``forward``.
    """

    bases: ClassVar[tuple[tuple[str, str], ...]] = (
        ("lightning.pytorch", "Callback"),
        ("pytorch_lightning", "Callback"),
    )

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
            return self._named(whole, self.module)
        children = {name: child for name, child in whole.named_children() if any(True for _ in child.parameters())}
        if len(children) == 1:
            return next(iter(children.values()))
        if children and not _has_forward(whole):
            names = list(children)
            raise ValueError(
                f"{type(whole).__name__} has no forward, and its children with parameters are {', '.join(names)}: pass "
                f'the name of the one that training_step calls, as LightningOffloadCallback("{names[0]}").'
            )
        return whole

    @staticmethod
    def _named(whole: Module, name: str) -> Module:
        try:
            return whole.get_submodule(name)
        except AttributeError:
            there = ", ".join(name for name, _ in whole.named_children())
            raise ValueError(
                f"module is {name!r}, which {type(whole).__name__} does not have; its children are {there}. Pass the "
                "name of the one that training_step calls."
            ) from None

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


def _has_forward(module: Module) -> bool:
    """Return whether the class of a LightningModule defines ``forward``, so that its training step may call it."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return owner.__module__.partition(".")[0] not in {"lightning", "pytorch_lightning", "torch"}
