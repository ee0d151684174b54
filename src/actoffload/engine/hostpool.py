"""The page-locked host memory of one context or handle: its limit, its account, and how it is returned.

`[Note: the host pool]`  All contexts and handles of a device share its slabs.  Each has a `HostPool` of its own, with a
limit and an account.  The account holds the bytes in use, and the free bytes that were last allocated or used for it;
`max_host_bytes` limits their sum.  `HostPool.trim` frees slabs without a used byte, as many as the free bytes of the
account allow.  `HostPool.close` also frees slabs in which no other account uses a byte.  A request that the system
refused is repeated when as many bytes as were missing have been returned or freed since.
"""

from __future__ import annotations

from ..device.base import Backend, StreamPosition
from .finalizers import Resources, dropped
from .segments import HostBuffer
from .slabs import Slabs

__all__ = ["HostPool"]


class HostPool:
    """The page-locked memory of one context or handle on one device."""

    def __init__(self, backend: Backend, max_bytes: int | None = None, slabs: Slabs | None = None) -> None:
        self.slabs = slabs = Slabs(backend) if slabs is None else slabs
        self._backend = backend
        self._max_bytes = max_bytes
        self._account = slabs.account(self)
        self.returned = slabs.returned
        self.high_water = 0
        self.refusal = ""

    @property
    def bytes_held(self) -> int:
        """Bytes in use, and free bytes that were last used here."""
        return self._account.held

    @property
    def bytes_taken(self) -> int:
        """Bytes in use."""
        return self._account.taken

    def take(
        self,
        nbytes: int,
        *,
        captured: bool = False,
        whole: bool = False,
        owner: Resources | None = None,
        before: HostBuffer | None = None,
    ) -> HostBuffer | None:
        """Return a buffer of `nbytes` bytes, or None, with `refusal` set, if the limit or the system forbids it.

        While work that uses it is `captured` into a graph, no memory can be taken from the system; the buffer is not
        reused.  A `whole` one has one segment.  `owner` returns it when its object is dropped; `before` is preferred.
        """
        slabs = self.slabs
        with slabs.lock:
            if dropped or slabs.returned or slabs.gone:
                slabs.settle()
            account = self._account
            buffer = slabs.take(account, self._max_bytes, nbytes, captured, whole, owner, before)
            if isinstance(buffer, str):
                self.refusal = buffer
                return None
            buffer.captured = captured
            if captured:
                buffer.fence = ()
            if account.taken > self.high_water:
                self.high_water = account.taken
            return buffer

    def give_back(self, buffer: HostBuffer, fence: tuple[StreamPosition, ...]) -> None:
        """Return a buffer that may be written again after the positions of `fence`; from any thread, at any time."""
        self.returned.append(((buffer.number,), fence))

    def settle(self) -> None:
        """Sort in what was returned; `take` does that too."""
        with self.slabs.lock:
            self.slabs.settle()

    def trim(self, keep: int = 0) -> int:
        """Free slabs without a used byte, as many as there are free bytes in `bytes_held`; return the bytes freed.

        At least `keep` bytes stay, or all if fewer are held.
        """
        with self.slabs.lock:
            self.slabs.settle()
            freed = self.slabs.trim(self._account, keep)
        self._backend.release_host()
        return freed

    def close(self) -> None:
        """Free the memory, except slabs in which other pools use a byte; buffers in use keep theirs alive."""
        with self.slabs.lock:
            self.slabs.settle()
            self.slabs.close(self._account)
        self._backend.release_host()
