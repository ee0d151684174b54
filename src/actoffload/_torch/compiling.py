"""`torch.compile`: what it leaves alone, what compiles calls, and compiled backwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def opaque(function: F, reason: str = "", *, compile_callees: bool = False) -> F:
    """Let a function run as plain Python where compiled code calls it, and all that it calls unless `compile_callees`.

    Does what `torch.compiler.disable` does, for all closures of the same code and without a wrapper around each call.
    `reason` is the error for a program that asked for a single graph.
    """
    if _MARKS_CODE:
        _set_strategy(function.__code__, _Strategy(_SKIP, _DEFAULT if compile_callees else _SKIP))
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


NOT_COMPILED = (
    "The backward of an offloaded model cannot run in compiled autograd: set "
    "torch._dynamo.config.compiled_autograd = False, or end offloading before the forward."
)


def in_compiled_backward() -> bool:
    """Return whether compiled autograd runs a backward; a program that uses it has imported its module."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)
