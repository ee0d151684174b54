"""The reference device by itself: copies are real, time is virtual."""

import pytest
import torch

from actoffload.device import ReferenceDevice

CPU = torch.device("cpu")


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_copies_take_as_long_as_their_bytes_in_however_many_parts(direction: str, parts: int) -> None:
    device = ReferenceDevice(d2h=512.0, h2d=512.0)
    stream = device.new_stream(CPU)
    pairs = [(torch.zeros(256, dtype=torch.uint8), torch.full((256,), 7, dtype=torch.uint8)) for _ in range(parts)]
    getattr(device, direction)(pairs, stream)
    assert stream.now == parts * 0.5
    assert all(torch.equal(host, memory) for host, memory in pairs)
