"""Every private PyTorch API that the package uses, each behind a feature check.

Strings that identify autograd nodes, classes of wrappers and functions of PyTorch are here too.

Where PyTorch lacks a name, its substitute is used.  A name without one is listed in `MISSING`; then nothing is
offloaded, and `offload` and `get_cpu_offload_context` say so.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

MISSING: list[str] = []
"""Private names without a substitute that this PyTorch lacks; empty in every release that is tested."""


def unsupported() -> str | None:
    """Return a sentence that says why nothing can be offloaded with this PyTorch, or None."""
    if not MISSING:
        return None
    return (
        f"Nothing is offloaded: PyTorch {torch.__version__} lacks {', '.join(MISSING)}, which actoffload needs. "
        "Training runs as without actoffload; use a release of PyTorch that actoffload supports."
    )


def find(path: str, default: Any = None) -> Any:
    """Return what a dotted path below `torch` names, or a default."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return default


def need(path: str, stub: Callable[..., Any]) -> Any:
    """Return what a dotted path below `torch` names; where it is missing, note that and return a stub."""
    found = find(path)
    if found is None:
        MISSING.append(f"torch.{path}")
    return stub if found is None else found


def getter(path: str, stub: Callable[[Any], Any]) -> Any:
    """Return a function that reads an attribute of a class; where that is missing, note that and return a stub."""
    return stub if need(path, stub) is stub else attrgetter(path.rpartition(".")[2])
