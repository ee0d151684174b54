"""Who holds a storage: found in every place in which Python can keep a tensor, named in one line, left as it was."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import actoffload
from actoffload.observe.holder_names import LOCAL, NAMELESS, Names
from actoffload.observe.holders import FEW, find_all_holders, find_holders

FILE = "test_holders.py"
kept: dict[str, object] = {}  # a global of this module, for the tests that need one


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    kept.clear()


def address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()._cdata


def make() -> torch.Tensor:
    return torch.ones(1000)


def holders(tensor: Callable[[], torch.Tensor], modules: dict[nn.Module, str] | None = None) -> tuple[str, ...]:
    """Return who holds a tensor, without a variable or a value on the way that holds it as well."""
    return find_holders(address(tensor()), modules)


def brief(lines: tuple[str, ...]) -> list[str]:
    """Return lines without the functions whose local variables they name."""
    return [line.partition(" of ")[0] if line.startswith("local") else line for line in lines]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("table", make())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()


class Box:
    pass


class Slotted:
    __slots__ = ("x",)


def named(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


# Modules


def test_an_attribute_of_a_module_is_named_with_the_module():
    model = Model()
    model.encoder.cache = make()
    assert holders(lambda: model.encoder.cache, named(model)) == ("attribute `cache` of encoder (Encoder)",)


@pytest.mark.parametrize(
    ("tensor", "line"),
    [
        (lambda model: model.encoder.table, "buffer `table` of encoder (Encoder)"),
        (lambda model: model.encoder.proj.weight, "parameter `weight` of encoder.proj (Linear)"),
        (lambda model: model.encoder.proj.weight.grad, "attribute `weight.grad` of encoder.proj (Linear)"),
        (lambda model: model.history[1]["k"][0], "attribute `history[1]['k'][0]` of the root module (Model)"),
        (lambda model: model.recent[0], "attribute `recent[0]` of the root module (Model)"),
        (lambda model: model.holder.x, "attribute `holder.x` of the root module (Model)"),
    ],
)
def test_what_modules_hold_in_other_ways(tensor, line):
    model = Model()
    model.encoder.proj.weight.grad = torch.ones(4, 4)
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
        "attribute `last` of the root module (Model)",
    )


def test_without_names_of_modules_the_way_to_them_is_given():
    model = Model()
    model.encoder.cache = make()
    where = address(model.encoder.cache)
    (line,) = find_holders(where)
    assert line.startswith("local variable `model.encoder.cache` of test_without_names_of_modules")


def test_the_way_to_a_module_is_the_shortest_that_can_be_written():
    kept["model"] = model = Model()
    kept["names"] = {module: name for name, module in model.named_modules()}
    model.encoder.cache = make()
    where = address(model.encoder.cache)
    del model
    assert find_holders(where) == (f"global `kept['model'].encoder.cache` of module {__name__}",)


# Everything else that holds


def test_local_variables_are_named_with_their_function_and_line():
    def train_step():
        hidden = make()
        return find_holders(address(hidden))

    line = train_step.__code__.co_firstlineno + 2
    assert train_step() == (f"local variable `hidden` of train_step ({FILE}:{line})",)


def test_a_local_variable_that_leads_there_is_named_with_the_way():
    box, slotted, pair = Box(), Slotted(), (0, [make()])
    box.x, slotted.x = make(), make()
    addresses = address(box.x), address(slotted.x), address(pair[1][0])
    lines = [brief(find_holders(where)) for where in addresses]
    assert lines == [[f"local variable `{name}`"] for name in ("box.x", "slotted.x", "pair[1][0]")]


def test_a_variable_that_a_running_function_shares_with_another_is_named_by_both():
    hidden = make()

    def read():
        return hidden

    where = address(hidden)
    closure, local = find_holders(where)
    assert closure == f"closure variable `hidden` of read ({FILE}:{read.__code__.co_firstlineno})"
    assert local.startswith("local variable `hidden` of test_a_variable_that_a_running_function_shares")


def test_a_local_variable_of_another_thread():
    begun, go_on, addresses = threading.Event(), threading.Event(), []

    def work():
        hidden = make()
        addresses.append(address(hidden))
        begun.set()
        go_on.wait(60)
        return hidden

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    try:
        (line,) = find_holders(addresses[0])
    finally:
        go_on.set()
        thread.join()
    assert line.startswith(f"local variable `hidden` of work ({FILE}:")


def test_globals():
    kept["outputs"] = [make()]
    assert holders(lambda: kept["outputs"][0]) == (f"global `kept['outputs'][0]` of module {__name__}",)


def test_a_namespace_without_a_module_is_named_like_one():
    namespace = {"__name__": "notebook", "__builtins__": {}, "x": make()}
    kept["namespace"] = namespace
    del namespace
    assert holders(lambda: kept["namespace"]["x"]) == ("global `x` of module notebook",)


@pytest.mark.parametrize(("more", "name"), [({"__name__": "notebook"}, "notebook"), ({}, "cell.py")])
def test_the_variables_of_a_program_that_runs_are_globals(more, name):
    program = "x = make()\nwhere = address(x)\nlines = find_holders(where)\n"
    namespace = {"make": make, "address": address, "find_holders": find_holders, **more}
    exec(compile(program, "some/folder/cell.py", "exec"), namespace)
    assert namespace["lines"] == (f"global `x` of module {name}",)


def test_closures_and_defaults():
    def outer():
        seen = make()

        def inner(scale, start=make()):  # noqa: B008 - that the default is kept is the point
            return seen * scale + start

        return inner, address(seen), address(inner.__defaults__[0])

    inner, of_closure, of_default = outer()
    line = inner.__code__.co_firstlineno
    assert find_holders(of_closure) == (f"closure variable `seen` of inner ({FILE}:{line})",)
    assert find_holders(of_default) == (f"default of argument `start` of inner ({FILE}:{line})",)


def test_the_variable_of_an_outer_function_is_not_counted_as_one_of_the_inner():
    hidden = make()

    def inner():
        return find_holders(address(hidden))

    lines = inner()
    assert [line.partition(" (")[0] for line in lines] == [
        "closure variable `hidden` of inner",
        "local variable `hidden` of test_the_variable_of_an_outer_function_is_not_counted_as_one_of_the_inner",
    ]


def test_a_suspended_generator():
    def batches():
        batch = make()
        yield address(batch)

    generator = batches()
    line = batches.__code__.co_firstlineno + 2
    assert find_holders(next(generator)) == (f"local variable `batch` of the suspended batches ({FILE}:{line})",)


def test_a_traceback_that_was_kept():
    def fail():
        big = make()
        raise ValueError(address(big))

    try:
        fail()
    except ValueError as error:
        caught = error
    (line,) = find_holders(caught.args[0])
    assert line == (f"local variable `big` of fail ({FILE}:{fail.__code__.co_firstlineno + 2}), kept by a traceback")


def test_what_an_autograd_function_put_on_its_context():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mine = make()
            Twice.address = address(ctx.mine)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    y = Twice.apply(torch.ones(3, requires_grad=True))
    assert find_holders(Twice.address) == ("attribute `mine` of ctx in the autograd function Twice",)
    del y


def test_classes_gradients_and_storages():
    class Config:
        shared = make()

    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    memory = make().untyped_storage()
    addresses = address(Config.shared), address(x.grad)
    shared, gradients = (find_holders(where) for where in addresses)
    assert shared == ("attribute `shared` of class Config",)
    (gradient,) = gradients
    assert gradient.startswith("local variable `x.grad` of test_classes_gradients_and_storages")
    (storage,) = find_holders(memory._cdata)
    assert storage.startswith("local variable `memory` of ")


def test_an_object_without_a_name_is_named_by_its_class():
    names = Names({})
    lists = [[make()]]
    holder = Box()
    holder.x = lists[0]
    of_object, of_list = (names.of_nameless([lists[0][0], lists[0], *more]) for more in ([holder.__dict__, holder], []))
    assert of_object == (LOCAL, "attribute `x[0]` of an object of class Box")
    assert of_list == (NAMELESS, "element `[0]` of a list without a name")


def test_the_longest_lasting_holder_comes_first():
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

    Watched(1, 1)(make())
    beside, alone = lines
    assert beside == ("attribute `seen` of watched (Watched)",)
    assert alone  # while the call runs
    assert all("module.py" in line or "without a name" in line for line in alone)


# Nobody


def test_a_storage_that_is_gone_or_never_was_has_no_holder():
    tensor = make()
    where = address(tensor)
    del tensor
    assert find_holders(where) == ()
    assert find_holders(12345) == ()


def test_what_autograd_alone_holds_has_no_holder():
    x = torch.ones(1000, requires_grad=True)
    y = torch.exp(x)
    loss = y.sum()
    where = address(y)
    del y
    assert find_holders(where) == ()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.exp(x))


@pytest.mark.parametrize("num_layers", [0, 1])
def test_what_this_library_holds_is_no_holder(num_layers):
    context, sync = actoffload.get_cpu_offload_context(enabled=True, num_layers=num_layers, model_layers=3)
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


def test_variables_are_not_kept_alive():
    def step():
        hidden = make()
        ref = weakref.ref(hidden)
        find_holders(address(hidden))
        del hidden
        return ref() is None

    gc.disable()
    try:
        assert step()
    finally:
        gc.enable()


def test_the_dict_that_a_program_got_from_locals_is_left_alone():
    def step():
        rate = 0.1
        hidden = make()
        settings = locals()
        find_holders(address(hidden))
        return settings, rate

    settings, rate = step()
    assert settings["rate"] == rate
    assert "hidden" in settings


def test_a_search_from_a_trace_function_leaves_variables_as_they_are():
    def step():
        hidden = make()
        total = 1.0
        return hidden.sum() * total

    def trace(frame, event, argument):
        if frame.f_code is step.__code__:
            find_holders(1)  # what it leaves in the dict of variables becomes the variables when this returns
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = step()
    finally:
        sys.settrace(before)
    assert result == 1000


def test_nothing_is_referred_to_more_often_than_before():
    tensor = make()
    box = Box()
    box.x = tensor
    counts = [sys.getrefcount(tensor), sys.getrefcount(box)]
    find_holders(address(tensor))
    gc.collect()
    assert [sys.getrefcount(tensor), sys.getrefcount(box)] == counts


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


class HostileMeta(type):
    def __getattribute__(cls, name):
        if name in ("__module__", "__qualname__", "__mro__"):
            raise RuntimeError(f"asked for {name}")
        return super().__getattribute__(name)

    def __instancecheck__(cls, instance):
        raise RuntimeError("asked for an instance")

    def __subclasscheck__(cls, subclass):
        raise RuntimeError("asked for a subclass")


class HostileList(list):
    def __iter__(self):
        raise RuntimeError("walked through")


class HostileDict(dict):
    def items(self):
        raise RuntimeError("walked through")


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"asked for {func}")


class LazyModule(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(f"loaded for {name}")


def test_no_code_of_other_classes_runs():
    hostile, odd, items, table = Hostile(), HostileMeta("Odd", (), {})(), HostileList([make()]), HostileDict(a=make())
    object.__setattr__(hostile, "x", make())
    odd.x = make()
    lazy, gone = LazyModule("lazy"), weakref.proxy(Box())
    with FakeTensorMode():
        fake = torch.ones(3, requires_grad=True) * 2
    subclass = make().as_subclass(HostileTensor)
    others = [gone, fake, torch.eye(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3, requires_grad=True) * 2]
    sys.modules["lazy"] = lazy
    try:
        held = (
            object.__getattribute__(hostile, "__dict__")["x"],
            odd.x,
            list.__getitem__(items, 0),
            table["a"],
            subclass,
        )
        addresses = [address(tensor) for tensor in held]
        del held
        lines = [find_holders(where) for where in addresses]
    finally:
        del sys.modules["lazy"]
    type(odd).cache = make()
    of_class = find_holders(address(type(odd).cache))
    names = ["hostile.x", "odd.x", "items[0]", "table['a']", "subclass"]
    assert [[line.partition(" of ")[0] for line in found] for found in lines] == [
        [f"local variable `{name}`"] for name in names
    ]
    assert of_class == ("attribute `cache` of class Odd",)
    assert len(others) == 5


def test_a_key_is_shown_without_running_its_code():
    class Key:
        def __repr__(self):
            raise RuntimeError("shown")

    table = {Key(): make(), "long" * 20: make()}
    lines = [find_holders(address(tensor))[0] for tensor in table.values()]
    assert lines[0].startswith("local variable `table[<Key>]` of ")
    assert lines[1].startswith(f"local variable `table['{('long' * 20)[:39]}…']` of ")


# Several storages


def test_many_storages_at_once_have_the_holders_that_each_has_alone():
    kept["tensors"] = [make() for _ in range(2 * FEW)]
    addresses = [address(tensor) for tensor in kept["tensors"]]
    together = find_all_holders(addresses)
    assert list(together) == addresses
    assert [together[where] for where in addresses] == [
        (f"global `kept['tensors'][{k}]` of module {__name__}",) for k in range(2 * FEW)
    ]
    assert together[addresses[3]] == find_holders(addresses[3])


def test_lines_name_files_without_their_folders():
    hidden = make()
    for line in find_holders(address(hidden)):
        assert "/" not in line
        assert "\\" not in line
