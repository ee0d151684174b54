"""Bringing several storages back together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from ..device.base import Stream
from .storage import SavedStorage, Where
from .transfer import Transfers

__all__ = ["reload"]


def reload(storages: Sequence[SavedStorage], layer: int, *, on_demand: bool = False) -> None:
    """Bring storages back, the first one first; those that are on the device are passed over.

    All device memory is taken before the first copy starts, so that one start mark serves all.  If it runs
    out, those that got theirs come back all the same, and the error is the allocator's own.
    """
    groups: list[tuple[Transfers, Stream, list[SavedStorage]]] = []
    for storage in storages:
        if storage.where is not Where.HOST:
            continue
        transfers, stream = storage.home.transfers, storage.stream
        for of, on, group in groups:  # nearly always there is one
            if of is transfers and on == stream:
                group.append(storage)
                break
        else:
            groups.append((transfers, stream, [storage]))
    for transfers, stream, group in groups:
        _reload_group(transfers, stream, group, layer, on_demand)


def _reload_group(transfers: Transfers, stream: Stream, group: list[SavedStorage], layer: int, on_demand: bool) -> None:
    backend = transfers.backend
    taken: list[SavedStorage] = []
    try:
        with nullcontext() if backend.current_stream(transfers.device) == stream else backend.on(stream):
            for storage in group:
                storage.allocate()
                taken.append(storage)
    finally:
        if taken:
            captured = backend.capturing()
            # [wait: copies in for their memory]
            transfers.begin_reload(stream)
            done = 0
            try:
                for storage in taken:
                    storage.come_back(layer, captured, on_demand=on_demand)
                    done += 1
            finally:
                for storage in taken[done:]:  # a copy could not be queued: this memory has no content
                    storage.evict()
