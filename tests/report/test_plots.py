"""What the pictures show, asked of matplotlib's own objects."""

import importlib
import sys
from collections.abc import Iterator

import pytest

matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402 - after the backend is chosen
from matplotlib.collections import PolyCollection  # noqa: E402

import actoffload  # noqa: E402
from actoffload.measure import DeviceInfo, Measurement, Measurements  # noqa: E402
from actoffload.report.plots import plot_timeline  # noqa: E402
from actoffload.schedule import DefaultSchedule, Kind, LayerCost, Link, Span, Timeline, simulate  # noqa: E402

MIB = 2**20


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def timeline(num_layers: int, model_layers: int = 5) -> Timeline:
    layers = [LayerCost.even(256 * MIB, forward=0.010, backward=0.020)] * model_layers
    link = Link(d2h=13.5 * 2**30, h2d=13.5 * 2**30)
    return simulate(DefaultSchedule(num_layers, model_layers).plan(), layers, link).timeline


def labels_by_lane(ax: object) -> list[list[str]]:
    """Return the numbers in the boxes of each lane from left to right."""
    texts = sorted(ax.texts, key=lambda text: text.get_position())  # type: ignore[attr-defined]
    return [[text.get_text() for text in texts if text.get_position()[1] == lane] for lane in range(3)]


def hatched(ax: object) -> list[tuple[float, float]]:
    """Return where stalls are drawn, from left to right."""
    found = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_hatch()]  # type: ignore[attr-defined]
    boxes = [collection.get_paths()[0].get_extents() for collection in found]
    return sorted((box.x0, box.x1) for box in boxes)


def test_lanes_carry_the_layers_in_order_of_time() -> None:
    assert labels_by_lane(plot_timeline(timeline(2))) == [
        ["0", "1", "2", "3", "4", "4", "3", "2", "1", "0"],
        ["0", "1"],
        ["1", "0"],
    ]


def test_work_measured_around_a_stall_is_cut_by_it() -> None:
    spans = (
        Span(Kind.BACKWARD, 0, 0.0, 10.0),  # measured from the layer's start to its end
        Span(Kind.STALL, 0, 4.0, 6.0),
        Span(Kind.H2D, 0, 0.0, 6.0, nbytes=1),
    )
    ax = plot_timeline(Timeline.build(spans))
    assert hatched(ax) == [(4.0, 6.0)]
    where = sorted(text.get_position()[0] for text in ax.texts if text.get_position()[1] == 0)
    assert where == [2.0, 8.0]


def test_the_legend_names_what_is_shown_and_nothing_else() -> None:
    def legend(num_layers: int) -> list[str]:
        shown = plot_timeline(timeline(num_layers)).get_legend()
        assert shown is not None
        return [text.get_text() for text in shown.get_texts()]

    assert legend(0) == ["forward", "backward"]
    assert legend(2) == ["forward", "backward", "offload (D2H)", "reload (H2D)"]
    assert legend(3) == ["forward", "backward", "offload (D2H)", "reload (H2D)", "stall"]


@pytest.mark.parametrize(("seconds", "unit"), [(2.0, "s"), (2e-3, "ms"), (2e-6, "µs")])
def test_time_is_shown_in_a_fitting_unit(seconds: float, unit: str) -> None:
    ax = plot_timeline(Timeline.build([Span(Kind.FORWARD, 0, 0.0, seconds)]))
    assert ax.get_xlabel() == f"time ({unit})"
    assert ax.get_xlim() == (0.0, pytest.approx(2.0))


def test_matplotlib_is_imported_only_for_a_picture_and_asked_for_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "actoffload.report.plots")
    monkeypatch.setattr(actoffload.report, "plots", actoffload.report.plots)  # which the import below replaces
    plots = importlib.import_module("actoffload.report.plots")
    with pytest.raises(
        ImportError, match=r"Plots need matplotlib, .*; install it with pip install 'actoffload\[plots\]'"
    ):
        plots.plot_timeline(Timeline(()))


def test_measured_times_are_beside_the_bars_and_clear_of_a_lower_limit() -> None:
    device = DeviceInfo("a GPU", False, "")
    ax = Measurements(device, {"a": Measurement(4 * MIB, 0.1), "b": Measurement(MIB, 0.2)}).plot()
    assert [text.get_text() for text in ax.texts] == ["4.0 MiB, 1.000 x", "1.0 MiB, 2.000 x"]
    assert ax.get_xlabel() == "peak of device memory (MiB)\nbeside each bar: step time, x a"
    line = ax.axvline(3.5)
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]
    assert all(text.get_window_extent().x0 > line.get_window_extent().x1 for text in ax.texts)
    assert ax.xaxis.label.get_window_extent().x1 < ax.figure.bbox.x1
