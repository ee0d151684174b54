"""Holders of a storage: every place from which Python can refer to a tensor, named in one line."""

from collections import deque
from collections.abc import Callable

import pytest
import torch
from report_samples import Box, address, find_holders, make
from torch import nn

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
