"""Messages between ranks, as JSON: plain values, and objects of the kinds that are registered here.

`[Note: messages]`  Whoever can write to the store of `torch.distributed` can post a message.  If messages were pickles,
such a message could run any code in every rank.  So reading a message makes plain values and objects of registered
classes of data, and calls nothing else.  Numbers stay exact: JSON has all digits of an integer, and the shortest text
that gives the same float.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

__all__ = ["UnreadableError", "read", "register", "written"]

_kinds: dict[str, type] = {}  # dataclasses, named tuples and enumerations
_functions: dict[str, Callable[..., Any]] = {}  # of which a message may have a `partial`
_containers: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class UnreadableError(Exception):
    """A message is none that a rank of this version posts."""


def register(*kinds: type, functions: tuple[Callable[..., Any], ...] = ()) -> None:
    """Let messages have objects of some classes, and `partial` objects of some functions."""
    _kinds.update({kind.__name__: kind for kind in kinds})
    _functions.update({function.__name__: function for function in functions})


def written(message: Any) -> bytes:
    """Return a message as bytes; raises a `TypeError` for objects of a class that is not registered."""
    return json.dumps(_plain(message)).encode()


def read(data: bytes) -> Any:
    """Return the message that was written as some bytes; raises an `UnreadableError` if it is none.

    >>> from actoffload.model.tuning.messages import read, written
    >>> read(written({1: (0.1, None, float("inf"))}))
    {1: (0.1, None, inf)}
    """
    try:
        return _made(json.loads(data))
    except Exception as error:  # whatever the classes raise for values that they do not take
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value as what JSON has; an object with one key says what a value was."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):
        return {_known(value): value.name}
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, partial):
        function = value.func
        if _functions.get(function.__name__) is not function:
            raise TypeError(f"{function.__name__} is not registered for messages.")
        return {"partial": [function.__name__, _plain(value.args), _plain(value.keywords)]}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {_known(value): {name: _plain(item) for name, item in value._asdict().items()}}
    if is_dataclass(value):
        names = (field.name for field in fields(value) if field.init)
        return {_known(value): {name: _plain(getattr(value, name)) for name in names}}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    name = type(value).__name__
    if name not in _containers:
        raise TypeError(f"{name} is not registered for messages.")
    return {name: [_plain(item) for item in value]}


def _known(value: Any) -> str:
    kind = type(value)
    if _kinds.get(kind.__name__) is not kind:
        raise TypeError(f"{kind.__name__} is not registered for messages.")
    return kind.__name__


def _made(plain: Any) -> Any:
    """Return the value that `_plain` was called with."""
    if isinstance(plain, list):
        return [_made(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((name, content),) = plain.items()
    if name in _containers:
        return _containers[name](_made(content))
    if name == "dict":
        return {_made(key): _made(item) for key, item in content}
    if name == "partial":
        function, arguments, keywords = content
        return partial(_functions[function], *_made(arguments), **_made(keywords))
    kind = _kinds[name]
    if issubclass(kind, enum.Enum):
        return kind[content]
    return kind(**{key: _made(item) for key, item in content.items()})
