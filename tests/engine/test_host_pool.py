"""The host pool by itself: buffers that never overlap, little waste, a limit, and fences."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload.device import ReferenceDevice
from actoffload.device.base import StreamPosition
from actoffload.engine.host_pool import HostBuffer, HostPool

KIB, MIB = 2**10, 2**20


class Counting(ReferenceDevice):
    """Counts what is taken from the system, of which there may be little."""

    def __init__(self, room: int | None = None) -> None:
        super().__init__()
        self.room = room
        self.slabs: list[int] = []

    def empty_host(self, nbytes: int) -> torch.Tensor:
        if self.room is not None and sum(self.slabs) + nbytes > self.room:
            raise RuntimeError("no more pages")
        self.slabs.append(nbytes)
        return super().empty_host(nbytes)


def mark(order: int) -> StreamPosition:
    return StreamPosition(None, order, False)


def ranges(buffer: HostBuffer) -> list[tuple[int, int]]:
    return [(part.data_ptr(), part.data_ptr() + part.numel()) for part in buffer.parts]


def disjoint(buffers: list[HostBuffer]) -> bool:
    spans = sorted(span for buffer in buffers for span in ranges(buffer))
    return all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def whole(buffer: HostBuffer, nbytes: int) -> None:
    assert buffer.nbytes == nbytes == sum(part.numel() for part in buffer.parts)
    assert all(part.dtype is torch.uint8 and part.dim() == 1 and part.is_contiguous() for part in buffer.parts)
    assert all(part.data_ptr() % 64 == 0 for part in buffer.parts)


def test_memory_is_taken_ahead_and_what_is_too_much_is_freed():
    device = Counting(room=64 * MIB)
    pool = HostPool(device)
    kept, other = pool.take(2 * MIB), pool.take(6 * MIB)
    pool.give_back(other)
    assert pool.fit(24 * MIB, grow=True) == 0
    assert device.slabs == [2 * MIB, 6 * MIB, 16 * MIB]
    large = pool.take(20 * MIB)
    whole(large, 20 * MIB)  # across the end of a slab
    assert pool.bytes_held == 24 * MIB
    pool.give_back(large)
    assert pool.fit(18 * MIB) == 6 * MIB
    assert pool.fit(13 * MIB) == 16 * MIB
    assert pool.bytes_held == pool.bytes_taken == 2 * MIB
    assert disjoint([kept, *(pool.take(size * MIB) for size in (6, 5))])
    limited = HostPool(Counting(), max_bytes=5 * MIB + 5)
    limited.fit(6 * MIB, grow=True)
    assert limited.bytes_held == 4 * MIB
    assert pool.fit(2**40, grow=True) == 0, "the system has no more"


def test_gaps_that_are_too_small_count_in_the_limit():
    pool = HostPool(Counting(), max_bytes=8 * MIB)
    first, _second = pool.take(3 * MIB), pool.take(3 * MIB)
    pool.give_back(first)
    assert pool.take(4 * MIB) is None
    assert "forbids 4.0 MiB more beside the 6.0 MiB that are held" in pool.refusal


def test_memory_doubles_until_it_is_known_how_much_is_needed():
    device = Counting()
    pool = HostPool(device, max_bytes=900 * MIB)
    pool.doubling = True
    buffers = [pool.take(20 * MIB) for _ in range(14)]
    assert disjoint(buffers)
    assert device.slabs == [64 * MIB, 64 * MIB, 128 * MIB, 256 * MIB]
    buffers += [pool.take(100 * MIB) for _ in range(3)]
    assert device.slabs[4:] == [68 * MIB], "as much again is above the limit"
    for buffer in buffers:
        pool.give_back(buffer)
    pool.fit(280 * MIB, grow=True)
    assert pool.bytes_held == 280 * MIB
    pool.take(282 * MIB)
    assert pool.bytes_held == 288 * MIB, "a little more than is missing"


def test_slabs_where_the_allocator_takes_powers_of_two():
    device = Counting()
    device.powers_of_two = True
    pool = HostPool(device)
    whole(pool.take(13 * MIB), 13 * MIB)
    assert device.slabs == [8 * MIB, 4 * MIB, 2 * MIB]


def test_a_buffer_is_reused():
    pool = HostPool(Counting())
    first = pool.take(5 * MIB)
    whole(first, 5 * MIB)
    held = pool.bytes_held
    where = ranges(first)
    pool.give_back(first, mark(3))
    second = pool.take(5 * MIB)
    assert ranges(second) == where
    assert second.fence == mark(3)
    assert pool.bytes_held == held
    assert pool.high_water == pool.bytes_taken == 5 * MIB


def test_freed_buffers_make_one_larger_and_their_fences_merge():
    device = Counting()
    pool = HostPool(device)
    buffers = [pool.take(2 * MIB) for _ in range(4)]
    for k, buffer in enumerate(buffers):
        pool.give_back(buffer, mark(10 - k))
    large = pool.take(8 * MIB)
    whole(large, 8 * MIB)
    assert sum(device.slabs) == 8 * MIB  # nothing new
    assert large.fence == mark(10), "the last one"


sizes = st.one_of(
    st.sampled_from([256 * KIB, 512 * KIB, MIB, MIB + 1, MIB + 8 * KIB, 3 * MIB, 16 * MIB]),
    st.integers(256 * KIB, 6 * MIB),
)


@settings(max_examples=60)
@given(st.lists(sizes, min_size=1, max_size=12))
def test_waste_is_below_five_percent(some):
    """Sizes of tensors that may leave, repeated as the layers of a model repeat them, 64 MiB and more."""
    pool = HostPool(Counting())
    total, buffers = 0, []
    while total < 64 * MIB:
        for nbytes in some:
            buffers.append(pool.take(nbytes))
            total += nbytes
    assert disjoint(buffers)
    assert pool.bytes_held <= 1.05 * total
    assert pool.high_water <= 1.05 * total
    # The next steps need nothing more, in whatever order the buffers are returned.
    held = pool.bytes_held
    for _ in range(2):
        for buffer in buffers[::2] + buffers[1::2]:
            pool.give_back(buffer)
        buffers = []
        again = 0
        while again < total:
            for nbytes in some:
                buffers.append(pool.take(nbytes))
                again += nbytes
        assert pool.bytes_held == held


# Few sizes, so that most requests find a buffer of their size in a bin, as in training.
few = st.sampled_from([1, 300 * KIB, 2 * MIB, 3 * MIB, 5 * MIB])


@settings(max_examples=60)
@given(st.data())
def test_any_use_keeps_buffers_apart(data):
    limit = data.draw(st.sampled_from([None, 8 * MIB, 32 * MIB]))
    device = Counting(data.draw(st.sampled_from([None, 16 * MIB])))
    pool = HostPool(device, limit)
    live: list[HostBuffer] = []
    forever: list[HostBuffer] = []
    stamp: dict[int, int] = {}
    order = 0
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["take", "take", "take", "give", "give", "close"]))
        if action == "take":
            nbytes = data.draw(few)
            captured = data.draw(st.integers(0, 9)) == 0
            before = list(device.slabs)
            buffer = pool.take(nbytes, captured=captured)
            if buffer is None:
                assert pool.refusal
                assert captured or limit is not None or device.room is not None
                continue
            whole(buffer, nbytes)
            assert not captured or device.slabs == before, "memory was taken from the system in a capture"
            live.append(buffer)
            for part in buffer.parts:  # written now, read when it is given back
                order += 1
                stamp[part.data_ptr()] = order % 256
                part[:: max(1, part.numel() // 7)] = order % 256
        elif action == "give" and live:
            buffer = live.pop(data.draw(st.integers(0, len(live) - 1)))
            for part in buffer.parts:
                assert set(part[:: max(1, part.numel() // 7)].tolist()) == {stamp[part.data_ptr()]}
            if buffer.captured:
                forever.append(buffer)
            pool.give_back(buffer, mark(order))
        elif action == "close" and data.draw(st.integers(0, 3)) == 0:
            pool.close()
            device.slabs.clear()
            forever.clear()  # those graphs must not run any more
            assert pool.bytes_held == pool.bytes_taken == 0
        assert disjoint(live + forever)
        assert pool.bytes_held == sum(device.slabs)
        assert limit is None or pool.bytes_held <= limit
        pool.settle()
        assert pool.bytes_taken <= pool.bytes_held
    for buffer in live:
        pool.give_back(buffer)
    pool.settle()
    assert pool.bytes_taken == 0


def test_a_captured_buffer_is_never_reused_until_the_pool_is_closed():
    device = Counting()
    pool = HostPool(device)
    assert pool.take(2 * MIB, captured=True) is None
    assert "run one step of the same shape before the capture" in pool.refusal
    pool.give_back(pool.take(2 * MIB), mark(1))
    captured = pool.take(2 * MIB, captured=True)
    assert captured.fence is None  # from before the capture, which is synchronized
    pool.give_back(captured, mark(2))
    other = pool.take(2 * MIB)
    assert disjoint([captured, other])
    assert pool.bytes_held == 4 * MIB
    pool.close()
    assert (pool.bytes_held, pool.bytes_taken) == (0, 0)


def test_a_request_that_failed_is_made_again_when_memory_was_given_back():
    device = Counting(room=4 * MIB)
    pool = HostPool(device)
    first, second = pool.take(2 * MIB), pool.take(2 * MIB)
    attempts = []

    def empty_host(nbytes, inner=device.empty_host):
        attempts.append(nbytes)
        return inner(nbytes)

    device.empty_host = empty_host
    for _ in range(5):
        assert pool.take(4 * MIB) is None
    assert attempts == [4 * MIB]  # not for each tensor
    pool.give_back(first)
    device.room = 16 * MIB
    assert pool.take(6 * MIB) is None  # less was given back than was missing
    assert attempts == [4 * MIB]
    pool.give_back(second)
    assert pool.take(6 * MIB) is not None
    assert attempts == [4 * MIB, 2 * MIB]
    assert pool.take(2 * MIB) is not None
