"""The smallest tensor that is offloaded, and notes on storages that do not pile up."""

from __future__ import annotations

import pytest
import torch
from helpers import forward, nothing_held

from actoffload.context.context import OffloadContext
from actoffload.device import ReferenceDevice
from actoffload.engine import eligibility
from actoffload.engine.engine import Engine
from actoffload.report import Reason
from actoffload.schedule import DefaultSchedule

MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_the_limit_in_bytes_is_the_same_for_every_type(dtype: torch.dtype) -> None:
    """Each of two layers saves a tensor of exactly the limit, and one that is an element smaller."""
    context = OffloadContext(Engine(DefaultSchedule(1, 2).plan(), ReferenceDevice(), min_bytes=MIB))
    count = MIB // dtype.itemsize
    enough, small = (torch.ones(n, dtype=dtype, requires_grad=True) for n in (count, count - 1))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(enough * 1.0).sum().real + torch.sin(small * 1.0).sum().real

    y = forward([layer, layer], torch.zeros(()), context, context.synchronize)
    y.backward()
    del y
    nothing_held(context)
    statistics = context.statistics()
    assert statistics.tensors_offloaded == 1
    assert statistics.bytes_offloaded == MIB
    assert statistics.tensors_kept[Reason.SMALL] >= 2


@pytest.mark.parametrize("notes", ["kept", "finals"])
def test_notes_on_storages_that_are_gone_are_swept(notes: str) -> None:
    """As many notes as storages that exist, within a factor of two and a constant."""
    found = getattr(eligibility, notes)
    living = [torch.zeros(4) for _ in range(10)]
    mark = eligibility.mark_kept if notes == "kept" else _final
    for tensor in living:
        mark(tensor)
    many = 3 * len(found) + 1000
    for _ in range(many):
        mark(torch.zeros(4))
    assert len(found) < many // 2
    for tensor in living:  # these are as before
        assert not _storage(found[tensor.untyped_storage()._cdata]).expired


def _final(tensor: torch.Tensor) -> None:
    eligibility.mark_final(tensor, object(), False, whole=False)


def _storage(note: object) -> eligibility.StorageRef:
    return note.storage if isinstance(note, eligibility.Final) else note
