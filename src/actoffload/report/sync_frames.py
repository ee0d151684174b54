"""Finds the line of user code that stands behind an operation."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from os import sep
from pathlib import Path
from types import FrameType

import torch

__all__ = []


class _Owner(Enum):
    """Whose code a file is."""

    USER = auto()
    LIBRARY = auto()  # another package, or this one
    TORCH = auto()
    NOBODY = auto()  # this helper, and the parts of the standard library that call other people's code


@dataclass(frozen=True)
class Line:
    """One line of a source file, and the function that it belongs to."""

    file: str
    number: int
    function: str


@dataclass(frozen=True)
class Place:
    """A line of user code, and the line of a library between it and the operation, where there is one."""

    line: Line
    library: Line | None = None


UNKNOWN = Place(Line("<unknown>", 0, "<unknown>"))

_HERE = Path(__file__).parent
_HELPER = {str(_HERE / name) for name in ("sync_watch.py", "sync_frames.py", "synchronization.py")}
_PACKAGE = f"{_HERE.parent}{sep}"
_TORCH = f"{Path(torch.__file__).parent}{sep}"
_INSTALLED = (f"{sep}site-packages{sep}", f"{sep}dist-packages{sep}")
_STANDARD = tuple(f"{Path(sysconfig.get_path(name))}{sep}" for name in ("stdlib", "platstdlib"))
_GENERATED = ("<eval_with_key>", "torchinductor")  # code that torch.compile wrote


def place_of(frame: FrameType | None, backward_of: int | None = None) -> Place:
    """Return the innermost line of user code at or above `frame`, or the innermost outside of torch.

    Parameters
    ----------
    frame : frame or None
        Where to begin.
    backward_of : int, optional
        Thread that may have called the backward in which `frame` runs.  Where no user code is above `frame`, as on
        autograd's own threads, the line that called backward is taken.

    Returns
    -------
    Place
        `UNKNOWN` where there is nothing but torch.
    """
    user, library = _search(frame)
    if user is None and backward_of is not None:
        calling = sys._current_frames().get(backward_of)
        if any(_runs_backward(above) for above in _upwards(calling)):
            user, _ = _search(calling)
    if user is not None:
        return Place(user, library)
    return UNKNOWN if library is None else Place(library)


def ends_backward(frame: FrameType | None) -> bool:
    """Tell whether a warning comes from the end of a backward, which repeats there what its threads had to say."""
    for above in _upwards(frame):
        if _owner(above.f_code.co_filename) is not _Owner.NOBODY:
            return _runs_backward(above)
    return False


_COUNTS = str(Path(__file__).parents[1] / "moe" / "groups.py")


def stays_on_host(frame: FrameType | None) -> bool:
    """Tell whether torch works here on tensors that lie in host memory whatever the device is.

    These are the step counters of optimizers, the counts of `actoffload.moe.grouped_mlp`, which takes no others into
    Python, and everything that happens in a data loader.
    """
    if ("optim/optimizer.py", "_get_value") in torch_functions(frame):
        return True
    if any(above.f_code.co_filename == _COUNTS for above in _upwards(frame)):
        return True
    loader = f"{_TORCH}utils{sep}data{sep}"
    return any(above.f_code.co_filename.startswith(loader) for above in _upwards(frame))


def torch_functions(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield torch's functions at and above `frame` up to other code: the file inside of torch, and the name."""
    for above in _upwards(frame):
        file = above.f_code.co_filename
        owner = _owner(file)
        if owner is _Owner.TORCH:
            yield file.removeprefix(_TORCH).replace(sep, "/"), above.f_code.co_name
        elif owner is not _Owner.NOBODY:
            return


def _search(frame: FrameType | None) -> tuple[Line | None, Line | None]:
    """Return the innermost line of user code at or above `frame`, and of a library below that."""
    library: Line | None = None
    for above in _upwards(frame):
        owner = _owner(above.f_code.co_filename)
        if owner is _Owner.USER:
            return _line(above), library
        if owner is _Owner.LIBRARY and library is None:
            library = _line(above)
    return None, library


def _line(frame: FrameType) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _upwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _runs_backward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_engine_run_backward" and frame.f_code.co_filename.startswith(_TORCH)


@lru_cache(maxsize=4096)
def _owner(file: str) -> _Owner:
    if file in _HELPER:
        return _Owner.NOBODY
    if file.startswith(_TORCH) or any(sign in file for sign in _GENERATED):
        return _Owner.TORCH
    if file.startswith(_PACKAGE) or any(folder in file for folder in _INSTALLED):
        return _Owner.LIBRARY
    if file.startswith((*_STANDARD, "<frozen ")):
        return _Owner.NOBODY
    return _Owner.USER
