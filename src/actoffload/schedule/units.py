"""Bytes, times and fractions as text."""

from __future__ import annotations

__all__ = ["byte_unit", "mebibytes", "milliseconds", "percent", "size", "time_unit"]


def size(nbytes: int) -> str:
    """Return bytes in MiB, or in a smaller unit if they are fewer."""
    if nbytes >= 2**20:
        return mebibytes(nbytes)
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes} bytes"


def mebibytes(nbytes: int) -> str:
    """Return bytes in MiB."""
    return f"{nbytes / 2**20:.1f} MiB"


def milliseconds(seconds: float, digits: int = 2) -> str:
    """Return seconds in ms."""
    return f"{seconds * 1e3:.{digits}f} ms"


def percent(fraction: float, digits: int = 1, sign: str = "") -> str:
    """Return a fraction in percent; with ``sign="+"`` also positive ones have a sign."""
    return f"{fraction * 100:{sign}.{digits}f} %"


def byte_unit(nbytes: float) -> tuple[int, str]:
    """Return the largest unit that is not larger than a number of bytes: its bytes and its name."""
    for divisor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= divisor:
            return divisor, unit
    return 1, "bytes"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the largest unit that is not larger than a time: how many make a second, and its name."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1.0:
            return scale, unit
    return 1e6, "µs"
