"""Collectives of FSDP2 beside copies: the all-gather and the reduce-scatter of one layer, alone and beside offloading.

Copies run on the copy streams of the library, in its chunks, and last longer than the collectives that are timed.
They take many calls of the host, so ranks have queued them at different moments.  A collective that is not timed
follows.  It ends at the same moment in all ranks, so none waits for another in those that are timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from actoffload import device as devices
from actoffload.device.base import Backend

__all__ = ["ALONE", "BESIDE", "measure_collectives"]

ALONE = ("alone", "alone, again")
BESIDE = {"D2H": ("d2h",), "H2D": ("h2d",), "D2H and H2D": ("d2h", "h2d")}
"""Which copies run beside the collectives."""


class Lanes:
    """Copies of a buffer in both directions, again and again."""

    def __init__(self, backend: Backend, device: torch.device, nbytes: int) -> None:
        self._backend, self._device = backend, device
        self._streams = {lane: backend.new_stream(device) for lane in ("d2h", "h2d")}
        self._pairs = {
            lane: [(backend.empty_host(nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=device))]
            for lane in self._streams
        }

    def queue(self, lane: str, count: int) -> Any:
        """Queue copies of one direction after the work of the current stream; return an event at their end."""
        backend, stream = self._backend, self._streams[lane]
        backend.wait_stream(stream, backend.current_stream(self._device))
        copy = backend.to_host if lane == "d2h" else backend.to_device
        for _ in range(count):
            copy(self._pairs[lane], stream)
        return backend.record_timed(stream)


def _collectives(device: torch.device, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return the all-gather and the reduce-scatter of `nbytes` bytes of bfloat16 in all."""
    world = dist.get_world_size()
    part = torch.zeros(nbytes // 2 // world, dtype=torch.bfloat16, device=device)
    whole = torch.zeros(part.numel() * world, dtype=torch.bfloat16, device=device)
    # Newer releases of PyTorch have other names for both.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {"all-gather": lambda: gather(whole, part), "reduce-scatter": lambda: scatter(part, whole)}


def measure_collectives(
    device: torch.device, *, nbytes: int, times: int, copied: int, copies: int, repeats: int
) -> list[dict[str, Any]]:
    """Time collectives alone and beside copies, interleaved; return a row for each with the samples of this rank.

    Parameters
    ----------
    device : torch.device
        Of this rank.
    nbytes : int
        Bytes of the weights of a layer, in all ranks together.
    times : int
        Collectives one after another in a sample.
    copied, copies : int
        Bytes of a copy, and the number of copies of each direction beside a sample.
    repeats : int
        Samples of each row.
    """
    backend = devices.backend()
    lanes, collectives = Lanes(backend, device, copied), _collectives(device, nbytes)
    ways = dict.fromkeys(ALONE, ()) | BESIDE
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (name, beside): {"collective": name, "beside": beside, "samples": [], "covered": []}
        for name in collectives
        for beside in ways
    }

    def sample(row: dict[str, Any], collective: Callable[[], object], directions: tuple[str, ...]) -> None:
        backend.synchronize(device)
        dist.barrier()
        backend.synchronize(device)
        ends = [lanes.queue(lane, copies) for lane in directions]
        collective()
        stream = backend.current_stream(device)
        start = backend.record_timed(stream)
        for _ in range(times):
            collective()
        end = backend.record_timed(stream)
        backend.synchronize(device)
        seconds = backend.elapsed(start, end)
        row["samples"].append(seconds / times)
        row["covered"] += [min(1.0, max(0.0, backend.elapsed(start, of) / seconds)) for of in ends]

    order = random.Random(0)  # the same in all ranks
    keys = list(rows)
    for repeat in range(repeats + 1):
        order.shuffle(keys)
        for name, beside in keys:
            sample(rows[name, beside], collectives[name], ways[beside])
        if repeat == 0:  # connections and workspaces are made
            for row in rows.values():
                row |= {"samples": [], "covered": []}
    return list(rows.values())
