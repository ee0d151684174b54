"""What the callbacks have in common: offload at the start of a fit, report once, remove at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, ClassVar, Self

import torch.distributed as dist
from torch.nn import Module

from .._arguments import check_whole
from ..model import OffloadHandle, check_arguments, offload
from ..replay import policy_for
from ..report import Report, gather_reports

__all__ = ["FitCallback"]

LIMITS = "min_bytes", "fraction", "max_host_bytes", "max_inflight", "memory_budget"
CHECKED = "layers", "num_layers", "keep", "plan", *LIMITS  # arguments whose values are checked before there is a model


class FitCallback:
    """Base of the callbacks; an instance also derives from the callback class of the framework.

    That class is imported when the first instance is made, so that this package imports without any framework.  The
    parameters are described in the callbacks.
    """

    bases: ClassVar[tuple[tuple[str, str], ...]]  # module and name of the framework's class, the preferred one first

    handle: OffloadHandle | None
    report: Report | None

    def __init_subclass__(cls) -> None:
        """Show the parameters of ``__init__`` as those of the class, and not those of ``__new__``."""
        super().__init_subclass__()
        own = signature(cls.__init__)
        cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]

    def __new__(cls, *given: Any, **_: Any) -> Self:
        """Return an instance of a class that derives from the framework's class too."""
        by_place = [
            parameter
            for parameter in signature(cls).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if len(given) > len(by_place):
            raise TypeError(
                f"{cls.__name__} got a {type(given[len(by_place)]).__name__} without the name of an argument; expected "
                "report_at, log and arguments of actoffload.offload by name. The model is the one that is trained."
            )
        made: Self = object.__new__(_derived(cls))
        return made

    def __init__(
        self, *, report_at: int | None = 20, log: Callable[[str], object] | None = None, **arguments: Any
    ) -> None:
        check_whole(report_at=report_at, optional=True)
        if report_at is not None and report_at < 1:
            raise ValueError(f"report_at is {report_at}; expected the number of a step, at least 1, or None.")
        try:
            bound = signature(offload).bind(None, **arguments)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__} {error}; expected arguments of actoffload.offload.") from None
        bound.apply_defaults()
        check_arguments(**{name: bound.arguments[name] for name in CHECKED})
        policy_for(bound.arguments["recompute"])
        self.report_at, self._arguments = report_at, arguments
        self._log = _print if log is None else log
        self._steps, self._reported = 0, False
        self.handle = self.report = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the class without the framework's, as processes that are spawned need it."""
        return _made, (_PLAIN[type(self)],), vars(self)

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


_DERIVED: dict[type, type[FitCallback]] = {}
_PLAIN: dict[type, type[FitCallback]] = {}
"""The class that derives from each callback and the framework's class; and the other way round."""


def _derived(cls: type[FitCallback]) -> Any:
    """Return a class that derives from a callback and from the framework's class."""
    if cls in _PLAIN:
        return cls
    if cls in _DERIVED:
        return _DERIVED[cls]
    # A program may have two names of one framework installed; it imported the one that it uses.
    names = sorted(cls.bases, key=lambda base: base[0] not in sys.modules)
    for module, name in names:
        if find_spec(module.partition(".")[0]) is not None:
            base = getattr(import_module(module), name)
            break
    else:
        raise ImportError(f"{cls.__name__} needs {' or '.join(module for module, _ in cls.bases)}: install it.")
    own = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    made: type[FitCallback] = type(cls.__name__, (cls, base), own)
    _PLAIN[made], _DERIVED[cls] = cls, made
    return made


def _made(cls: type[FitCallback]) -> FitCallback:
    return cls.__new__(cls)
