"""Messages between ranks, through the key-value store of `torch.distributed`.

`[Note: no collectives]`  A rank that deviates, because it ends early or runs another forward, must
not make the others hang.  A collective would: it waits until all ranks take part.  A message lies in the store until
it is read, and waiting for one has a limit.  The store is polled, because a wait inside of it blocks its other users in
this process.  It is looked up for each message: a reference would keep the port of a destroyed process group in use.
Messages are plain data, see [Note: messages].

`[Note: messages]`  A process that can write to the store of `torch.distributed` can post a message.  If messages were
pickles, such a message could run any code in every rank.  So reading a message makes plain values and objects of
registered classes of data, and calls nothing else.  Numbers stay exact: JSON has all digits of an integer, and the
shortest text that gives the same float.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch.distributed as dist

from ..._torch.modules import default_store

__all__ = ["Board", "LostRankError", "UnreadableError", "read", "register", "written"]

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

    >>> from actoffload.model.tuning.board import read, written
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


SHORTEST, LONGEST, PART = 1e-4, 0.02, 0.01  # pauses between two looks: seconds, and part of the time waited so far


class LostRankError(Exception):
    """Another rank does not answer; the message says which, in a sentence."""


class Board:
    """The messages of one model.

    Parameters
    ----------
    name : str
        The same in all ranks, and of no other model.
    rank : int
        Global rank of this process.
    ranks : sequence of int
        Global ranks that run the model, ascending; the first one leads.
    store : callable, optional
        Returns the store, or None if there is none any more; that of the default process group unless given.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], store: Callable[[], Any] | None = None) -> None:
        self.rank, self.ranks, self._name, self._store = rank, tuple(ranks), name, store or _store

    def post(self, key: str, message: Any) -> None:
        """Post a message, in place of an earlier one with this key."""
        self._call("set", self._path(key), written(message))

    def has(self, key: str) -> bool:
        """Return whether there is a message."""
        return bool(self._call("check", [self._path(key)]))

    def find(self, keys: Sequence[str], limit: float) -> str | None:
        """Wait until there is a message with one of some keys, and return the first of these; None after the limit."""
        begun = time.monotonic()
        while True:
            for key in keys:
                if self.has(key):
                    return key
            waited = time.monotonic() - begun
            if waited > limit:
                return None
            time.sleep(min(max(PART * waited, SHORTEST), LONGEST))

    def read(self, key: str) -> Any:
        """Return a message that is there, and leave it there."""
        try:
            return read(self._call("get", self._path(key)))
        except UnreadableError as error:
            raise LostRankError(f"A message in the store of the process group cannot be read ({error}).") from error

    def remove(self, key: str) -> None:
        """Delete a message, if it is there."""
        self._call("delete_key", self._path(key))

    def take(self, key: str, readers: int = 1) -> Any:
        """Return a message that is there, and delete it once that number of ranks has read it."""
        path, found = self._path(key), self.read(key)
        if readers > 1:
            read = path + "/read"
            if self._call("add", read, 1) < readers:
                return found
            self._call("delete_key", read)
        self._call("delete_key", path)
        return found

    def _path(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store."""
        store = self._store()
        if store is None:
            raise LostRankError("The process group was destroyed.")
        try:
            return getattr(store, method)(*arguments)
        except Exception as error:  # each kind of store has errors of its own
            raise LostRankError(f"The store of the process group does not answer ({type(error).__name__}).") from error


def _store() -> Any:
    return default_store() if default_store is not None and dist.is_available() and dist.is_initialized() else None
