"""Dispatch modes of this package, and their removal after an interrupt."""

from __future__ import annotations

from typing import Any

from .._torch import DispatchMode, current_dispatch_mode

__all__ = ["Mode", "remove_modes"]

_Base: Any = object if DispatchMode is None else DispatchMode


class Mode(_Base):  # type: ignore[misc]
    """A context that sees every operation, beside compiled code, which stays compiled, and higher-order operators."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without the wrapper of `torch.compiler.disable`, which takes microseconds for each operator."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such."""
        return True


def remove_modes() -> None:
    """Remove the modes of this thread whose own removal an interrupt prevented."""
    while isinstance(mode := current_dispatch_mode(), Mode):
        _Base.__exit__(mode, None, None, None)
