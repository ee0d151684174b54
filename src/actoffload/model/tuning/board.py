"""Messages between the ranks of one model, through the key-value store of `torch.distributed`.

`[Note: no collectives]`  A rank that deviates, because it ends early or runs another forward, must
not make the others hang.  A collective would: it waits until all ranks take part.  A message lies in the store until
it is read, and waiting for one has a limit.  The store is polled, because a wait inside of it blocks its other users in
this process.  It is looked up for each message: a reference would keep the port of a destroyed process group in use.
Messages are plain data, see [Note: messages].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..._torch.modules import default_store
from .messages import UnreadableError, read, written

__all__ = ["Board", "LostRankError"]

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
