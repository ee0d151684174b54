"""What a model under `offload` holds, and for how long: graphs, hooks, copies of the model, the model itself."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import random
import threading
import weakref

import pytest
import torch
from helpers import alive, no_gc, nothing_held
from torch import nn
from whole_model import UNIT, Transformer, Wave, Waves, data, equal, hooks, nothing_installed, offload, train

import actoffload
from actoffload.engine.engine import Engine
from actoffload.engine.hostpool import HostPool
from actoffload.engine.layer import Layer, Token
from actoffload.engine.modelpass import ModelPass
from actoffload.engine.saved import Moved
from actoffload.engine.storage import SavedStorage
from actoffload.tracker import Tracker

OURS = (SavedStorage, ModelPass, Layer, Moved, Token)


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


def test_the_handle_is_freed_and_the_model_goes_on():
    """Nobody has to keep it: ``actoffload.offload(model)`` alone is a program too."""
    with no_gc():
        model = Waves(6)
        want = train(copy.deepcopy(model))
        handle = offload(model)
        gone, engine = weakref.ref(handle), handle._engine
        del handle
        assert gone() is None
        equal(train(model), want)
        assert engine.statistics().bytes_offloaded == 3 * 8 * UNIT


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


def test_removing_frees_everything_of_ours():
    with no_gc():
        before = alive(Tracker, Engine, HostPool, *OURS)
        model = Waves(6)
        handle = offload(model)
        model(start()).sum().backward()
        handle.remove()
        del handle
        assert alive(Tracker, Engine, HostPool, *OURS) == before
        assert not any(hooks(model))


def test_a_step_leaves_no_cycle():
    model = Transformer(6)
    handle = offload(model)
    with no_gc():
        model(start()).sum().backward()
        gc.collect()
        for _ in range(3):
            y = model(start())
            assert alive(SavedStorage) > 4
            y.sum().backward()
            del y
            assert alive(*OURS) == len(handle.groups), "the layers of the latest pass are kept for the report"
            assert gc.collect() == 0
        nothing_held(handle)


@pytest.mark.parametrize("blocks_run", range(1, 7))
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


def test_memory_is_freed_while_backward_runs():
    model = Waves(8)
    handle = offload(model)
    levels = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda module, args, y: (
                y.register_hook(lambda g: levels.append(handle.statistics().resident_bytes)) and None
            )
        )
    model(start()).sum().backward()
    assert levels[0] == 4 * UNIT
    assert max(levels) <= 5 * UNIT
    assert levels[-1] <= 4 * UNIT
    nothing_held(handle)


def test_retain_graph_and_a_second_backward():
    model = Waves(6)
    handle = offload(model)
    y = model(start())
    after_forward = handle.statistics()
    got = []
    for k in range(3):
        y.sum().backward(retain_graph=True)
        now = handle.statistics()
        assert now.resident_bytes == after_forward.resident_bytes, "reloaded tensors stayed"
        assert now.bytes_reloaded == (k + 1) * after_forward.bytes_offloaded == (k + 1) * 8 * UNIT
        assert now.reloaded_on_demand == 0
        got.append([p.grad for p in model.parameters()])
        model.zero_grad()
    equal(got[1], got[0])
    equal(got[2], got[0])
    y.sum().backward()
    del y
    nothing_held(handle)


def test_a_graph_that_outlives_the_handle_and_the_model():
    with no_gc():
        model = Waves(6)
        handle = offload(model)
        x = data().requires_grad_()
        want = torch.autograd.grad(copy.deepcopy(model)(x).sum(), x)
        y = model(x)
        engine = handle._engine
        handle.remove()
        del model, handle
        equal(list(torch.autograd.grad(y.sum(), x)), list(want))
        del y
        assert engine.statistics().host_bytes_used == 0


# Copies of the model


def copies(model: nn.Module) -> dict[str, nn.Module]:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(saved, weights_only=False),
    }


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_a_model_without_offload(how, removed):
    model = Transformer(6)
    want = train(copy.deepcopy(model))
    handle = offload(model, keep="*.norm1")
    train(model, steps=1)
    if removed:
        handle.remove()
    before = handle.statistics()
    other = copies(model)[how]
    equal(train(other), want)
    assert handle.statistics() == before
    second = offload(other)
    equal(train(other), want)
    assert second.statistics().bytes_offloaded > 0
    assert handle.statistics() == before
    again = copy.deepcopy(other)
    second.remove()
    equal(train(again), want)


def test_a_copy_of_a_part_and_a_part_in_another_model():
    model = Waves(6)
    handle = offload(model)
    part = copy.deepcopy(model.blocks[2])
    before = handle.statistics()
    part(start()).sum().backward()
    assert handle.statistics() == before
    # The block itself is followed wherever it runs.
    nn.Sequential(*model.blocks)(start()).sum().backward()
    assert handle.statistics().bytes_offloaded == 8 * UNIT


def test_a_state_dict_knows_nothing_of_it():
    model = Transformer(3)
    want = list(copy.deepcopy(model).state_dict())
    offload(model)
    assert list(model.state_dict()) == want
    model.load_state_dict(Transformer(3).state_dict())


# Threads


def test_two_threads_run_their_own_forwards():
    model = Transformer(6)
    reference = copy.deepcopy(model)
    handle = offload(model)
    got, failed = {}, []
    barrier = threading.Barrier(2)

    def work(k):
        try:
            x = data(k).requires_grad_()
            for _ in range(5):
                barrier.wait()
                y = model(x)
                barrier.wait()
                got[k] = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
            nothing_installed()
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for k in range(2):
        x = data(k).requires_grad_()
        equal(list(got[k]), list(torch.autograd.grad(reference(x).square().sum(), [x, *reference.parameters()])))
    statistics = handle.statistics()
    assert statistics.passes == 10
    assert statistics.reloaded_on_demand == 0
    nothing_held(handle)


def test_replicas_in_threads_as_data_parallel_makes_them():
    """Replicas share the hooks of the model, and run in threads of their own."""
    model = Waves(6)
    handle = offload(model)

    def replica(module):
        other = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(other, name, parameter * 1.0)
        for name, child in module._modules.items():
            other._modules[name] = replica(child)
        return other

    outputs = {}
    replicas = [replica(model) for _ in range(2)]

    def work(k):
        outputs[k] = replicas[k](data(k))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sum(outputs.values()).sum().backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    with handle.paused():
        (model(data(0)) + model(data(1))).sum().backward()
    for a, b in zip(got, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(a, b)
    assert handle.statistics().passes == 2
    del outputs, replicas
    nothing_held(handle)


def test_a_thread_that_ends_leaves_nothing():
    model = Waves(6)
    handle = offload(model)
    with no_gc():
        before = alive(ModelPass)

        def work():
            y = start()
            for block in model.blocks[:3]:  # left in the middle
                y = block(y)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        del thread
        assert alive(ModelPass) == before
        nothing_held(handle)


# A thousand steps


class ChaosError(Exception):
    """What a random abort raises."""


class Chaos(Wave):
    """A block that fails on demand: before, in or behind its work, or in its backward."""

    fails = ""

    def forward(self, x):
        how, self.fails = self.fails, ""
        if how == "before":
            raise ChaosError
        y = super().forward(x)
        if how == "behind":
            raise ChaosError
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "backward":
            y.register_hook(lambda grad: (_ for _ in ()).throw(ChaosError()))
        return y


def test_a_thousand_steps_with_random_aborts():
    rng = random.Random(7)
    model = Waves(6, Chaos)
    handle = offload(model)
    kinds = [
        "fine",
        "before",
        "behind",
        "backward",
        "interrupt",
        "thrown away",
        "retained",
        "held back",
        "no grad",
        "loop",
    ]
    held_back, seen = [], []

    def run(kind):
        if kind in ("before", "behind", "backward", "interrupt"):
            model.blocks[rng.randrange(6)].fails = kind
        if kind == "no grad":
            with torch.no_grad():
                model(data())
            return
        if kind == "loop":
            y = start()
            for block in model.blocks[: rng.randrange(1, 7)]:
                y = block(y)
        else:
            y = model(start())
        if kind == "held back":
            held_back.append(y)
            return
        if kind == "thrown away":
            return
        y.sum().backward(retain_graph=kind == "retained")
        if kind == "retained":
            y.sum().backward()

    with no_gc():
        for k in range(1000):
            kind = rng.choice(kinds)
            try:
                run(kind)
            except (ChaosError, KeyboardInterrupt):
                seen.append(kind)
            for block in model.blocks:
                block.fails = ""
            if len(held_back) > 3:
                held_back.pop(rng.randrange(4)).sum().backward()
            if kind != "interrupt":
                nothing_installed()
            if not held_back:
                nothing_held(handle)
            if k == 500:
                held_back.clear()
                # On the CPU autograd keeps the nodes that were due when it stopped, until another backward pops them.
                torch.ones(1, requires_grad=True).sum().backward()
                nothing_held(handle)
                host = handle.statistics().host_bytes
        held_back.clear()
        torch.ones(1, requires_grad=True).sum().backward()
        nothing_held(handle)
    assert {kind: seen.count(kind) > 20 for kind in ("before", "behind", "backward", "interrupt")} == dict.fromkeys(
        ("before", "behind", "backward", "interrupt"), True
    )
    assert handle.statistics().host_bytes <= 2 * host
    model.zero_grad(set_to_none=True)
    equal(train(model), train(copies(model)["deepcopy"]))
    handle.remove()
    nothing_installed(model)
    with contextlib.suppress(AttributeError):
        assert not actoffload.is_cpu_offload_enabled()
