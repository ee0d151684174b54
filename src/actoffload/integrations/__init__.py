"""Callbacks that offload a model for as long as a framework trains it.

Each is imported when it is first named, because its module imports the framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn import Module

from .._arguments import check_whole
from ..model import OffloadHandle
from ..pipeline import offload
from ..report import Report, gather_reports

if TYPE_CHECKING:
    from .hugging_face import OffloadCallback
    from .lightning import LightningOffloadCallback

__all__ = ["LightningOffloadCallback", "OffloadCallback"]

_MODULES = {"LightningOffloadCallback": "lightning", "OffloadCallback": "hugging_face"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


class FitCallback:
    """Base of the callbacks, which describe the parameters."""

    handle: OffloadHandle | None
    report: Report | None

    def __init__(
        self, *, report_at: int | None = 20, log: Callable[[str], object] | None = None, **arguments: Any
    ) -> None:
        check_whole(report_at=report_at, optional=True, least=1)
        try:
            signature(offload).bind(None, **arguments)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__} {error}; expected arguments of actoffload.offload.") from None
        self.report_at, self._arguments = report_at, arguments
        self._log = _print if log is None else log
        self._steps, self._reported = 0, False
        self.handle = self.report = None

    def _begin(self, model: Module) -> None:
        self._remove()  # an exception ended the fit before
        self._steps, self._reported, self.report = 0, False, None
        self.handle = offload(model, **self._arguments)

    def _step(self, *, lead: bool) -> None:
        self._steps += 1
        if self.report_at is None or self._reported or self._steps < self.report_at:
            return
        # Until the plan is final, a report describes a plan that is tried.  Ranks gather their reports in a collective,
        # so all of them report after the same step, although plans of independent models become final in other ones.
        assert self.handle is not None
        if _several_ranks() or not self.handle.settling:
            self._report(lead=lead)

    def _end(self, *, lead: bool) -> None:
        try:
            if not self._reported and self.handle is not None:
                self._report(lead=lead)
        finally:
            self._remove()

    def _report(self, *, lead: bool) -> None:
        """Take the report; log it on rank 0, with the table of all ranks if there are several.

        A training in which no forward of the model was followed has none: that is logged, because it is no error.
        """
        assert self.handle is not None
        self._reported = True
        try:
            self.report = self.handle.report()
            text = str(self.report)
        except RuntimeError as error:
            text = f"actoffload has no report of this training: {error}"
        if self.report_at is None:
            return
        if _several_ranks():
            given: Any = self.report
            try:  # a collective, so a rank without a report calls it too; then it raises in all of them
                text = f"{text}\n\n{gather_reports(given)}"
            except TypeError as error:
                text = f"{text}\n\nThere is no table of all ranks: {error}"
        if lead:
            self._log(text)

    def _remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def _print(text: str) -> None:
    """Print a text above progress bars."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # those of Transformers, and of Lightning without rich
    (print if bars is None else bars.write)(text)


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
