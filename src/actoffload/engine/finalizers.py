"""What is given back when autograd drops something, without Python code in the finalizer.

`[Note: finalizers]`  Python runs signal handlers between two bytecodes of the main thread.  A signal that arrives while
autograd computes waits for the next bytecode.  If that is in a ``__del__``, Python drops the exception of the handler,
and the ``__del__`` stops half-way.  So the finalizers here are callbacks of weak references, and the callback is
``deque.append``, which is C.  The weak reference, a `Resources`, has all that is to be given back.  `settle` gives it
back in ordinary code: before host memory is taken, before bytes are counted, and in statistics.

Device memory is freed by reference counts.  Only a storage that is dropped while a transfer uses its memory has a
``__del__``, because a stream has to wait before.  `raise_later` keeps an exception that comes in there, and `settle`
raises it.  Python drops one that comes before the first line of that ``__del__``; then `Resources.in_flight` keeps the
memory until `settle` has let the stream wait.

`settle` itself may be interrupted after any call.  So statements without a call between them take a resource out of its
`Resources` and put it into a queue: neither a signal handler nor another thread can come between.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from .._torch.tensors import free_storage_weakref

__all__ = ["Resources", "dropped", "raise_later", "settle"]

dropped: deque[Resources] = deque()
_drop = dropped.append  # one object for all references
_alive: set[Resources] = set()  # a weak reference calls back only if something keeps it
_errors: deque[BaseException] = deque()


class Resources(weakref.ref[Any]):
    """What an object gives back when it is dropped; made by `of`."""

    __slots__ = ("buffers", "fence", "freed", "in_flight", "nbytes", "returned", "weak")

    weak: Any  # a weak reference to a storage
    nbytes: int  # device memory of the object that is counted
    freed: deque[int] | None  # where `nbytes` goes: the queue of the counters
    buffers: tuple[int, ...]  # numbers of host buffers; a number does not keep the memory of a pool that is dropped
    returned: deque[Any] | None  # where `buffers` go: the queue of the host pool
    fence: tuple[Any, ...]  # the positions after which the host memory may be written again
    # Device memory that a copy writes, `Transfers.join`, and its arguments: the compute stream waits for that copy.
    in_flight: tuple[Any, ...] | None

    @staticmethod
    def of(
        owner: object, weak: Any = None, freed: deque[int] | None = None, returned: deque[Any] | None = None
    ) -> Resources:
        """Return the resources of an object, without any but a weak reference to a storage."""
        made = Resources(owner, _drop)
        made.weak, made.nbytes, made.freed = weak, 0, freed
        made.buffers, made.returned, made.fence, made.in_flight = (), returned, (), None
        _alive.add(made)
        return made

    def give_back(self) -> None:
        """Give everything back; what was given back already is left out."""
        if self.in_flight is not None:  # the finalizer of the storage was interrupted
            _, join, *arguments = self.in_flight
            join(*arguments)
            self.in_flight = None
        nbytes, self.nbytes = self.nbytes, 0
        if nbytes and self.freed is not None:
            self.freed.append(nbytes)
        buffers, self.buffers = self.buffers, ()
        if buffers and self.returned is not None:
            self.returned.append((buffers, self.fence))
        weak, self.weak = self.weak, None
        if weak is not None:
            free_storage_weakref(weak)
        _alive.discard(self)


def settle() -> None:
    """Give back what dropped objects had, and raise an exception that came while a finalizer ran."""
    while dropped:
        try:
            first = dropped[0]
        except IndexError:  # another thread was faster
            break
        first.give_back()
        if dropped and dropped[0] is first:
            dropped.popleft()
    if _errors:
        raise _errors.popleft()


def raise_later(error: BaseException) -> None:
    """Keep an exception that came while a finalizer ran; the next `settle` raises it."""
    _errors.append(error.with_traceback(None))  # its frames keep what is being dropped
