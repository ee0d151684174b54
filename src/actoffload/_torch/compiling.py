"""`torch.compile`: what it inlines, what compiles calls, and compiled backwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from .lookup import find

F = TypeVar("F", bound=Callable[..., Any])

_frames: Any = find("_C._dynamo.eval_frame")
_SKIP: Any = find("_C._dynamo.eval_frame._FrameAction.SKIP")
_DEFAULT: Any = find("_C._dynamo.eval_frame._FrameAction.DEFAULT")
_Strategy: Any = find("_C._dynamo.eval_frame._FrameExecStrategy")
_set_strategy: Any = getattr(_frames, "set_code_exec_strategy", None)
_MARKS_CODE = None not in (_SKIP, _DEFAULT, _Strategy, _set_strategy)


def _nothing() -> None:
    return None


def inlined(function: F, callees: Any = _SKIP) -> F:
    """Let Dynamo inline a function into compiled code, and run it and all that it calls as plain Python elsewhere.

    The function asks `torch.compiler.is_dynamo_compiling` where it is.
    """
    if _MARKS_CODE:
        _set_strategy(function.__code__, _Strategy(_SKIP, callees))
    return function


def opaque(function: F, reason: str = "", *, compile_callees: bool = False) -> F:
    """Let a function run as plain Python where compiled code calls it, and all that it calls unless `compile_callees`.

    Does what `torch.compiler.disable` does, for all closures of the same code and without a wrapper around each call.
    `reason` is the error for a program that asked for a single graph.
    """
    inlined(function, _DEFAULT if compile_callees else _SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


_tracing_state: Callable[[], Any] = find("_C._get_tracing_state", _nothing)


def tracing() -> bool:
    """Return whether calls are recorded as a graph: `torch.jit.trace`, `make_fx`, `symbolic_trace`, `torch.export`."""
    if _tracing_state() is not None:
        return True
    symbolic = sys.modules.get("torch.fx._symbolic_trace")
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if getattr(symbolic, "is_fx_symbolic_tracing", bool)():
        return True
    return getattr(proxies, "get_proxy_mode", _nothing)() is not None


_get_compiler: Any = find("_C._dynamo.eval_frame.get_eval_frame_callback")
_set_compiler: Any = find("_C._dynamo.eval_frame.set_eval_frame")

compiler: Callable[[], Any] = _nothing if None in (_get_compiler, _set_compiler) else _get_compiler
"""Returns what compiles the calls of this thread, as in a model that is compiled as a whole; None without one."""


class Compiled:
    """Calls a function whose calls are compiled in any thread, as they are where `compiler` was called.

    What is recomputed in backward has to be compiled as it was in the forward, or it saves other tensors.
    """

    def __init__(self, function: Callable[..., Any], compiler: Any) -> None:
        self._function, self._compiler = function, compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        before = compiler()
        try:
            _set_compiler(self._compiler)
            return self._function(*args, **kwargs)
        finally:
            _set_compiler(before)


COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
"""The module that runs compiled backwards; a program that uses it has imported it, which takes a second."""


def in_compiled_backward() -> bool:
    """Return whether compiled autograd runs a backward, in any thread."""
    return getattr(sys.modules.get(COMPILED_AUTOGRAD), "in_compiled_autograd_region", False)


def compiled_backward() -> list[Any] | None:
    """Return the arguments of all unpack hooks of the compiled backward that runs in this thread; None without one."""
    frame: FrameType | None = sys._getframe() if in_compiled_backward() else None
    while frame is not None:
        if frame.f_code.co_name == "runtime_wrapper" and frame.f_globals["__name__"] == COMPILED_AUTOGRAD:
            return frame.f_locals.get("packed_inputs")
        frame = frame.f_back
    return None
