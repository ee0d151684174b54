"""Warnings that name a line of the program that uses the package, and notes on errors.

A warning is shown with the line that caused it, and Python shows each only once for a line.  The caller of a hook is
PyTorch, a training framework or the package itself, so a fixed number of frames to skip would name the wrong line.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from os import sep
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

# Files that are not the program: this package, what is installed beside PyTorch or elsewhere, the standard library, and
# generated code.
_FOLDERS = (
    *(f"{folder}{sep}" for folder in (Path(__file__).parent, Path(torch.__file__).parents[1])),
    *(f"{sysconfig.get_paths()[name]}{sep}" for name in ("stdlib", "platstdlib")),
    "<frozen ",
    "<eval_with_key>",
)
_PARTS = (f"{sep}site-packages{sep}", f"{sep}dist-packages{sep}", "torchinductor")


def is_library(file: str) -> bool:
    """Return whether a file is none of the program."""
    return file.startswith(_FOLDERS) or any(part in file for part in _PARTS)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of the program."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


explainers = WeakSet[Any]()
"""What adds a note to an out-of-memory error, by its method ``explain``."""


def explain(error: torch.OutOfMemoryError) -> None:
    """Add a note to an error that is raised in backward, where no model is known."""
    for certain in (True, False):  # first the model whose backward runs in this thread
        for explainer in list(explainers):
            explainer.explain(error, certain=certain)
