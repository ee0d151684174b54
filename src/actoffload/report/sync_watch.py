"""Watches one block of a program for everything that makes the host wait for the device.

[Note: who sees what]

*Sync debug mode.*  On CUDA (and ROCm) torch itself warns at each wait that goes through its own copy and stream
functions.  The warning is taken out of `warnings.showwarning`, on the thread and the Python stack of the operation.
In backward torch collects warnings and repeats them when backward ends, on the thread that called it.  So each
operator on CUDA is called through a binding that collects warnings itself: they arrive before the operator returns.

*Dispatch mode.*  It knows which operator runs, for the name in the report.  It also judges by name and arguments where
there is no sync debug mode: on other accelerators, and on the CPU, whose tensors then stand for the device.  It is
a dispatch mode and not a function mode, because torch.compile guards on the latter and would compile anew.

*Replaced functions.*  `torch.cuda.synchronize` and the methods of events wait without a word, so they are wrapped.
`torch.Event` is an immutable type; its `synchronize` cannot be seen.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from .sync_causes import (
    BLOCKING_OUT,
    EXPLICIT,
    OTHER_THREAD,
    OUTSIDE,
    REPLAYED,
    VALUE,
    Cause,
    cause_of_caller,
    cause_of_report,
    recognised,
    title,
    unreported,
)
from .sync_frames import Place, ends_backward, place_of, stays_on_host, torch_functions

__all__ = []

_REPORT = "called a synchronizing CUDA operation"  # torch's text, in c10/cuda/CUDAFunctions.cpp
_PROTOTYPE = "Synchronization debug mode is a prototype"  # said once in a process when the mode is set


@dataclass(frozen=True)
class Sighting:
    """One wait of the host."""

    place: Place
    operation: str
    cause: Cause
    in_backward: bool
    on_cpu: bool  # judged on CPU tensors, which stand for the device where no accelerator is used


@dataclass(eq=False)
class _Call:
    """An operator on CUDA that runs now."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reported: bool = False


class _Thread(threading.local):
    """What a thread is doing."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.explicit = 0  # depth of wrapped functions
        self.range_check = 0  # values that `one_hot` reads next, where a program has imported it by name


class Watch:
    """Reports each synchronization to `see`, from `watching` on to its end."""

    def __init__(self, see: Callable[[Sighting], None]) -> None:
        self._see = see
        self._thread = _Thread()
        self._owner = threading.get_ident()
        self._show_others: Callable[..., object] = warnings.showwarning
        self.used_accelerator = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Install everything, and put everything back as it was."""
        with ExitStack() as stack:
            if torch.cuda.is_available():
                stack.enter_context(self._sync_debug_mode())
            for owner, name, called in _explicit_functions():
                stack.enter_context(_replaced(owner, name, self._wrapped(called, EXPLICIT)))
            if not torch.accelerator.is_available():
                for method, cause in (("cpu", BLOCKING_OUT), ("tolist", VALUE)):
                    wrapper = self._wrapped(f"torch.Tensor.{method}", cause, on_cpu=True)
                    stack.enter_context(_replaced(torch.Tensor, method, wrapper))
                one_hot = self._wrapped("torch.nn.functional.one_hot", VALUE, on_cpu=True, waits=_counts_classes)
                stack.enter_context(_replaced(functional, "one_hot", one_hot))
            stack.enter_context(_Recognizer(self))
            yield

    def dispatch(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, and see whether it synchronizes."""
        device = _device_of(args, kwargs)
        self.used_accelerator = self.used_accelerator or device not in (None, "cpu")
        name = func._schema.name if hasattr(func, "_schema") else str(func)
        if device == "cuda":
            return self._dispatch_on_cuda(name, func, types, args, kwargs)
        result = func(*args, **kwargs)
        if device is not None:
            self._judge(name, args, kwargs, on_cpu=device == "cpu")
        return result

    def _dispatch_on_cuda(
        self, name: str, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        call = _Call(name, args, kwargs)
        self._thread.calls.append(call)
        try:
            if types or not hasattr(func, "_schema"):  # what a subclass or a higher-order operator calls is its own
                result = func(*args, **kwargs)
            else:  # [Note: who sees what]: this binding hands collected warnings over when it returns
                result = torch._C._disabled_torch_function_impl(func, types, tuple(args), dict(kwargs))
        finally:
            self._thread.calls.pop()
        cause = None if call.reported else unreported(name, args, kwargs)
        if cause is not None:
            self._sight(sys._getframe(1), title(name), cause)
        return result

    def _judge(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], on_cpu: bool) -> None:
        thread = self._thread
        if on_cpu and thread.explicit:
            return  # the wrapper has seen it, or knows that no device would wait
        if on_cpu and name == "aten::_local_scalar_dense" and thread.range_check:
            thread.range_check -= 1
            return
        # so `one_hot` of torch 2.13 checks the range of its indices
        thread.range_check = 2 if name == "aten::aminmax" else 0
        cause = recognised(name, args, kwargs)
        if cause is not None and not _is_fake(args):
            self._sight(sys._getframe(1), title(name), cause, on_cpu=on_cpu)

    def _warned(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Stand in for `warnings.showwarning`."""
        if _REPORT not in str(message):
            self._show_others(message, category, filename, lineno, file, line)
            return
        self.used_accelerator = True
        if self._thread.explicit:
            return  # the wrapper has seen it
        frame = sys._getframe(1)
        call = self._thread.calls[-1] if self._thread.calls else None
        if call is not None:
            call.reported = True
            self._sight(frame, title(call.name), cause_of_report(call.name, call.args, call.kwargs))
        elif ends_backward(frame):
            self._sight(frame, "an operation of backward", REPLAYED, in_backward=True)
        elif torch._C._len_torch_dispatch_stack():
            self._sight(frame, "no operator", OUTSIDE, by_mode=False)
        else:
            self._sight(frame, "an unknown operator", OTHER_THREAD, by_mode=False)

    def _sight(
        self,
        frame: FrameType,
        operation: str,
        cause: Cause,
        *,
        on_cpu: bool = False,
        in_backward: bool = False,
        by_mode: bool = True,
    ) -> None:
        if on_cpu and stays_on_host(frame):
            return
        if cause is VALUE:
            cause = cause_of_caller(torch_functions(frame)) or cause
        in_backward = in_backward or torch._C._current_graph_task_id() != -1
        # A thread of autograd has the dispatch mode only if the thread that entered the block called this backward.
        caller = self._owner if in_backward and by_mode else None
        self._see(Sighting(place_of(frame, caller), operation, cause, in_backward, on_cpu))

    @contextmanager
    def _sync_debug_mode(self) -> Iterator[None]:
        with warnings.catch_warnings():
            self._show_others = warnings.showwarning
            warnings.filterwarnings("ignore", message=_PROTOTYPE)
            warnings.filterwarnings("always", message=_REPORT)
            warnings.showwarning = self._warned
            former = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(former)
                warnings.showwarning = self._show_others  # `catch_warnings` may keep this per context

    def _wrapped(
        self,
        operation: str,
        cause: Cause,
        on_cpu: bool = False,
        waits: Callable[..., bool] = lambda *args, **kwargs: True,
    ) -> Callable[[Callable[..., Any]], Any]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return function(*args, **kwargs)
                thread = self._thread
                if not thread.explicit and waits(*args, **kwargs):
                    self.used_accelerator = self.used_accelerator or not on_cpu
                    self._sight(sys._getframe(1), operation, cause, on_cpu=on_cpu, by_mode=False)
                thread.explicit += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    thread.explicit -= 1

            return wrapper

        return wrap


class _Recognizer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each operator of this thread, and of the backwards that it calls, to a watch."""

    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled: without this torch.compile would step aside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.dispatch(func, types, args, kwargs or {})


def _explicit_functions() -> Iterator[tuple[Any, str, str]]:
    """Yield what waits when asked to: owner, attribute, name for people."""
    # The functions of torch.cuda and torch.accelerator look these up when they are called; so a name that a program
    # imported from there is seen too.
    yield torch._C, "_cuda_synchronize", "torch.cuda.synchronize"
    yield torch._C, "_xpu_synchronize", "torch.xpu.synchronize"
    yield torch._C, "_mps_deviceSynchronize", "torch.mps.synchronize"
    yield torch._C, "_accelerator_synchronizeDevice", "torch.accelerator.synchronize"
    for backend in (torch.cuda, torch.xpu):
        for kind in (backend.Stream, backend.Event):
            yield kind, "synchronize", f"{backend.__name__}.{kind.__name__}.synchronize"


def _counts_classes(*args: Any, **kwargs: Any) -> bool:
    """Whether a call of `one_hot` reads the largest index.  Its check of the range is done on the CPU alone."""
    return bool(kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1)


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Replace a function, where it exists, until the end of the block."""
    if not hasattr(owner, name):
        yield
        return
    inherited = name not in vars(owner)
    former = getattr(owner, name)
    setattr(owner, name, wrap(former))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the type of the accelerator that an operator uses, else "cpu", else None where it has no tensor."""
    found: str | None = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, (torch.Tensor, torch.device)):
            device: str | None = value.type if isinstance(value, torch.device) else value.device.type
        elif isinstance(value, (list, tuple)):
            device = _device_of(value, {})
        else:
            continue
        if device == "cpu":
            found = "cpu"
        elif device not in (None, "meta"):
            return device
    return found


def _is_fake(args: Sequence[Any]) -> bool:
    """Tell whether torch.compile only pretends to compute."""
    return any(getattr(value, "fake_mode", None) is not None for value in args)
