"""The error for tensors that were changed in place after they were saved."""

from __future__ import annotations

import torch

__all__ = ["changed"]


def changed(tensor: torch.Tensor, size: tuple[int, ...], version: int) -> RuntimeError:
    """Return the error that autograd raises without hooks, for a tensor that is not at `version` any more.

    Parameters
    ----------
    tensor : torch.Tensor
        Shares the version counter of what was changed; its own shape does not matter.
    size : tuple of int
        Shape of the saved tensor.
    version : int
        The version at which it was saved, or at which it came back.
    """
    shape = ", ".join(map(str, size))
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} [{shape}]] is at version {tensor._version}; expected version {version} instead. "
        "It was saved inside an offloading context; change a copy of it, or change it before it is used. "
        "torch.autograd.set_detect_anomaly(True) shows where it was used."
    )
