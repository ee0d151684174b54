"""What `actoffload.offload` refuses, and how it says so."""

import pytest
import torch
from torch import nn
from whole_model import Transformer, Waves, data, nothing_installed, offload

import actoffload


def step(model, seed: int = 0) -> None:
    model(data(seed)).sum().backward()


# Errors

LARGE = 10**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": -1}, "num_layers is -1; expected a whole number, at least 0, or None"),
        ({"num_layers": 6}, "num_layers is 6, but there are 6 groups of the kind layer, and the last has to stay"),
        ({"fraction": 1.01}, "fraction is 1.01; expected a part of the groups, from 0.0 to 1.0"),
        ({"fraction": "half"}, "fraction is 'half'"),
        ({"min_bytes": -1}, "min_bytes is -1; expected a number of bytes"),
        ({"min_bytes": "1 megabyte"}, "min_bytes is '1 megabyte'; expected a number of bytes, or text such as '24GiB'"),
        ({"max_host_bytes": "lots"}, "max_host_bytes is 'lots'; expected a number of bytes"),
        ({"max_inflight": 0}, "max_inflight is 0; expected a whole number, at least 1"),
        ({"layers": 3}, "layers has an entry 3; expected a dotted path"),
        ({"layers": "*.nothing"}, r"layers: '\*.nothing' matches no module of this Transformer"),
        ({"keep": None}, "keep has an entry None"),
        ({"layers": "blocks", "keep": "blocks.2"}, "'blocks.2' is chosen by layers and by keep"),
        ({"layers": ""}, "layers has an empty name; expected a dotted path"),
        ({"num_layers": LARGE}, rf"num_layers is {LARGE}; expected a whole number, or None below 2\*\*63\."),
        ({"max_host_bytes": "9" * 400 + "GiB"}, "expected a number of bytes"),
        ({"memory_budget": LARGE}, f"memory_budget is {LARGE}; expected bytes"),
        ({"plan": {}}, r"plan is {}; expected a Plan, such as handle.plan, or the path of a saved"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    model = Transformer(6)
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        offload(model, **options)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value), "it is one sentence"
    nothing_installed(model)
    assert offload(model).installed  # a call that failed leaves nothing behind


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    handle = offload(Waves(6), num_layers=numpy.int64(3), min_bytes=numpy.int32(64), fraction=numpy.float32(1.0))
    assert handle.plan.offloaded == (0, 1, 2)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"offload got a function; expected a torch\.nn\.Module"):
        offload(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offload got a list"):
        offload([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"OffloadHandle\.of got 5; expected the model that offload was called with"):
        actoffload.OffloadHandle.of(5)


def test_a_model_without_modules_inside_is_refused():
    with pytest.raises(ValueError, match="This Linear has no modules inside that could be offloaded"):
        offload(nn.Linear(4, 4))
    with pytest.raises(
        ValueError, match=r"This Waves has no modules inside that could be offloaded beside those of keep\."
    ):
        offload(Waves(6), keep="blocks.*")


def test_offloaded_twice():
    model = Waves(6)
    handle = offload(model)
    with pytest.raises(ValueError, match=r"offloaded already: call remove\(\) of its handle"):
        offload(model)
    handle.remove()
    offload(model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_module_is_refused():
    with pytest.raises(TypeError, match=r"is a torch\.jit\.ScriptModule.*pass the module from which it was"):
        offload(torch.jit.trace(Waves(3), data()))
    model = Waves(3)
    model.blocks[1] = torch.jit.trace(model.blocks[1], data())
    with pytest.raises(TypeError, match=r"'blocks.1' is a torch.jit.ScriptModule"):
        offload(model, layers=list(model.blocks))
    nothing_installed(model)
    assert type(model) is Waves


def test_disabled_saved_tensor_hooks_have_a_sentence_of_their_own():
    model = Waves(6)
    handle = offload(model)
    with (
        pytest.warns(UserWarning, match=r"inside torch\.autograd\.graph\.disable_saved_tensors_hooks") as caught,
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    ):
        step(model)
    assert caught[0].filename == __file__  # where the model was called
    assert handle.statistics().passes == 0
    step(model)
    assert handle.statistics().passes == 1
