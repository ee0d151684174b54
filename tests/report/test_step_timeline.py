"""A recorded step with names: compute and stalls of each layer."""

import pytest

from actoffload.report import StepTimeline
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


def times(
    forward: float = 0.0, backward: float = 0.0, forward_stall: float = 0.0, backward_stall: float = 0.0
) -> dict[str, float]:
    return {
        "forward": forward,
        "backward": backward,
        "forward_stall": forward_stall,
        "backward_stall": backward_stall,
    }


def step() -> StepTimeline:
    return StepTimeline(MEASURED, ("encoder", "head"))


# Numbers


def test_work_and_waiting_of_each_layer():
    first, second = step().by_layer()
    assert first == times(pytest.approx(0.010), pytest.approx(0.020), pytest.approx(0.003), pytest.approx(0.004))
    assert second == times(pytest.approx(0.010), pytest.approx(0.020), 0.0, 0.0)


def test_waiting_within_work_belongs_to_that_work_whatever_comes_next():
    spans = [Span(Kind.FORWARD, 0, 0.0, 0.010), Span(Kind.STALL, 0, 0.004, 0.006), Span(Kind.BACKWARD, 0, 0.010, 0.020)]
    (only,) = StepTimeline(Timeline.build(spans), ("a",)).by_layer()
    assert only == times(pytest.approx(0.008), pytest.approx(0.010), pytest.approx(0.002), 0.0)


def test_layers_that_did_nothing_and_an_empty_step():
    assert StepTimeline(MEASURED, ("a", "b", "c")).by_layer()[2] == times()
    assert len(StepTimeline(MEASURED, ()).by_layer()) == 2
    assert StepTimeline(Timeline(()), ()).by_layer() == ()
