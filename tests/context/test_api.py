"""The function: signature, return values, errors and warnings, and what a disabled context does."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from helpers import forward, make, make_manual, min_elements

import actoffload
from actoffload import get_cpu_offload_context
from actoffload.device import ReferenceDevice, use

DOCUMENTED = [
    ("enabled", False),
    ("num_layers", 1),
    ("model_layers", 1),
    ("offload_activations", True),
    ("offload_weights", False),
    ("double_buffering", False),
    ("manual_synchronization", False),
    ("retain_pinned_cpu_buffers", False),
    ("offload_stream", None),
]


@pytest.fixture(autouse=True)
def _device():
    with use(ReferenceDevice()):
        yield


def test_signature_is_the_documented_one():
    parameters = list(inspect.signature(get_cpu_offload_context).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == DOCUMENTED
    others = [(p.name, p.default, p.kind) for p in parameters if p not in positional]
    assert others == [("max_host_bytes", None, inspect.Parameter.KEYWORD_ONLY)]


def test_defaults_give_a_context_that_does_nothing():
    context, sync = get_cpu_offload_context()
    x = torch.randn(512, 1024, requires_grad=True)
    with context, context:  # no bookkeeping: even nesting is fine
        assert not actoffload.is_cpu_offload_enabled()
        y = torch.tanh(x)
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # autograd holds the tensor itself
    out = (y, None)
    assert sync(out) is out
    assert sync(out) is out
    context.new_pass()
    context.reset_statistics()
    context.close()
    with context.record_timeline() as recorder:
        pass
    assert recorder.timeline().spans == ()
    assert context.statistics() == actoffload.report.Statistics()
    with pytest.raises(KeyError, match="yes"), context:
        raise KeyError("yes")  # passes through


def test_public_methods_of_the_disabled_objects_are_those_of_the_enabled():
    def public(thing):
        return {name for name in dir(thing) if not name.startswith("_")}

    on, _, controller = get_cpu_offload_context(True, model_layers=2, manual_synchronization=True)
    off, _, nothing = get_cpu_offload_context(False, model_layers=2, manual_synchronization=True)
    assert public(on) == public(off)
    assert public(controller) == public(nothing)


NUMBERS = [(1, 1), (3, 3), (4, 3), (0, 0), (-1, 3), (1, -2), ("4", 8), (None, 8), (True, 8), (4, "8"), (1, 2.5)]
NUMBERS += [(10**20, 4), (1, 10**20)]


@pytest.mark.parametrize(("number", "layers"), NUMBERS)
def test_wrong_numbers_of_layers(number, layers):
    with pytest.raises((TypeError, ValueError), match=r"_layers is (-?\d+|'[48]'|None|True|2\.5)[,;:]? "):
        get_cpu_offload_context(True, number, layers)


@pytest.mark.parametrize("num_layers", [9, None])
def test_manual_does_not_look_at_num_layers(num_layers):
    context, _, _ = get_cpu_offload_context(True, num_layers, 2, manual_synchronization=True)
    assert context.plan.offloaded == ()
    with pytest.raises(ValueError, match="model_layers is 0"):
        get_cpu_offload_context(True, 1, 0, manual_synchronization=True)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_stream_needs_manual_synchronization(enabled):
    stream = ReferenceDevice().new_stream(torch.device("cpu"))
    with pytest.raises(ValueError, match="manual_synchronization=True"):
        get_cpu_offload_context(enabled, 1, 3, offload_stream=stream)
    if enabled:
        with pytest.raises((TypeError, ValueError), match="offload_stream is 'x'; expected a stream of this reference"):
            get_cpu_offload_context(True, 1, 3, offload_stream="x", manual_synchronization=True)


def test_one_resident_layer_warns_and_others_do_not():
    with pytest.warns(UserWarning, match="one resident layer") as caught:
        get_cpu_offload_context(True, 2, 3)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_cpu_offload_context(True, 1, 3)
        get_cpu_offload_context(True, 0, 1)
        get_cpu_offload_context(False, 2, 3)


def test_a_lack_of_host_memory_is_reported_at_the_line_of_the_program():
    context, _ = get_cpu_offload_context(True, 1, 3, max_host_bytes=0)
    x = torch.ones(512, 512, requires_grad=True)
    with pytest.warns(actoffload.HostMemoryWarning, match="stays on the device") as caught, context:
        x.sin().sin()
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize(
    "asked", [{"offload_weights": True}, {"double_buffering": True}, {"offload_activations": False}]
)
@pytest.mark.parametrize("enabled", [False, True])
def test_deprecated_arguments(asked, enabled):
    with pytest.warns(DeprecationWarning, match=next(iter(asked))) as caught:
        get_cpu_offload_context(enabled, 1, 3, **asked)
    assert [w.filename for w in caught] == [__file__]


def test_offload_activations_false_moves_nothing_but_keeps_the_arity():
    with pytest.warns(DeprecationWarning, match="use enabled=False"):
        context, sync, controller = get_cpu_offload_context(
            True, 1, 3, offload_activations=False, manual_synchronization=True
        )
    with min_elements():
        forward([torch.nn.Linear(64, 64)] * 3, torch.randn(64, 64), context, sync)
    controller.start_offload_layer(0)
    assert context.statistics().tensors_saved == 0


def test_is_cpu_offload_enabled_only_inside():
    context, sync = make(1, 3)
    assert not actoffload.is_cpu_offload_enabled()
    with context:
        assert actoffload.is_cpu_offload_enabled()
    assert not actoffload.is_cpu_offload_enabled()
    sync(torch.ones(1))
    inside = []

    def fail():
        inside.append(actoffload.is_cpu_offload_enabled())
        raise KeyError

    manual, _, _ = make_manual(3)
    with pytest.raises(KeyError), manual:
        fail()
    assert inside == [True]
    assert not actoffload.is_cpu_offload_enabled()


@pytest.mark.parametrize("mark", [actoffload.mark_not_offload, actoffload.start_offload])
def test_marks_take_tensors_only(mark):
    mark()
    mark(None, torch.ones(2), None)
    with pytest.raises(TypeError, match=f"{mark.__name__} got a list; expected tensors, objects with prepare_for"):
        mark([torch.ones(2)])
