"""Holders of a storage: every place from which Python can refer to a tensor, and a search that changes nothing."""

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable

import pytest
import torch
from helpers import no_gc
from report_samples import Box, address, find_holders, make
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import actoffload

FILE = "test_holders.py"


def holders(tensor: Callable[[], torch.Tensor], modules: dict[nn.Module, str] | None = None) -> tuple[str, ...]:
    """Return the holders of a tensor, without a variable or a value of the test that refers to it as well."""
    return find_holders(address(tensor()), modules)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("table", make())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()


def named(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


# Modules


@pytest.mark.parametrize(
    ("tensor", "line"),
    [
        (lambda model: model.encoder.cache, "attribute `cache` of encoder (Encoder)"),
        (lambda model: model.encoder.table, "attribute `table` of encoder (Encoder)"),
        (lambda model: model.encoder.proj.weight, "attribute `weight` of encoder.proj (Linear)"),
        (lambda model: model.history[1]["k"][0], "attribute `history[1]['k'][0]` of the model (Model)"),
        (lambda model: model.recent[0], "attribute `recent[0]` of the model (Model)"),
        (lambda model: model.holder.x, "attribute `holder.x` of the model (Model)"),
    ],
)
def test_attributes_of_modules_are_named_with_the_module(tensor, line):
    model = Model()
    model.encoder.cache = make()
    model.history = [None, {"k": (make(),)}]
    model.recent = deque([make()])
    model.holder = Box()
    model.holder.x = make()
    assert holders(lambda: tensor(model), named(model)) == (line,)


def test_views_of_one_storage_are_each_named_where_they_are():
    model = Model()
    whole = make()
    model.encoder.first, model.last = whole[:10], whole[10:].view(3, 330)
    where = address(whole)
    del whole
    assert find_holders(where, named(model)) == (
        "attribute `first` of encoder (Encoder)",
        "attribute `last` of the model (Model)",
    )


# Other holders


def test_local_variables_are_named_with_their_function_and_line():
    def train_step():
        hidden = make()
        return find_holders(address(hidden))

    line = train_step.__code__.co_firstlineno + 2
    assert train_step() == (f"local variable `hidden` of train_step ({FILE}:{line})",)


class Slots:
    __slots__ = ("x",)

    def use(self) -> None:
        """Refer to the object, as a bound method does."""


@pytest.mark.parametrize("refer", [lambda box: box, lambda box: box.use, lambda box: {box}])
def test_an_object_that_tells_no_names(kept, refer):
    box = Slots()
    box.x = make()
    kept["refers"] = refer(box)
    where = address(box.x)
    del box
    (line,) = find_holders(where)
    assert line.startswith("global `kept['refers']")
    assert line.endswith("[…]` of module program")


def test_closures():
    def outer():
        seen = make()

        def inner(scale):
            return seen * scale

        return inner, address(seen)

    inner, of_closure = outer()
    line = inner.__code__.co_firstlineno
    assert find_holders(of_closure) == (f"closure variable `seen` of inner ({FILE}:{line})",)


def test_the_longest_lasting_holder_comes_first(kept):
    model = Model()
    model.cache = kept["x"] = hidden = make()
    lines = find_holders(address(hidden), named(model))
    assert [line.partition("`")[0] for line in lines] == ["attribute ", "global ", "local variable "]


def test_what_torch_passes_through_a_call_is_no_holder_beside_others():
    lines = []

    class Watched(nn.Linear):
        def forward(self, x):
            self.seen = x
            where = address(x)
            del x
            lines.append(find_holders(where, {self: "watched"}))
            del self.seen
            lines.append(find_holders(where, {self: "watched"}))
            return torch.ones(1)

    watched = Watched(1, 1)
    watched.register_forward_hook(lambda *_: None)  # torch passes arguments through a closure then
    watched(make())
    beside, alone = lines
    assert beside == ("attribute `seen` of watched (Watched)",)
    assert alone == ("input `args[0]` of watched",)  # while the call runs


# No holder


def test_what_autograd_alone_refers_to_and_what_is_gone_have_no_holder():
    x = torch.ones(1000, requires_grad=True)
    y = torch.exp(x)
    loss = y.sum()
    where = address(y)
    del y
    assert find_holders(where) == find_holders(12345) == ()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.exp(x))


def test_this_library_is_no_holder():
    context, sync = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    x = torch.randn(512, 1024, requires_grad=True)
    y, addresses = x, []
    for _ in range(3):
        with context:
            inner = torch.exp(y)
            addresses.append(address(inner))  # autograd saves the result of exp
            y = inner * 1.0
            del inner
        y = sync(y)
    where = addresses[-1]
    aliases = sum(address(o) == where for o in gc.get_objects() if type(o) is torch.Tensor)
    lines = find_holders(where)
    assert (aliases, lines) == (1, ())  # that of the library
    y.sum().backward()


# Without a trace


def test_variables_are_not_kept_alive_and_the_dict_of_locals_is_left_alone():
    def step(program_has_the_dict):
        hidden = make()
        settings = locals() if program_has_the_dict else {}
        ref = weakref.ref(hidden)
        find_holders(address(hidden))
        del hidden
        return ref, settings

    with no_gc():
        assert step(False)[0]() is None
    assert "hidden" in step(True)[1]


class Hostile:
    """Breaks at everything that is asked of it."""

    @property
    def __class__(self):
        raise RuntimeError("asked for its class")

    def __getattr__(self, name):
        raise RuntimeError(f"asked for {name}")

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("shown")


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"asked for {func}")


class Key:
    def __repr__(self):
        raise RuntimeError("shown")


class LazyModule(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(f"loaded for {name}")


def test_no_code_of_other_classes_runs():
    hostile = Hostile()
    object.__setattr__(hostile, "x", make())
    lazy, gone = LazyModule("lazy"), weakref.proxy(Box())
    with FakeTensorMode():
        fake = torch.ones(3, requires_grad=True) * 2
    subclass, table = make().as_subclass(HostileTensor), {Key(): make()}
    others = [gone, fake, torch.eye(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3, requires_grad=True) * 2]
    sys.modules["lazy"] = lazy
    try:
        held = (object.__getattribute__(hostile, "__dict__")["x"], subclass, *table.values())
        addresses = [address(tensor) for tensor in held]
        del held
        lines = [find_holders(where) for where in addresses]
    finally:
        del sys.modules["lazy"]
    names = ["hostile.x", "subclass", "table[<Key>]"]
    assert [[line.partition(" of ")[0] for line in found] for found in lines] == [
        [f"local variable `{name}`"] for name in names
    ]
    assert len(others) == 5
