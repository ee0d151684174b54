"""Slabs of page-locked host memory, cut into buffers that are reused without the host waiting.

`[Note: slabs]`  PyTorch's pinned allocator rounds every request up to a power of two and allocates each new block
at about 0.7 s per GiB.  So `Slabs` allocates only powers of two, and only what is missing: a shortfall of 100 MiB
becomes slabs of 64, 32 and 4 MiB.  A buffer may consist of several segments, so the rest of a slab is not wasted.

A returned buffer is first kept whole, in a bin of its size: a training step allocates the same sizes again.  Only when
a bin is empty are the bins dissolved into free segments and joined.

Free memory carries a fence: the positions after which its last readers are done, at most one for each stream.  The
stream that writes next waits for them.  Buffers that were used while a graph was captured are addresses in that graph,
so they are not reused before their pool is closed.

An interrupt may come between two changes that belong together.  `Slabs.broken` is set meanwhile; whoever finds it set
makes the free segments and the accounts anew from the slabs and the buffers in use, which each change leaves right.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from ..device.base import Backend, StreamPosition, latest_positions
from ..schedule.timeline import size as written
from .finalizers import Resources, settle
from .segments import SPLIT, FreeSegments, HostBuffer, Segment

__all__ = ["GRANULE", "Account", "Slabs"]

ALIGN = 512
GRANULE = 1 << 21
LARGEST = 1 << 30

CAPTURED = (
    "a graph is being captured and page-locked memory cannot be taken from the system meanwhile; run one step of the "
    "same shape before the capture"
)

_given_back = [0]  # bytes that pools of any device have returned or freed so far


@dataclass(slots=True, eq=False)
class Account:
    """Bytes of one pool."""

    number: int  # by which buffers name it
    pool: weakref.ref[Any] | None  # None in the account of what closed pools still use
    held: int = 0  # in use, and free bytes that were last used for this pool
    used: int = 0  # in use, by captured graphs too
    taken: int = 0  # the same without what captured graphs alone use

    @property
    def free(self) -> int:
        """Bytes held and not used."""
        return self.held - self.used


class Slabs:
    """The slabs of one device, and what of them is free.  `lock` guards all methods."""

    def __init__(self, backend: Backend, device: torch.device | None = None) -> None:
        self._device = backend.current_device() if device is None else device
        self.broken = False  # an interrupt came in between, or a change is in progress
        self.lock = threading.RLock()
        self.returned: deque[tuple[Sequence[int], tuple[StreamPosition, ...]]] = deque()
        self.gone: deque[weakref.ref[Any]] = deque()  # pools that were dropped without a close
        self._nobody = Account(0, None)
        self.accounts = {0: self._nobody}
        self._backend = backend
        self._slabs: dict[int, torch.Tensor] = {}
        self._numbers = count(1)
        self._free = FreeSegments()
        self._bins: dict[int, dict[HostBuffer, None]] = {}  # by size; the last one returned last
        self._used: dict[int, HostBuffer] = {}  # by number
        self._exhausted = ""
        self._retry_at = 0

    def account(self, pool: object) -> Account:
        """Return a new account, which is closed when `pool` is dropped."""
        with self.lock:
            number = next(self._numbers)
            account = self.accounts[number] = Account(number, weakref.ref(pool, self.gone.append))
            return account

    def settle(self) -> None:
        """Sort in the buffers that were returned, and close the pools that were dropped."""
        settle()
        self.mend()
        while self.returned:
            first = self.returned[0]
            numbers, fence = first
            for number in numbers:
                buffer = self._used.get(number)  # None if `settle` was interrupted after this one
                if buffer is not None and buffer.taken:
                    self._sort_in(buffer, fence)
            if self.returned and self.returned[0] is first:
                self.returned.popleft()
        while self.gone:
            for account in [account for account in self.accounts.values() if account.pool is self.gone[0]]:
                self.close(account)
                del self.accounts[account.number]
            self.gone.popleft()

    def _sort_in(self, buffer: HostBuffer, fence: tuple[StreamPosition, ...]) -> None:
        _given_back[0] += buffer.size
        account, bin_ = self.accounts[buffer.account], self._bins.setdefault(buffer.nbytes, {})
        # [guard: buffer of a closed pool]
        if buffer.closed:
            self.broken = True
            del self._used[buffer.number]
            account.used -= buffer.size
            account.taken -= buffer.size
            self._insert_all(buffer, fence)
            self._trim(account)
            self.broken = False
        elif buffer.captured:
            account.taken -= buffer.size
            buffer.taken = False
        else:
            # No call but the last: see [Note: finalizers].
            del self._used[buffer.number]
            account.used -= buffer.size
            account.taken -= buffer.size
            buffer.taken = False
            buffer.fence = fence  # [guard: fence of a returned buffer]
            bin_[buffer] = None

    def take(
        self,
        account: Account,
        limit: int | None,
        nbytes: int,
        captured: bool,
        whole: bool,
        owner: Resources | None,
        before: HostBuffer | None,
    ) -> HostBuffer | str:
        """Return a buffer for an account, or why there is none."""
        if self.broken:
            self.mend()
            if self.broken:
                return CAPTURED
        need = -(-nbytes // ALIGN) * ALIGN
        more = need - account.held + account.used  # bytes that other accounts hold, if positive
        allowed = limit is None or more <= 0 or account.held + more <= limit
        number, bin_ = next(self._numbers), self._bins.get(nbytes)
        if bin_ and (before is None or before not in bin_):
            before = next(reversed(bin_))
        # [guard: whole buffer from a bin]
        if bin_ and before is not None and allowed and not (whole and len(before.parts) > 1):
            if more > 0:
                self.broken = True
                self._charge(account, more)
                self.broken = False
            # No call from here on: see [Note: finalizers].
            buffer = before
            del bin_[buffer]
        else:
            self.broken = True
            segments = self._find(need, whole) if allowed else None
            if segments is None:
                sizes = self._missing(need, whole)
                refusal = _over_limit(account, limit, max(sum(sizes), need - account.free))
                refusal = refusal or (CAPTURED if captured else self._grow(account, sizes))
                if refusal:
                    self.broken = False
                    return refusal
                segments = self._find(need, whole)
                assert segments is not None
            if more > 0:
                self._charge(account, need - account.free)
            buffer = self._make(nbytes, segments, account)
        buffer.number = number
        buffer.account = account.number
        self._used[buffer.number] = buffer
        account.used += buffer.size
        account.taken += buffer.size
        buffer.taken = True
        if owner is not None:
            owner.buffers = (*owner.buffers, buffer.number)
        self.broken = False
        return buffer

    def _charge(self, account: Account, nbytes: int) -> None:
        """Let an account hold free bytes that others have held."""
        for other in self.accounts.values():  # what closed pools hold comes first
            if other is not account and nbytes > 0:
                part = min(nbytes, other.free)
                other.held -= part
                account.held += part
                nbytes -= part

    def trim(self, account: Account, keep: int = 0) -> int:
        """Free slabs without a used byte, as many as an account has free bytes for; return the bytes freed.

        At least `keep` bytes stay with the account.  Large slabs stay, because a buffer of several segments takes as
        many copies.
        """
        self.mend()
        self.broken = True
        freed = self._trim(account, keep)
        self.broken = False
        return freed

    def _trim(self, account: Account, keep: int = 0) -> int:
        self._dissolve()
        unused = [s for s in self._free.segments if s.nbytes == self._slabs[s.slab].numel()]
        before = account.held
        for segment in sorted(unused, key=lambda s: s.nbytes):
            if segment.nbytes <= min(account.free, account.held - keep):
                self._remove(segment.slab, account)
        return before - account.held

    def close(self, account: Account) -> None:
        """Free the slabs in which no other account uses a byte, as far as the bytes of an account allow."""
        self.mend()
        self.broken = True
        self._close(account)
        self.broken = False

    def _close(self, account: Account) -> None:
        self._dissolve()
        used = [buffer for buffer in self._used.values() if buffer.account == account.number]
        others = (buffer for buffer in self._used.values() if buffer.account != account.number)
        shared = {segment.slab for buffer in others for segment in buffer.segments}
        mine: Counter[int] = Counter()
        for buffer in used:
            for segment in buffer.segments:
                mine[segment.slab] += segment.nbytes
        for slab in sorted(set(self._slabs) - shared, key=lambda slab: -self._slabs[slab].numel()):
            # The free bytes of a slab may be those of other accounts.
            if self._slabs[slab].numel() - mine[slab] <= account.free:
                account.used -= mine[slab]
                self._remove(slab, account)
        self._nobody.held += account.held
        for buffer in used:
            buffer.segments = tuple(s for s in buffer.segments if s.slab in self._slabs)
            buffer.size = sum(s.nbytes for s in buffer.segments)
            if buffer.taken:
                buffer.closed = True
                buffer.account = 0
                self._nobody.used += buffer.size
                self._nobody.taken += buffer.size
            else:  # of a captured graph
                del self._used[buffer.number]
                self._insert_all(buffer, ())
        account.held = account.used = account.taken = 0
        self._exhausted = ""
        self._trim(self._nobody)

    def mend(self) -> None:
        """Make the free segments and the accounts anew if an interrupt came between two changes."""
        if not self.broken or self._backend.capturing():
            return
        self._backend.synchronize(self._device)  # so what is free needs no fence
        self._bins.clear()
        free, occupied = FreeSegments(), dict[int, list[Segment]]()
        for buffer in self._used.values():
            buffer.segments = tuple(segment for segment in buffer.segments if segment.slab in self._slabs)
            buffer.size = sum(segment.nbytes for segment in buffer.segments)
            for segment in buffer.segments:
                occupied.setdefault(segment.slab, []).append(segment)
        for slab, memory in self._slabs.items():
            start = 0
            for segment in sorted(occupied.get(slab, ()), key=lambda segment: segment.start):
                if segment.start > start:
                    free.insert(Segment(slab, start, segment.start))
                start = segment.stop
            if start < memory.numel():
                free.insert(Segment(slab, start, memory.numel()))
        self._free = free
        left = sum(memory.numel() for memory in self._slabs.values())
        for account in self.accounts.values():
            own = [buffer for buffer in self._used.values() if buffer.account == account.number]
            account.used = sum(buffer.size for buffer in own)
            account.taken = sum(buffer.size for buffer in own if buffer.taken)
            left -= account.used
        for account in self.accounts.values():  # free bytes: as many as it had, if there are so many
            free_bytes = min(max(account.held - account.used, 0), left)
            account.held = account.used + free_bytes
            left -= free_bytes
        self._nobody.held += left
        self.broken = False

    def _remove(self, slab: int, account: Account) -> None:
        nbytes = self._slabs.pop(slab).numel()
        self._free.segments = [segment for segment in self._free.segments if segment.slab != slab]
        account.held -= nbytes
        _given_back[0] += nbytes

    def _make(self, nbytes: int, segments: list[Segment], account: Account) -> HostBuffer:
        parts, left = [], nbytes
        for segment in segments:
            size = min(left, segment.nbytes)
            parts.append(self._slabs[segment.slab][segment.start : segment.start + size])
            left -= size
        fence = latest_positions(position for segment in segments for position in segment.fence)
        # [keep: host memory]
        return HostBuffer(nbytes, tuple(parts), tuple(segments), fence, account.number)

    def _find(self, need: int, whole: bool) -> list[Segment] | None:
        segments = self._free.cut(need, whole)
        if segments is None and self._bins:
            self._dissolve()
            segments = self._free.cut(need, whole)
        return segments

    def _dissolve(self) -> None:
        """Turn the buffers in the bins back into free segments."""
        for bin_ in self._bins.values():
            for buffer in bin_:
                self._insert_all(buffer, buffer.fence)
        self._bins.clear()

    def _insert_all(self, buffer: HostBuffer, fence: tuple[StreamPosition, ...]) -> None:
        for segment in buffer.segments:
            self._free.insert(segment._replace(fence=fence))  # [guard: fence of a dissolved buffer]

    def _missing(self, need: int, whole: bool) -> list[int]:
        """Return the sizes of the slabs that have to be allocated."""
        usable = 0 if whole else sum(s.nbytes for s in self._free.segments if s.nbytes >= SPLIT)
        shortfall = max(0, -(-(need - usable) // GRANULE) * GRANULE)
        sizes: list[int] = []
        if whole:
            sizes.append(max(GRANULE, 1 << (need - 1).bit_length()))  # [guard: size of a whole slab]
        while not whole and shortfall:
            size = min(LARGEST, 1 << (shortfall.bit_length() - 1))
            sizes.append(size)
            shortfall -= size
        return sizes

    def _grow(self, account: Account, sizes: Sequence[int]) -> str:
        """Allocate slabs; return why that is not possible, or nothing."""
        if self._exhausted and _given_back[0] < self._retry_at:  # [guard: request that the system refused]
            return self._exhausted
        for size in sizes:
            try:
                slab = self._backend.empty_host(size)
            except (RuntimeError, MemoryError) as error:
                # Another attempt for each tensor would cost more than it could bring, and strain the system.
                self._exhausted = f"the system has no more page-locked memory ({error})"
                self._retry_at = _given_back[0] + size
                return self._exhausted
            number = next(self._numbers)
            self._slabs[number] = slab
            account.held += size
            self._free.insert(Segment(number, 0, size))
        self._exhausted = ""
        return ""


def _over_limit(account: Account, limit: int | None, more: int) -> str:
    """Return why an account may not hold `more` bytes in addition, or an empty text."""
    # [guard: limit on the bytes held]
    if limit is not None and account.held + more > limit:
        return _refusal(limit, more, account.held)
    return ""


@lru_cache(maxsize=64)  # a step refuses the same again
def _refusal(limit: int, more: int, held: int) -> str:
    limited = f"the limit of {written(limit)} of host memory forbids {written(more)} more"
    return f"{limited} beside the {written(held)} that are held"
