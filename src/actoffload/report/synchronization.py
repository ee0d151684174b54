"""Find the lines of a program that make the host wait for the GPU."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import sep
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .._warnings import is_library

__all__ = ["Synchronization", "Synchronizations", "find_synchronizations"]

_SYNCHRONIZES = "called a synchronizing CUDA operation"  # text of the warning, in c10/cuda/CUDAFunctions.cpp
_PROTOTYPE = "Synchronization debug mode is a prototype"


@dataclass(frozen=True)
class Synchronization:
    """A line that makes the host wait for the GPU.

    Attributes
    ----------
    file, line : str, int
        Innermost line outside of torch and installed packages; ``""`` and 0 if the call stack has none.
    function, code : str
        Qualified name of the function; source text of the line, empty if it cannot be read.
    count : int
        How often the host waited.  The line of built-in operations of backward is the call of backward.
    """

    file: str
    line: int
    function: str
    code: str
    count: int = 1

    def __str__(self) -> str:
        file = self.file.removeprefix(f"{Path.cwd()}{sep}") or "<unknown>"
        return f"{file}:{self.line} in {self.function}, {self.count} time{'s' * (self.count > 1)}\n    {self.code}"


class Synchronizations(list[Synchronization]):
    """The lines that `find_synchronizations` found, in the order of their first wait; print it for a text."""

    def __str__(self) -> str:
        times, lines = sum(found.count for found in self), len(self)
        title = f"The host waits for the GPU {times} time{'s' * (times > 1)}, at {lines} line{'s' * (lines > 1)}."
        return "\n".join([title, *map(str, self)]) if self else "No synchronization was found."


@contextmanager
def find_synchronizations() -> Iterator[Synchronizations]:
    """Find the lines that make the host wait for the GPU in a ``with`` block, at whose end the result is filled.

    They are those of the warnings of `torch.cuda.set_sync_debug_mode`.  The debug mode and the warning filters are
    restored at the end of the block.  They belong to the process, so only one block may run at a time.
    """
    if not torch.cuda.is_available():
        needs = "find_synchronizations needs CUDA, because it reads the warnings of torch.cuda.set_sync_debug_mode"
        raise RuntimeError(f"{needs}; run it on a machine with a GPU.")
    found, seen = Synchronizations(), list[Synchronization]()  # one entry for each wait, of any thread
    caller = threading.get_ident()
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if _SYNCHRONIZES in str(message):
                seen.append(_locate(sys._getframe(1), caller))
            else:
                show_others(message, *args, **kwargs)

        warnings.filterwarnings("ignore", message=_PROTOTYPE)
        warnings.filterwarnings("always", message=_SYNCHRONIZES)
        warnings.showwarning = show
        former = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(former)
            found += (replace(one, count=count) for one, count in Counter(seen).items())


def _locate(frame: FrameType | None, caller: int) -> Synchronization:
    """Return the innermost line of the program at or above a frame, else that at which the caller's thread is."""
    for innermost in (frame, sys._current_frames().get(caller)):  # autograd may have a thread with library code only
        for at, line in traceback.walk_stack(innermost) if innermost is not None else ():
            file = at.f_code.co_filename
            if not is_library(file):
                # The source is read now: an interactive session may replace it before the result is printed.
                return Synchronization(file, line, at.f_code.co_qualname, linecache.getline(file, line).strip())
    return Synchronization("", 0, "<unknown>", "")
