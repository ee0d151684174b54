"""Bringing several storages back together."""

from __future__ import annotations

from collections.abc import Sequence

from ..device.base import Stream
from .residency import Residency
from .storage import SavedStorage
from .transfer import Transfers

__all__ = ["reload"]


def reload(storages: Sequence[SavedStorage], layer: int, *, on_demand: bool = False) -> None:
    """Bring storages back, the first one first; those that are on the device are passed over.

    All device memory is taken before the first copy starts, so that one start mark serves all.  If it runs
    out, those that got theirs come back all the same, and the error is the allocator's own.
    """
    waiting = [storage for storage in storages if storage.where is Residency.HOST]
    while waiting:
        transfers, stream = waiting[0].home.transfers, waiting[0].stream
        group, waiting = waiting, []
        if len(group) > 1:  # nearly always they are all from one stream
            both = group
            group = [s for s in both if s.home.transfers is transfers and s.stream == stream]
            if len(group) < len(both):
                waiting = [s for s in both if s not in group]
        _reload_group(transfers, stream, group, layer, on_demand)


def _reload_group(transfers: Transfers, stream: Stream, group: list[SavedStorage], layer: int, on_demand: bool) -> None:
    backend = transfers.backend
    taken = 0
    try:
        if backend.current_stream(transfers.device) == stream:  # [guard: stream of the allocation -> True]
            for storage in group:
                storage.allocate()
                taken += 1
        else:
            with backend.on(stream):
                for storage in group:
                    storage.allocate()
                    taken += 1
    finally:
        if taken:
            captured = backend.capturing()
            # [wait: copies in for their memory]
            transfers.begin_reload(stream)
            done = 0
            try:
                for storage in group[:taken]:
                    storage.queue_reload(layer, captured, on_demand=on_demand)
                    done += 1
            finally:
                for storage in group[done:taken]:  # a copy could not be queued: this memory has no content
                    storage.evict()
