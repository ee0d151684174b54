"""Sums over a timeline."""

from __future__ import annotations

from actoffload.schedule.timeline import Kind, Span, Timeline

SPANS = (
    Span(Kind.STALL, 0, 3.0, 4.0),
    Span(Kind.D2H, 0, 2.0, 4.0, nbytes=7),
    Span(Kind.FORWARD, 1, 2.0, 3.0),
    Span(Kind.FORWARD, 0, 0.0, 2.0),
    Span(Kind.H2D, 0, 5.0, 9.0, nbytes=5),
)


def test_spans_are_put_in_order_of_their_start() -> None:
    timeline = Timeline.build(SPANS)
    assert [(span.start, span.end) for span in timeline.spans] == [(0, 2), (2, 3), (2, 4), (3, 4), (5, 9)]


def test_seconds_and_bytes_are_added_by_kind() -> None:
    timeline = Timeline.build(SPANS, resident=[(1.0, 7), (2.0, 12), (4.0, 5)])
    assert timeline.seconds(Kind.FORWARD) == 3.0
    assert timeline.seconds(Kind.FORWARD, Kind.STALL) == 4.0
    assert timeline.nbytes(Kind.D2H) == 7
    assert timeline.nbytes(Kind.D2H, Kind.H2D) == 12
    assert [span.kind for span in timeline.of(Kind.STALL, Kind.H2D)] == [Kind.STALL, Kind.H2D]
    assert timeline.end == 9.0
    assert timeline.peak_bytes == 12


def test_nothing_recorded_is_zero() -> None:
    empty = Timeline.build(())
    assert (empty.end, empty.peak_bytes, empty.seconds(Kind.D2H), empty.nbytes(Kind.D2H)) == (0.0, 0, 0, 0)
