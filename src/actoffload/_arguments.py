"""Checks of arguments that several public functions take; each names the argument, its value and what is expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

UNITS: dict[str, int] = {"b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for unit, base in (("ib", 1024), ("b", 1000))
}
"""Units of bytes in small letters: binary as in "24GiB", and decimal as in "24GB"."""
SMALLEST = 1024  # bytes of a budget without a unit: a smaller number is one of GiB, such as 24
LARGEST = 2**63 - 1  # what PyTorch and the containers of Python count with


def check_whole(*, optional: bool = False, least: int | None = None, **arguments: object) -> None:
    """Raise an error for the first argument that is no whole number from `least` on; None if `optional`."""
    expected = ("a whole number" if least is None else f"a whole number, at least {least}") + ", or None" * optional
    for name, value in arguments.items():
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} is {value!r}; expected {expected}.")
        if abs(int(value)) > LARGEST or (least is not None and value < least):
            raise ValueError(f"{name} is {value}; expected {expected}{' below 2**63' * (int(value) > LARGEST)}.")


def check_fits(expected: str, fits: Callable[[Any], bool], **arguments: Any) -> None:
    """Raise a `TypeError` or `ValueError` for the first argument that `fits` cannot take, or for which it is False."""
    for name, value in arguments.items():
        try:
            fine = fits(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r}; expected {expected}.") from None
        if not fine:
            raise ValueError(f"{name} is {value}; expected {expected}.")


def check_seconds(**arguments: Any) -> None:
    """Raise a `TypeError` or `ValueError` for the first argument that is not a time."""
    check_fits("seconds, finite and 0 or more", lambda value: math.isfinite(value) and value >= 0, **arguments)


def check_bytes(**arguments: Any) -> None:
    """Raise a `TypeError` or `ValueError` for the first argument that is not a number of bytes."""
    check_fits("bytes, 0 or more", lambda value: value >= 0, **arguments)


def check_kind(kind: type, expected: str = "", **arguments: object) -> None:
    """Raise a `TypeError` for the first argument that is of another class; by default, that is `expected`."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}; expected {expected or f'a {kind.__name__}'}.")


def check_kinds(kind: type, *, optional: bool = False, **arguments: Any) -> None:
    """Raise a `TypeError` for the first argument that is no sequence of objects of a class; or None, if `optional`."""
    expected = f"a sequence of {kind.__name__}" + " or None" * optional
    for name, value in arguments.items():
        if not isinstance(value, Sequence):
            raise TypeError(f"{name} is {value!r}; expected {expected}.")
        for place, each in enumerate(value):
            if not isinstance(each, kind) and not (optional and each is None):
                raise TypeError(f"{name}[{place}] is {each!r}; expected a {kind.__name__}{' or None' * optional}.")


def number_of_bytes(name: str, value: Any, *, optional: bool = False) -> Any:
    """Return bytes that are given as a whole number or as text such as "24GiB"; None if `optional`."""
    if optional and value is None:
        return None
    nbytes = _bytes_of(value)
    expected = "expected a number of bytes, or text such as '24GiB'" + ", or None for no limit" * optional
    if nbytes is None:
        raise TypeError(f"{name} is {value!r}; {expected}.")
    if not 0 <= nbytes <= LARGEST:
        raise ValueError(f"{name} is {value!r}; {expected}{', below 2**63' * (nbytes > LARGEST)}.")
    return nbytes


def _bytes_of(value: object) -> int | None:
    """Return a whole number, or the bytes that a text such as "24GiB" stands for, -1 for others; else None."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)\s*", value, re.IGNORECASE)
        return -1 if found is None else round(min(float(found[1]) * UNITS[found[2].lower()], 2.0 * LARGEST))
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def check_fraction(fraction: object) -> None:
    """Raise a `TypeError` or `ValueError` for what is not a fraction of the groups."""
    expected = "a part of the groups, from 0.0 to 1.0"
    check_fits(expected, lambda part: type(part) is not bool and 0.0 <= part <= 1.0, fraction=fraction)


def checked_limits(
    device_bytes: int | None,
    *,
    min_bytes: int | str,
    fraction: float | None,
    max_inflight: int | None,
    memory_budget: Any,
    **limits: Any,
) -> dict[str, Any]:
    """Check the numbers that `offload` takes for a model or for a schedule; return them with all limits in bytes.

    `device_bytes` is the memory of the device.  Of `limits`, each may be None: `max_host_bytes` and, for a schedule,
    `delta_bytes_per_rank`.
    """
    check_whole(max_inflight=max_inflight, optional=True, least=1)
    if fraction is not None:
        check_fraction(fraction)
    return {
        "min_bytes": number_of_bytes("min_bytes", min_bytes),
        "fraction": fraction,
        "max_inflight": max_inflight,
        "memory_budget": None if memory_budget is None else budget_bytes(memory_budget, device_bytes),
        **{name: number_of_bytes(name, value, optional=True) for name, value in limits.items()},
    }


def budget_bytes(budget: object, device_bytes: int | None) -> int | None:
    """Return a memory budget in bytes, or None for a fraction of a device whose memory is not known."""
    if isinstance(budget, Real) and not isinstance(budget, (bool, Integral)):
        if 0.0 < float(budget) <= 1.0:
            return None if device_bytes is None else int(float(budget) * device_bytes)
        nbytes: int | None = int(float(budget)) if float(budget).is_integer() else 0  # such as 24e9
    else:
        nbytes = _bytes_of(budget)
    expected = "expected bytes, such as 24 * 2**30 or '24GiB', or a fraction of the device up to 1.0"
    if nbytes is None:
        raise TypeError(f"memory_budget is {budget!r}; {expected}.")
    if not (1 if isinstance(budget, str) else SMALLEST) <= nbytes <= LARGEST:
        raise ValueError(f"memory_budget is {budget!r}; {expected}.")
    return nbytes


def check_num_layers(num_layers: int | None, kinds: Sequence[str]) -> None:
    """Raise a `ValueError` if `num_layers` leaves no group of any kind on the device."""
    largest, kind = max((kinds.count(kind), kind) for kind in kinds)
    if num_layers is not None and num_layers >= largest > 1:
        raise ValueError(
            f"num_layers is {num_layers}, but there are {largest} groups of the kind {kind}, and the last has to stay: "
            f"backward begins with it. Give at most {largest - 1}."
        )
