"""Which bytes are copied: every saved view is covered, and is restored with its values, whatever its layout."""

from __future__ import annotations

import itertools

import torch
from helpers import same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actoffload.device import ReferenceDevice
from actoffload.engine.host_pool import HostPool
from actoffload.engine.layout import GRAIN, Piece, View, dense, gaps, loose_pieces, reload_spans

CPU = torch.device("cpu")
DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
          torch.complex128, torch.float8_e4m3fn, torch.int64]  # fmt: skip
STORAGE = 4096


@st.composite
def views(draw, nbytes: int = STORAGE):
    """A random strided tensor on a storage, described as torch would."""
    dtype = draw(st.sampled_from(DTYPES))
    room = nbytes // dtype.itemsize
    dims = draw(st.integers(1, 4))
    size = [draw(st.integers(1, 6)) for _ in range(dims)]
    stride = [draw(st.one_of(st.just(0), st.integers(1, 40))) for _ in range(dims)]
    if draw(st.booleans()):  # a slice of a contiguous tensor, as most are
        stride, step = [0] * dims, draw(st.integers(1, 3))
        for k in reversed(range(dims)):
            stride[k], step = step, step * (size[k] + draw(st.integers(0, 2)))
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    assume(last < room)
    offset = draw(st.integers(0, room - 1 - last))
    return dtype, tuple(size), tuple(stride), offset


def storage(seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (STORAGE,), dtype=torch.uint8, generator=generator).untyped_storage()


def tensor(memory: torch.UntypedStorage, spec) -> torch.Tensor:
    dtype, size, stride, offset = spec
    return torch.empty(0, dtype=dtype).set_(memory, offset, size, stride)


def touched(spec) -> set[int]:
    """Every byte that a view covers, the slow way."""
    dtype, size, stride, offset = spec
    first = [offset]
    for n, s in zip(size, stride, strict=True):
        first = [base + k * s for base in first for k in range(n)]
    return {e * dtype.itemsize + b for e in set(first) for b in range(dtype.itemsize)}


@given(views())
def test_extent_and_covered(spec):
    view = View.of(tensor(storage(), spec))
    bytes_ = touched(spec)
    assert view.extent == (min(bytes_), max(bytes_) + 1)
    if view.overlaps:
        assert view.covered >= len(bytes_)
    else:
        assert view.covered == len(bytes_)


def plan(specs) -> list[Piece]:
    """Decide what moves as a storage does when all views were saved in one layer."""
    memory = storage()
    pieces: list[Piece] = []
    loose = []
    for spec in specs:
        view = View.of(tensor(memory, spec))
        if any(piece.holds(view) for piece in pieces):
            continue
        piece = dense(view, STORAGE)
        if piece is None:
            loose.append(view)
        else:
            pieces.append(piece)
    loose = [view for view in loose if not any(piece.holds(view) for piece in pieces)]
    return pieces + (loose_pieces(loose, STORAGE) if loose else [])


@given(st.lists(views(), min_size=1, max_size=5))
def test_every_view_is_held_by_a_piece(specs):
    pieces = plan(specs)
    memory = storage()
    for spec in specs:
        assert any(piece.holds(View.of(tensor(memory, spec))) for piece in pieces)
    for piece in pieces:
        assert 0 <= piece.start < piece.stop <= STORAGE


def test_a_view_of_another_item_size_is_another_piece():
    """Slices of one layout in elements, on the same bytes: one covers 2 bytes of each element, the other 4."""
    memory = storage()
    narrow, wide = (View.of(tensor(memory, (dtype, (8,), (64,), 0))) for dtype in (torch.int16, torch.float32))
    assert (narrow.compact, narrow.offset) == (wide.compact, wide.offset)
    for views_ in ([narrow, wide], [wide, narrow]):
        assert [piece.elements for piece in loose_pieces(views_, STORAGE)] == views_


@given(views())
def test_not_much_more_moves_than_is_covered(spec):
    """At most twice what is covered, and the rounding at both ends."""
    view = View.of(tensor(storage(), spec))
    if not view.overlaps:
        moved = sum(piece.nbytes for piece in plan([spec]))
        assert moved <= 2 * view.covered + 2 * GRAIN


@settings(max_examples=200)
@given(st.lists(views(), min_size=1, max_size=5))
def test_values_come_back(specs):
    """Through host buffers into new memory whose other bytes are garbage, by the storage's own arithmetic."""
    memory = storage()
    pool = HostPool(ReferenceDevice())
    pieces = plan(specs)
    for piece in pieces:
        piece.host = pool.take(piece.nbytes, whole=piece.elements is not None)
        host = piece.host.parts[0]
        if piece.elements is None:
            host.copy_(torch.empty(0, dtype=torch.uint8).set_(memory, piece.start, (piece.nbytes,), (1,)))
        else:
            source = piece.elements.elements(memory, 0, CPU)
            host.view(source.dtype).view(source.shape).copy_(source)
    spans = reload_spans(pieces)
    assert all(a % GRAIN == 0 for a, _ in spans), "pointers keep their alignment"
    assert all(x[1] <= y[0] for x, y in itertools.pairwise(spans))
    buffers = [(a, b, torch.full((b - a,), 0xEE, dtype=torch.uint8)) for a, b in spans]

    def containing(start: int, stop: int):
        found = [(a, buffer) for a, b, buffer in buffers if a <= start and stop <= b]
        assert len(found) == 1
        return found[0]

    for piece in pieces:
        base, buffer = containing(piece.start, piece.stop)
        if piece.elements is None:
            buffer[piece.start - base : piece.stop - base] = piece.host.parts[0]
        else:
            target = piece.elements.elements(buffer.untyped_storage(), base, CPU)
            target.copy_(piece.host.parts[0].view(target.dtype).view(target.shape))
    for spec in specs:
        view = View.of(tensor(memory, spec))
        base, buffer = containing(*view.extent)
        assert same_bits(tensor(memory, spec), view.on(buffer, base))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8))
def test_spans_are_not_mostly_empty(parts):
    pieces = [Piece(a * GRAIN, (a + n) * GRAIN) for a, n in parts]
    spans = reload_spans(pieces)
    filled = len({k for a, n in parts for k in range(a, a + n)}) * GRAIN
    assert sum(b - a for a, b in spans) <= 2 * filled
    for piece in pieces:
        assert sum(a <= piece.start and piece.stop <= b for a, b in spans) == 1


@given(
    st.tuples(st.integers(0, 40), st.integers(1, 20)),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6),
)
def test_gaps_are_exactly_what_is_missing(wanted, parts):
    start, stop = wanted[0], sum(wanted)
    there = [Piece(a // 4, a + n + 9, exact=(a, a + n)) for a, n in parts]
    missing = gaps(start, stop, there, 4096)
    found = [k for piece in missing for k in range(*piece.exact)]
    assert found == sorted(set(range(start, stop)) - {k for a, n in parts for k in range(a, a + n)})
    for piece in missing:
        assert piece.start <= piece.exact[0] < piece.exact[1] <= piece.stop <= 4096
        assert piece.start % GRAIN == 0
