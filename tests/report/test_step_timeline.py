"""A recorded step with names: seconds by kind and layer, the table, the figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actoffload.report.step_timeline import LayerTimes, StepTimeline
from actoffload.schedule import DefaultSchedule, Kind, LayerCost, Link, Span, Timeline, simulate

MIB = 2**20
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


def step() -> StepTimeline:
    return StepTimeline(MEASURED, ["encoder", "head"])


# Numbers


def test_seconds_of_each_kind_without_the_stalls_in_them():
    assert step().seconds == {
        Kind.FORWARD: pytest.approx(0.020),
        Kind.BACKWARD: pytest.approx(0.040),
        Kind.STALL: pytest.approx(0.007),
        Kind.D2H: pytest.approx(0.011),
        Kind.H2D: pytest.approx(0.005),
    }
    assert step().bandwidth == {Kind.D2H: pytest.approx(1e10), Kind.H2D: pytest.approx(2e10)}


def test_work_and_waiting_of_each_layer():
    first, second = step().by_layer()
    assert first == LayerTimes(pytest.approx(0.010), pytest.approx(0.020), pytest.approx(0.003), pytest.approx(0.004))
    assert second == LayerTimes(pytest.approx(0.010), pytest.approx(0.020), 0.0, 0.0)


def test_waiting_within_work_belongs_to_that_work_whatever_comes_next():
    spans = [Span(Kind.FORWARD, 0, 0.0, 0.010), Span(Kind.STALL, 0, 0.004, 0.006), Span(Kind.BACKWARD, 0, 0.010, 0.020)]
    (only,) = StepTimeline(Timeline.build(spans), ["a"]).by_layer()
    assert only == LayerTimes(pytest.approx(0.008), pytest.approx(0.010), pytest.approx(0.002), 0.0)


def test_layers_that_did_nothing_and_an_empty_step():
    assert StepTimeline(MEASURED, "abc").by_layer()[2] == LayerTimes()
    assert len(StepTimeline(MEASURED, []).by_layer()) == 2
    assert StepTimeline(Timeline(()), []).by_layer() == ()
    assert repr(step()) == "<StepTimeline of 2 layers, 67.00 ms measured>"


@pytest.mark.parametrize("num_layers", [2, 4, 5])
def test_layers_add_up_to_what_is_simulated(num_layers):
    layers = [LayerCost.even(256 * MIB, forward=0.010, backward=0.020)] * 6
    predicted = simulate(DefaultSchedule(num_layers, 6).plan(), layers, Link(15 * 2**30, 15 * 2**30))
    times = StepTimeline(predicted.timeline, []).by_layer()
    assert sum(t.forward for t in times) == pytest.approx(0.060)
    assert sum(t.backward for t in times) == pytest.approx(0.120)
    assert sum(t.forward_stall for t in times) == pytest.approx(predicted.forward_stall)
    assert sum(t.backward_stall for t in times) == pytest.approx(predicted.backward_stall)


# Figures


@pytest.fixture
def pyplot() -> Iterator[Any]:
    """Return pyplot, without a screen; every figure is closed afterwards."""
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def labels(ax: object, lane: int) -> list[str]:
    texts = sorted(ax.texts, key=lambda text: text.get_position())  # type: ignore[attr-defined]
    return [text.get_text() for text in texts if text.get_position()[1] == lane]


def sequential(names: list[str], num_layers: int) -> StepTimeline:
    layers = [LayerCost.even(256 * MIB, forward=0.010, backward=0.020)] * len(names)
    link = Link(d2h=13.5 * 2**30, h2d=13.5 * 2**30)
    plan = DefaultSchedule(num_layers, len(names)).plan()
    return StepTimeline(simulate(plan, layers, link).timeline, names)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["in", "mid", "a.very.long.name.of.a.module", "out"], ["in", "mid", "2", "out", "out", "2", "mid", "in"]),
        ([f"transformer.encoder.layers.{k}.mlp" for k in range(5)], [f"{k}.mlp" for k in reversed(range(5))]),
        (["a", "", "", ""], ["a", "1", "2", "3", "3", "2", "1", "a"]),
    ],
)
def test_names_stand_in_the_boxes_as_far_as_they_fit(pyplot, names, shown):
    """Without what all of them begin with where they do not fit, or else as numbers."""
    assert labels(sequential(names, 2).plot(), 0)[-len(shown) :] == shown


def test_names_stay_within_their_boxes(pyplot):
    shown = sequential([f"transformer.encoder.layers.{k}.mlp" for k in range(5)], 3)
    figure = shown.figure()
    figure.draw_without_rendering()
    ax = figure.axes[0]
    texts = [text for text in ax.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    assert any(".mlp" in text.get_text() for text in texts)
    assert not [(a, b) for k, a in enumerate(boxes) for b in boxes[:k] if a.overlaps(b)]
