"""A recorded step: compute and stalls of each layer."""

import pytest

from actoffload.report.build import seconds_by_layer
from actoffload.schedule import Kind, Span, Timeline

MEASURED = Timeline.build(
    [
        Span(Kind.FORWARD, 0, 0.000, 0.010),
        Span(Kind.D2H, 0, 0.002, 0.013, nbytes=110 * 10**6),
        Span(Kind.STALL, 0, 0.010, 0.013),  # between two layers, before the second starts
        Span(Kind.FORWARD, 1, 0.013, 0.023),
        Span(Kind.BACKWARD, 1, 0.023, 0.043),
        Span(Kind.BACKWARD, 0, 0.043, 0.067),
        Span(Kind.H2D, 0, 0.043, 0.048, nbytes=100 * 10**6),
        Span(Kind.STALL, 0, 0.044, 0.048),  # within the backward of the first layer
    ],
    [(0.001, 5), (0.067, 0)],
)


def times(forward: float = 0.0, backward: float = 0.0, stall: float = 0.0) -> dict[str, float]:
    found = {"forward_seconds": forward, "backward_seconds": backward, "stall_seconds": stall}
    return {name: pytest.approx(seconds) for name, seconds in found.items()}


def test_compute_and_stalls_of_each_layer():
    assert seconds_by_layer(MEASURED, 3) == [times(0.010, 0.020, 0.007), times(0.010, 0.020), times()]


def test_an_empty_step():
    assert seconds_by_layer(Timeline(()), 1) == [times()]
