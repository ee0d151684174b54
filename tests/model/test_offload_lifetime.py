"""What a model under `offload` holds, and for how long: graphs, hooks, copies of the model, the model itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers import no_gc, nothing_held
from whole_model import UNIT, Transformer, Waves, data, offload


def start() -> torch.Tensor:
    return data().requires_grad_() * 1.0


# By reference counts alone


def test_the_model_and_the_handle_are_freed_by_reference_counts():
    with no_gc():
        model = Transformer(6)
        handle = offload(model, layers=["blocks.*", "*.mlp"], keep="*.norm1")
        for _ in range(3):
            model(start()).sum().backward()
        with handle.recording():
            model(start()).sum().backward()
        print(handle, handle.report(), handle.timeline())
        refs = [weakref.ref(p) for p in model.parameters()]
        refs += [weakref.ref(thing) for thing in (model, handle, handle._engine, handle._tracker)]
        del model, handle
        assert [ref() for ref in refs if ref() is not None] == []
        assert gc.collect() == 0


def test_a_handle_whose_model_is_gone():
    with no_gc():
        model = Waves(6)
        handle = offload(model)
        model(start()).sum().backward()
        del model
        assert "offload of Waves" in str(handle)
        assert handle.report().groups
        assert repr(handle).startswith("<OffloadHandle of Waves")
        handle.remove()
        assert handle.statistics().host_bytes == 0


def test_a_forward_that_outlives_its_model_names_the_misuse():
    model = Transformer(3)
    offload(model, layers="blocks.*")
    forward, other = model.forward, model.blocks[0].forward
    assert torch.equal(forward(data()), model(data()))
    del model
    for call in (forward, other):
        with pytest.raises(
            RuntimeError, match=r"an offloaded module that was deleted: keep a reference to the module\."
        ):
            call(data())


@pytest.mark.parametrize("blocks_run", [1, 3, 6])
def test_a_graph_thrown_away_gives_everything_back_at_once(blocks_run):
    model = Waves(6)
    handle = offload(model)
    with no_gc():
        for _ in range(3):
            y = start()
            for block in model.blocks[:blocks_run]:
                y = block(y)
            assert handle.statistics().resident_bytes > 0
            del y
            nothing_held(handle)
            y = model(start())
            assert handle.statistics().resident_bytes == 4 * UNIT
            assert handle.statistics().host_bytes_used == 8 * UNIT
            del y
            nothing_held(handle)
