"""Checks of arguments that several public functions take; each names the argument, its value and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

__all__ = ["check_bytes", "check_fraction", "check_num_layers", "check_whole"]


def _refuse(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name} is {value!r}; expected {expected}.")


def check_whole(*, optional: bool = False, **arguments: object) -> None:
    """Refuse arguments that are not whole numbers.

    Parameters
    ----------
    optional : bool
        None is accepted.
    **arguments
        The arguments by name.

    Raises
    ------
    TypeError
        With the name and the value of the first such argument.

    Examples
    --------
    >>> from actoffload._arguments import check_whole
    >>> check_whole(num_layers=4, model_layers="8")
    Traceback (most recent call last):
        ...
    TypeError: model_layers is '8'; expected a whole number.
    """
    for name, value in arguments.items():
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, value, "a whole number, or None" if optional else "a whole number")


def check_bytes(*, optional: bool = False, **arguments: object) -> None:
    """Refuse arguments that are not numbers of bytes.

    Parameters
    ----------
    optional : bool
        None is accepted, and means that there is no limit.
    **arguments
        The arguments by name.

    Raises
    ------
    TypeError
        If one is not a whole number.
    ValueError
        If one is negative.

    Examples
    --------
    >>> from actoffload._arguments import check_bytes
    >>> check_bytes(max_host_bytes="1GB", optional=True)
    Traceback (most recent call last):
        ...
    TypeError: max_host_bytes is '1GB'; expected a whole number of bytes, or None for no limit.
    """
    for name, value in arguments.items():
        if optional and value is None:
            continue
        more = ", or None for no limit" if optional else ""
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, value, f"a whole number of bytes{more}")
        if value < 0:
            raise ValueError(f"{name} is {value}; expected a number of bytes{more or ', 0 or more'}.")


def check_fraction(fraction: object) -> None:
    """Refuse a fraction of groups that is not a number; `GroupSchedule` checks its range.

    Raises
    ------
    TypeError
        If it is not a number.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, Real):
        raise _refuse("fraction", fraction, "a part of the groups, from 0.0 to 1.0")


def check_num_layers(num_layers: int | None, *sequences: Sequence[str]) -> None:
    """Refuse to offload every group of all kinds.

    Parameters
    ----------
    num_layers : int or None
        Number of groups of each kind to offload.
    *sequences : sequence of str
        The kinds of the groups: as they were chosen and, once that is known, as they run.  A group that is called
        several times cannot be judged before.

    Raises
    ------
    ValueError
        If no kind has more groups than that in any of the sequences.
    """
    largest = max(kinds.count(kind) for kinds in sequences for kind in set(kinds))
    if num_layers is not None and num_layers >= largest > 1:
        raise ValueError(
            f"num_layers is {num_layers}, but there are {largest} groups of a kind, and the last has to stay: backward "
            f"begins with it. Give at most {largest - 1}."
        )
