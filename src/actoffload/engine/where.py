"""Where the bytes of a saved storage are."""

from __future__ import annotations

import enum

__all__ = ["Where"]


class Where(enum.Enum):
    """Where the bytes are."""

    DEVICE = "on the device"
    LEAVING = "on the device, copied or being copied to the host"
    HOST = "on the host only"
    BACK = "on the host and, again, on the device"
