"""Copies in each direction have a stream and a lane of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actoffload.device import ReferenceDevice
from actoffload.engine.host_pool import HostBuffer
from actoffload.engine.transfer import D2H, H2D, Transfers


def test_copies_in_and_out_are_on_streams_and_lanes_of_their_own(monkeypatch: pytest.MonkeyPatch):
    device, used = ReferenceDevice(), list[tuple[str, Any]]()
    monkeypatch.setattr(device, "to_host", lambda pairs, stream: used.append(("out", stream)))
    monkeypatch.setattr(device, "to_device", lambda pairs, stream: used.append(("in", stream)))
    cpu = torch.device("cpu")
    transfers = Transfers(device, cpu, None, None)
    transfers.to_host((), HostBuffer(0, (), (), (), 0), device.current_stream(cpu), None, 0, False)
    assert transfers.end_of_copies_out(False).lane == D2H
    assert transfers.to_device((), 0, False).lane == H2D
    assert D2H != H2D
    assert used == [("out", transfers.out), ("in", transfers.back)]
    assert transfers.out is not transfers.back
