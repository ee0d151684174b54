"""Warnings that name a line of the program that uses the package, and notes on errors.

A warning is shown with the line that caused it, and Python shows each only once for a line.  The caller of a hook is
PyTorch, a training framework or the package itself, so a fixed number of frames to skip would name the wrong line.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

_FOLDERS = Path(__file__).parent, Path(torch.__file__).parents[1]
_SKIPPED = *(f"{folder}{os.sep}" for folder in _FOLDERS), contextlib.__file__
"""What the paths of files begin with that are part of no program: what is installed beside PyTorch is a framework."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program: the innermost one outside of this package, PyTorch and frameworks."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


explainers = WeakSet[Any]()
"""What adds a note to an out-of-memory error, by its method ``explain``."""


def explain(error: torch.OutOfMemoryError) -> None:
    """Add a note to an error that is raised in backward, where no model is known."""
    for certain in (True, False):  # first the model whose backward runs in this thread
        for explainer in list(explainers):
            explainer.explain(error, certain=certain)
