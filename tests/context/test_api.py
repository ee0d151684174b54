"""The function: signature, return values, errors and warnings, a disabled context, and misuse (invariant 10)."""

import inspect
import warnings

import pytest
import torch
from helpers import forward, make, make_manual, nothing_held
from torch import nn

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


@pytest.mark.parametrize(("number", "layers"), [(3, 3), (4, 3), (0, 0), (-1, 3), (None, 8), (True, 8), (4, "8")])
def test_wrong_numbers_of_layers(number, layers):
    with pytest.raises((TypeError, ValueError), match=r"_layers is (-?\d|'8'|None|True)[,;:]? "):
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


def test_is_cpu_offload_enabled_only_inside():
    context, sync = make(1, 3)
    assert not actoffload.is_cpu_offload_enabled()
    with context:
        assert actoffload.is_cpu_offload_enabled()
    assert not actoffload.is_cpu_offload_enabled()
    sync(torch.ones(1))
    manual, _, _ = make_manual(3)
    with pytest.raises(KeyError), manual:
        raise KeyError
    assert not actoffload.is_cpu_offload_enabled()


@pytest.mark.parametrize("mark", [actoffload.mark_not_offload, actoffload.start_offload])
def test_marks_take_tensors_only(mark):
    mark()
    mark(None, torch.ones(2), None)
    with pytest.raises(TypeError, match=f"{mark.__name__} got a list; expected tensors, objects with prepare_for"):
        mark([torch.ones(2)])


# Misuse


pytestmark = pytest.mark.usefixtures("offload_small_tensors")


@pytest.fixture
def layers():
    return [nn.Linear(64, 64) for _ in range(4)]


def start():
    return torch.randn(64, 64, requires_grad=True) * 1.0


def step(layers, context, sync):
    """One step that must be all right."""
    before = context.statistics()
    forward(layers, start(), context, sync).sum().backward()
    after = context.statistics()
    assert after.passes == before.passes + 1
    assert after.tensors_offloaded == before.tensors_offloaded + 2
    nothing_held(context)


def inside(context, call):
    with context:
        call()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda context, sync: inside(context, context.__enter__), r"entered twice: leave .* do not nest"),
        (lambda context, sync: inside(context, context.new_pass), "inside the offloading context; leave the context"),
        (lambda context, sync: inside(context, lambda: sync(start().sin())), "inside the offloading context: leave"),
        (lambda context, sync: sync(start()), "called before any layer ran: use `with context"),
        (lambda context, sync: context.__exit__(None, None, None), "left but was not entered; use it as `with context"),
    ],
)
def test_calls_in_a_wrong_place(layers, wrong, says):
    context, sync = make(2, 4)
    with pytest.raises(RuntimeError, match=says):
        wrong(context, sync)
    step(layers, context, sync)


def test_sync_twice(layers):
    context, sync = make(2, 4)
    with context:
        y = layers[0](start())
    y = sync(y)
    with pytest.raises(RuntimeError, match=r"called twice for layer 0: call it once .* in a tuple"):
        sync(y)
    del y
    step(layers, context, sync)


def test_an_unsynchronized_layer(layers):
    context, sync = make(2, 4)
    with context:
        y = layers[0](start())
    with pytest.raises(RuntimeError, match=r"Layer 0 was left without .* call sync_function\(output\)"), context:
        pass
    y = sync(y)  # it can be made up for
    for layer in layers[1:]:
        with context:
            y = layer(y)
        y = sync(y)
    y.sum().backward()
    assert context.statistics().passes == 1
    del y
    step(layers, context, sync)


MANUAL = {
    "start_offload_layer": "call it once, after the layer's context was left and before",
    "release_activation_forward_gpu_memory": "call it once, after start_offload_layer",
    "start_reload_layer": "call it once, after release_activation_forward_gpu_memory",
}


@pytest.mark.parametrize("call", MANUAL)
@pytest.mark.parametrize("layer_id", [-1, 4, None, 1.0, True])
def test_wrong_layer_ids(layers, call, layer_id):
    context, sync, controller = make_manual(4)
    forward(layers, start(), context, sync)
    with pytest.raises(ValueError, match=rf"{call}\(.*\): there is no such layer; .* from 0 to 3"):
        getattr(controller, call)(layer_id)


@pytest.mark.parametrize("call", MANUAL)
def test_manual_before_any_layer_ran(layers, call):
    context, sync, controller = make_manual(4)
    with pytest.raises(RuntimeError, match=rf"{call}\(1\): layer 1 has not run in this pass; .* forward"):
        getattr(controller, call)(1)
    with context:
        x = layers[0](start())
        with pytest.raises(RuntimeError, match=rf"{call}\(0\): layer 0 is still in its forward; call it once, after"):
            getattr(controller, call)(0)
    sync(x)
    with pytest.raises(RuntimeError, match="layer 1 has not run"):
        getattr(controller, call)(1)


@pytest.mark.parametrize(
    ("done", "wrong", "says"),
    [
        ((), "release_activation_forward_gpu_memory", "has its activations on the device"),
        ((), "start_reload_layer", "has its activations on the device"),
        ((0,), "start_offload_layer", "is already being offloaded"),
        ((0,), "start_reload_layer", "is already being offloaded"),
        ((0, 1), "start_offload_layer", "is on the host"),
        ((0, 1), "release_activation_forward_gpu_memory", "is on the host"),
        ((0, 1, 2), "start_offload_layer", "is already being reloaded"),
        ((0, 1, 2), "release_activation_forward_gpu_memory", "is already being reloaded"),
        ((0, 1, 2), "start_reload_layer", "is already being reloaded"),
    ],
)
def test_manual_order(layers, done, wrong, says):
    context, sync, controller = make_manual(4)
    y = forward(layers, start(), context, sync)
    for k in done:
        getattr(controller, list(MANUAL)[k])(0)
    with pytest.raises(RuntimeError, match=rf"{wrong}\(0\): layer 0 {says}; {MANUAL[wrong]}"):
        getattr(controller, wrong)(0)
    y.sum().backward()  # and nothing is broken
    del y
    nothing_held(context)
