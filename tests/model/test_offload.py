"""The call `actoffload.offload`: what is chosen, what is offloaded, and what its arguments mean."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from whole_model import ROWS, UNIT, WIDTH, Transformer, Waves, agrees

import actoffload
from actoffload import HostMemoryWarning
from actoffload.report import Reason
from actoffload.schedule import Do


@pytest.mark.parametrize(
    ("model", "number"),
    [
        (lambda: Transformer(5), 3),
        (lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]), 3),
        (lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(7)]), 5),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 48), 4, enable_nested_tensor=False), 2),
    ],
)
def test_plain_pytorch_models(model, number):
    handle, statistics = agrees(model(), before=1)
    assert len(handle.plan.offloaded) == number
    assert statistics.reloaded_on_demand == 0
    # The output of the last offloaded group, which it saves itself, is saved by a kept one too: copied, not freed.
    shared = statistics.tensors_kept.get(Reason.SHARED, 0)
    assert statistics.reloaded_ahead == statistics.tensors_offloaded - shared > 0


# How many


@pytest.mark.parametrize(
    ("options", "number"),
    [
        *(({"num_layers": number}, number) for number in (0, 1, 5)),
        *(({"fraction": fraction}, number) for fraction, number in ((0.0, 0), (0.125, 1), (0.7, 3), (1, 4))),
    ],
    ids=str,
)
def test_how_many(options, number):
    handle, statistics = agrees(Waves(6), steps=1, **options)
    assert handle.plan.offloaded == tuple(range(number))
    assert statistics.bytes_offloaded == number * 2 * UNIT
    assert statistics.peak_resident_bytes == (6 - number) * 2 * UNIT


def test_min_bytes_is_the_smallest_offloaded_size():
    for limit in (UNIT, f"{UNIT // 1024}KiB"):
        _, statistics = agrees(Waves(6), steps=1, min_bytes=limit)
        assert statistics.tensors_offloaded == 8
    _, statistics = agrees(Waves(6), steps=1, min_bytes=UNIT + 1)
    assert statistics.tensors_offloaded == 0
    # The weights of the blocks are parameters; they are smaller as well, and a size is what is asked first.
    assert statistics.tensors_kept[Reason.SMALL] >= 12
    assert statistics.bytes_kept[Reason.SMALL] >= 12 * UNIT
    _, statistics = agrees(Waves(6), steps=1, min_bytes=0)
    assert statistics.tensors_offloaded == 8


def test_min_bytes_is_a_mebibyte_unless_told():
    with actoffload.device.use(actoffload.device.ReferenceDevice()):
        model = Waves(4)
        handle = actoffload.offload(model)
    rows = 2**20 // (WIDTH * 4)
    for size, copied in ((rows - 1, 0), (rows, 4)):
        handle.reset_statistics()
        model(torch.randn(size, WIDTH)).sum().backward()
        assert handle.statistics().tensors_offloaded == copied


@pytest.mark.parametrize("limit", [0, UNIT, 3 * UNIT])
def test_max_host_bytes(limit, monkeypatch):
    monkeypatch.setattr(actoffload.engine.host_pool, "GRANULE", UNIT)
    with pytest.warns(HostMemoryWarning) as caught:
        _, statistics = agrees(Waves(6), max_host_bytes=limit)
    lines = [warning.filename for warning in caught if warning.category is HostMemoryWarning]
    assert lines == [str(Path(__file__).parents[1] / "support" / "whole_model.py")]  # where a block saves the tensor
    assert statistics.host_bytes <= limit
    assert statistics.bytes_offloaded <= 3 * limit
    assert statistics.tensors_kept[Reason.HOST_FULL] == 3 * 8 - statistics.tensors_offloaded


@pytest.mark.parametrize(("inflight", "distance"), [(None, 3), (1, 2)])
def test_max_inflight(inflight, distance):
    handle, statistics = agrees(Waves(8), steps=1, num_layers=5, max_inflight=inflight)
    plan = handle.plan
    for k in range(5):
        assert plan.find(Do.RELEASE, k).layer - k == distance
        assert plan.find(Do.RELOAD, k).layer - k == distance
    assert statistics.bytes_offloaded == 10 * UNIT
    # Three groups are kept in any case; the limit decides how many offloaded ones are on the device with them.
    assert statistics.peak_resident_bytes <= 3 * 2 * UNIT


# Keep


@pytest.mark.parametrize(
    "keep",
    ["*.attention", lambda model: [block.attention for block in model.blocks]],
)
def test_keep_inside_of_chosen_modules(keep):
    model = Transformer(5)
    keep = keep(model) if callable(keep) else keep
    all_of_it = agrees(copy.deepcopy(model), steps=1, before=1)[1]
    handle, statistics = agrees(model, steps=1, before=1, keep=keep)
    attention = UNIT + 3 * UNIT + ROWS * ROWS * 4 + UNIT
    assert all_of_it.bytes_offloaded - statistics.bytes_offloaded == 3 * attention
    assert statistics.bytes_kept[Reason.KEPT] >= 5 * attention
    assert "keep: blocks.0 ... 4.attention" in str(handle)


def test_keep_around_chosen_modules_and_the_whole_model():
    model = Transformer(5)
    _, statistics = agrees(model, steps=1, before=1, keep=[model])
    assert statistics.tensors_offloaded > 0
    assert Reason.OUTSIDE not in statistics.bytes_kept
    assert statistics.bytes_kept[Reason.KEPT] >= UNIT  # the input of the head
