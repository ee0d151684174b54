"""Costs of layers and links, costs measured from a timeline, and sums over a timeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actoffload.schedule.costs import LayerCost
from actoffload.schedule.timeline import Kind, Span, Timeline


@given(nbytes=st.integers(0, 10**12), pieces=st.integers(1, 40))
def test_even_pieces_lose_no_byte(nbytes: int, pieces: int) -> None:
    cost = LayerCost.even(nbytes, forward=1.0, backward=1.0, pieces=pieces)
    assert cost.nbytes == nbytes
    assert len(cost.saved) == min(pieces, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 400, 401, 5000])
def test_batches_lose_no_tensor_and_start_no_earlier(nbytes: int) -> None:
    cost = LayerCost.even(1000, 1.0, 2.0, pieces=5)
    batched = cost.in_batches(nbytes)
    assert [each.nbytes for each in batched.saved] == [each.nbytes for each in cost.saved]
    times = [each.saved_at for each in batched.saved]
    assert times == sorted(times)
    assert all(late >= each.saved_at for late, each in zip(times, cost.saved, strict=True))
    together = [sum(each.nbytes for each in batched.saved if each.saved_at == at) for at in sorted({*times})]
    assert all(size >= nbytes for size in together[:-1])


# Sums over a timeline


SPANS = (
    Span(Kind.STALL, 0, 3.0, 4.0),
    Span(Kind.D2H, 0, 2.0, 4.0, nbytes=7),
    Span(Kind.FORWARD, 1, 2.0, 3.0),
    Span(Kind.FORWARD, 0, 0.0, 2.0),
    Span(Kind.H2D, 0, 5.0, 9.0, nbytes=5),
)


def test_seconds_and_bytes_are_added_by_kind() -> None:
    timeline = Timeline.build(SPANS, resident=[(1.0, 7), (2.0, 12), (4.0, 5)])
    assert timeline.seconds(Kind.FORWARD) == 3.0
    assert timeline.seconds(Kind.FORWARD, Kind.STALL) == 4.0
    assert timeline.nbytes(Kind.D2H) == 7
    assert timeline.nbytes(Kind.D2H, Kind.H2D) == 12
    assert [span.kind for span in timeline.of(Kind.STALL, Kind.H2D)] == [Kind.STALL, Kind.H2D]
    assert timeline.end == 9.0
    assert timeline.peak_bytes == 12
