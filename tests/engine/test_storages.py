"""Invariant 5: storages are copied once, whatever is saved of them; views are restored as views of one storage."""

import pytest
import torch
from helpers import Saves, forward, make, min_elements, nothing_held, plain, same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from actoffload import mark_not_offload
from actoffload.report import Reason

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


def through(*build, num: int = 1, count: int = 3):
    """Save what each `build()` returns in one layer each; return what is unpacked, and the context."""
    context, sync = make(num, count)
    seen: list[Tensor] = []
    stages = [lambda x, b=b: Saves.apply(x, seen, *b()) for b in build]
    stages += [lambda x: x * 1.0] * (count - len(stages))
    y = forward(stages, torch.ones(2, requires_grad=True), context, sync)
    statistics = context.statistics()
    y.sum().backward()
    return [(tensor, tensor.untyped_storage()._cdata) for tensor in seen], context, statistics


def same_layout(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, a.stride(), a.is_conj(), a.is_neg()) == (
        b.dtype, b.shape, b.stride(), b.is_conj(), b.is_neg()
    ) and same_bits(a, b)  # fmt: skip


BASE = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
COMPLEX = torch.randn(64, 64, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "tensor and transpose": lambda: [(b := BASE.clone()), b.t()],
    "expanded": lambda: [BASE.clone()[:, None, :].expand(64, 7, 64)],
    "as_strided": lambda: [BASE.clone().as_strided((16, 16, 8), (3, 7, 100), 5)],
    "dtype view": lambda: [(b := BASE.clone()), b.view(torch.int16), b.view(torch.uint8)[:, 1:]],
    "bool": lambda: [BASE > 100],
    "float8": lambda: [BASE.to(torch.float8_e5m2), BASE.to(torch.float8_e4m3fn).t()],
    "conj": lambda: [COMPLEX.clone().conj()],
    "conj and not": lambda: [(c := COMPLEX.clone()), c.mH],
    "real and imag": lambda: [(c := COMPLEX.clone()).real, c.imag],
    "neg": lambda: [COMPLEX.clone().conj().imag],
    "complex128": lambda: [COMPLEX.clone().to(torch.complex128).t()],
    "offset": lambda: [torch.arange(5000.0)[7:4103].view(64, 64)],
    # One storage saved again, under other names and in another order than the first one.
    "the same tensor": lambda: [(b := BASE.clone()), b, b],
    "names": lambda: [(b := BASE.clone()), b.data, b.detach(), torch._neg_view(b)],
    "transpose first": lambda: [(b := BASE.clone()).t(), b, b[1:3], b.view(torch.uint8), b[:, 3:9]],
    "channels last": lambda: [BASE.clone().as_strided((2, 16, 16, 8), (2048, 1, 128, 16))],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    want = LAYOUTS[name]()
    address = [t.data_ptr() % 64 for t in want]
    got, context, statistics = through(lambda: want)
    assert statistics.resident_bytes == 0, "nothing left the device"
    assert statistics.tensors_offloaded == len({t.untyped_storage()._cdata for t in want})
    assert len(got) == len(want)
    for a, (b, _) in zip(want, got, strict=True):
        assert same_layout(a, b)
        assert b.untyped_storage()._cdata != a.untyped_storage()._cdata, "it never left"
    # Which tensors share a storage is as it was.
    before = [t.untyped_storage()._cdata for t in want]
    for i in range(len(want)):
        for j in range(i):
            assert (before[i] == before[j]) == (got[i][1] == got[j][1])
    # The CPU allocator aligns to 64 bytes, and so lie the pointers within.
    assert [b.data_ptr() % 64 for b, _ in got] == address
    del got
    nothing_held(context)


@pytest.mark.parametrize(
    ("build", "moved"),
    [
        (lambda: [BASE.clone().t(), BASE.clone()], 2 * 16384),
        (lambda: [(b := BASE.clone()), b.t(), b.view(-1), b[:, :8], b[5:]], 16384),
        (lambda: list(BASE.clone().chunk(4, -1)), 16384),
        (lambda: [(b := BASE.clone())[:32], b[32:], b, b[:32]], 16384),  # views first
        (lambda: BASE.clone().split([16, 48], -1)[:1], (63 * 64 + 16) * 4),
        (lambda: [(b := BASE.clone())[:, :8], b[:, 16:24]], (63 * 64 + 24) * 4),
        (lambda: [BASE.clone()[::4]], 61 * 64 * 4),
        (lambda: [torch.zeros(2**20)[2**19 : 2**19 + 4096]], 16384),  # a small view of a big storage
        (lambda: [BASE.clone()[:, None].expand(64, 9, 64)], 16384),
        (lambda: [torch.randn(4096).as_strided((64, 4033), (1, 1))], 16384),  # overlapping windows
    ],
)
def test_bytes_moved(build, moved):
    _, _, statistics = through(build)
    assert statistics.bytes_offloaded == moved


DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
          torch.complex128, torch.float8_e4m3fn, torch.int64]  # fmt: skip
STORAGE = 4096


@st.composite
def views(draw):
    """Return dtype, size, stride and offset of any tensor on a storage, and in how many bytes it lies."""
    dtype = draw(st.sampled_from(DTYPES))
    room = STORAGE // dtype.itemsize
    size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    stride = [draw(st.one_of(st.just(0), st.integers(1, 40))) for _ in size]
    if draw(st.booleans()):  # a slice of a contiguous tensor, as most are
        step = draw(st.integers(1, 3))
        for k in reversed(range(len(size))):
            stride[k], step = step, step * (size[k] + draw(st.integers(0, 2)))
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    assume(last < room)
    return dtype, size, stride, draw(st.integers(0, room - 1 - last)), (last + 1) * dtype.itemsize


def on_one_storage(specs):
    """Return views of one tensor whose bytes are any."""
    whole = torch.randint(0, 2, (STORAGE,), dtype=torch.uint8)
    return [whole.view(dtype).as_strided(size, stride, offset) for dtype, size, stride, offset, _ in specs]


@settings(max_examples=120)
@given(st.lists(views(), min_size=1, max_size=5), st.integers(0, 5))
def test_any_views_of_a_storage(specs, second):
    """Saved in one layer or in two, of which the second copies what the first has not."""
    want = on_one_storage(specs)
    with min_elements(1):
        got, _, statistics = through(lambda: want[:second], lambda: want[second:], num=2, count=4)
    unpacked = [tensor for tensor, _ in got]
    assert all(same_layout(a, b) for a, b in zip([*want[second:], *want[:second]], unpacked, strict=True))
    assert len(specs) > 1 or statistics.bytes_offloaded == specs[0][-1]


def test_empty_and_scalar_tensors_stay():
    want = [torch.empty(0, 64), torch.tensor(3.0), torch.empty(64, 0).t(), BASE.clone()[:0]]
    got, context, statistics = through(lambda: want)
    assert statistics.tensors_saved == 0
    assert all(same_layout(a, b) for a, (b, _) in zip(want, got, strict=True))
    assert context.statistics().tensors_kept[Reason.SMALL] == 4


PARTS = {
    "dense": (slice(0, 32), slice(32, 64)),
    "the second one is smaller": (slice(0, 60), slice(60, 64)),
    "columns": ((slice(None), slice(0, 32)), (slice(None), slice(32, 64))),
    "few columns": ((slice(None), slice(0, 8)), (slice(None), slice(16, 64))),
    "a dense part in a gap": (slice(0, 64, 63), slice(1, 63)),
    "a gap that is saved": (slice(1, 63), slice(0, 64, 63)),
}


@pytest.mark.parametrize("between", [None, 0, 1], ids=["one layer", "two layers", "a layer between"])
@pytest.mark.parametrize("name", PARTS)
def test_what_was_not_saved_yet_is_not_taken_from_an_earlier_copy(name, between):
    """A kernel of the program's own fills a buffer part by part, and torch's version counter does not count that."""

    def run(go):
        buffer, seen = torch.zeros(64, 64), list[Tensor]()

        def fill(x, k):
            buffer.data[PARTS[name][k]] = k + 1.0
            return Saves.apply(x, seen, buffer[PARTS[name][k]])

        fills = [lambda x: fill(x, 0), lambda x: fill(x, 1)]
        layers = [lambda x: fill(fill(x, 0), 1)] if between is None else [fills[0], *[torch.relu] * between, fills[1]]
        layers += [torch.relu] * (6 - len(layers))
        go(layers, torch.ones(2, requires_grad=True) * 1.0).sum().backward()
        return seen

    context, sync = make(4, 6)
    want = run(plain)
    got = run(lambda layers, x: forward(layers, x, context, sync))
    assert context.statistics().tensors_offloaded, "nothing was copied"
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


class SavesView(torch.autograd.Function):
    """Saves a view of its input that is made in its forward, without a graph, as fused norms of Liger do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(-1, x.shape[-1]))
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return grad * (1.0 + 0.0 * saved.view_as(grad))


def test_views_that_functions_save_of_their_inputs_are_offloaded():
    """Such a view is a leaf, as a view of a parameter is, but its base is not."""
    context, sync = make(1, 3)
    x = torch.randn(4, 64, 64, requires_grad=True)
    y = forward([lambda x: SavesView.apply(x * 1.0), lambda x: x * 1.0, lambda x: x * 1.0], x, context, sync)
    statistics = context.statistics()
    assert statistics.bytes_offloaded == x.nbytes
    assert statistics.resident_bytes == 0, "the input is freed"
    assert Reason.LEAF not in statistics.tensors_kept
    y.sum().backward()
    del y
    nothing_held(context)


# What is edited, or marked, between two times that it is saved


def first_of_three(layer):
    """Run a layer that is offloaded and two that are kept; return the output and the statistics."""
    context, sync = make(1, 3)
    x = torch.randn(64, 64, requires_grad=True) * 1.0
    return forward([layer, torch.relu, torch.relu], x, context, sync), context.statistics()


@pytest.mark.parametrize("other", [lambda t: t.data, lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (64, 64))])
@pytest.mark.parametrize("edited", [0, 1])
def test_each_name_is_judged_by_its_own_version_counter(other, edited):
    """Tensors on one storage may count their changes apart; a change of either is an error, as without offloading."""
    base = BASE.clone()
    names = (base, other(base))
    y, _ = first_of_three(lambda x: Saves.apply(x, [], *names))
    before = names[1 - edited]._version
    names[edited].add_(1.0)
    assert names[1 - edited]._version == before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("disjoint", [True, False])
def test_parts_with_version_counters_of_their_own_are_edited_one_after_the_other(layers, disjoint):
    """The copy of the first part may be on its way when the second one is edited."""
    whole, seen = torch.randn(16, 64), list[Tensor]()
    parts = whole.unsafe_chunk(2, -1) if disjoint else (whole, whole.data)

    def edits(x: Tensor, *parts: Tensor) -> Tensor:
        for part in parts:
            with torch.no_grad():
                part.mul_(2.0)
            x = Saves.apply(x, seen, part)
        return x

    context, sync = make(2, 4)
    first = [lambda x, part=part: edits(x, part) for part in parts] if layers == 2 else [lambda x: edits(x, *parts)]
    y = forward([*first, *[torch.relu] * (4 - layers)], torch.randn(4, requires_grad=True) * 1.0, context, sync)
    y.sum().backward()
    assert len(seen) == 2
    assert same_bits(seen[0], parts[1])
    assert not disjoint or same_bits(seen[1], parts[0])


def test_edited_names_of_one_counter_are_copied_once():
    """As an activation function in place saves its result, and the next convolution its input."""
    _, statistics = first_of_three(lambda x: (x * 1.0).sigmoid_().square())
    assert statistics.tensors_offloaded == 1


def test_a_mark_counts_though_the_tensor_was_saved_before():
    base, seen = BASE.clone(), list[Tensor]()

    def layer(x):
        x = Saves.apply(x, seen, base)
        mark_not_offload(base)
        return Saves.apply(x, seen, base)

    y, statistics = first_of_three(layer)
    assert statistics.tensors_kept[Reason.MARKED] == 1
    y.sum().backward()
    assert all(torch.equal(tensor, base) for tensor in seen)
