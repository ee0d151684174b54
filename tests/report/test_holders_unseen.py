"""Storages without a holder, and a search that changes nothing in what it looks at."""

import gc
import sys
import types
import weakref

import torch
from report_samples import Box, address, find_holders, make
from torch._subclasses.fake_tensor import FakeTensorMode

import actoffload

# No holder


def test_a_storage_that_is_gone_or_never_was_has_no_holder():
    tensor = make()
    where = address(tensor)
    del tensor
    assert find_holders(where) == ()
    assert find_holders(12345) == ()


def test_what_autograd_alone_refers_to_has_no_holder():
    x = torch.ones(1000, requires_grad=True)
    y = torch.exp(x)
    loss = y.sum()
    where = address(y)
    del y
    assert find_holders(where) == ()
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


class LazyModule(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(f"loaded for {name}")


def test_no_code_of_other_classes_runs():
    hostile = Hostile()
    object.__setattr__(hostile, "x", make())
    lazy, gone = LazyModule("lazy"), weakref.proxy(Box())
    with FakeTensorMode():
        fake = torch.ones(3, requires_grad=True) * 2
    subclass = make().as_subclass(HostileTensor)
    others = [gone, fake, torch.eye(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3, requires_grad=True) * 2]
    sys.modules["lazy"] = lazy
    try:
        held = (object.__getattribute__(hostile, "__dict__")["x"], subclass)
        addresses = [address(tensor) for tensor in held]
        del held
        lines = [find_holders(where) for where in addresses]
    finally:
        del sys.modules["lazy"]
    names = ["hostile.x", "subclass"]
    assert [[line.partition(" of ")[0] for line in found] for found in lines] == [
        [f"local variable `{name}`"] for name in names
    ]
    assert len(others) == 5


def test_a_key_is_shown_without_running_its_code():
    class Key:
        def __repr__(self):
            raise RuntimeError("shown")

    table = {Key(): make()}
    lines = [find_holders(address(tensor))[0] for tensor in table.values()]
    assert lines[0].startswith("local variable `table[<Key>]` of ")
