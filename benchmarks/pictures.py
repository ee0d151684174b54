"""Pictures of the results: step times beside checkpointing, and time against peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jobs import ARMS, JOBS
from rows import Row

__all__ = ["BUDGETS", "INK", "bars", "draw", "drawn_from", "ours", "shown"]

Jobs: TypeAlias = dict[str, list[Row]]

INK = {"light": "#24292f", "dark": "#ced6dd"}
OURS = {"light": "#0072b2", "dark": "#6cb6e8"}
OTHER = {"light": "#c04f00", "dark": "#f0975a"}
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
"""Settings of matplotlib that have the colour of the ink."""
HERO = ("T1", "L4", "L16", "L32", "Q16", "P8", "P32", "P8c", "P32c", "F2", "ViT-L", "DiT-XL")
"""Jobs of the landing page."""
BUDGETS = "Step time against peak memory: budgets, checkpointing and no offload"
"""Alternative of the picture below the section of the job of budgets."""


def measured(of_job: Sequence[Row], arm: str) -> Row | None:
    return next((row for row in of_job if row["arm"] == arm and row["step_ms"]), None)


def ours(of_job: Sequence[Row]) -> Row | None:
    """Return our row beside checkpointing: the budget of its peak, or the default where nothing else fits."""
    names = ("budget", "offload") if measured(of_job, "none") else ("offload", "budget")
    return next((row for arm in names if (row := measured(of_job, arm)) is not None), None)


def measured_jobs(jobs: Jobs) -> list[str]:
    """Return the jobs in which checkpointing and ours were measured, both on the same inputs."""
    alike = [name for name in jobs if not JOBS[name].searches]
    return [name for name in alike if measured(jobs[name], "checkpoint") and ours(jobs[name])]


def shown(jobs: Jobs) -> list[str]:
    """Return those of them that the landing page shows."""
    there = measured_jobs(jobs)
    return [name for name in HERO if name in there]


def drawn_from(jobs: Jobs) -> dict[str, Any]:
    """Return the figures of the pictures, by which it is seen whether they are those of the results."""
    found: dict[str, Any] = {"hero": bars(jobs)} if shown(jobs) else {}
    measured_rows = [row for row in jobs.get("B8", ()) if row["step_ms"]]
    points = [[row["arm"], float(row["peak_gib"]), float(row["ratio"])] for row in measured_rows]
    return found | ({"budgets": points} if points else {})


def bars(jobs: Jobs, names: Sequence[str] | None = None) -> list[list[Any]]:
    """Return for each job its label, our time and that without offload by that of checkpointing, and our peak."""
    found = []
    for name in shown(jobs) if names is None else names:
        checkpoint, row, nothing = measured(jobs[name], "checkpoint"), ours(jobs[name]), measured(jobs[name], "none")
        base = float(checkpoint["step_ms"])
        without = [float(nothing["step_ms"]) / base, float(nothing["peak_gib"])] if nothing else [None, None]
        found.append([JOBS[name].title, float(row["step_ms"]) / base, float(row["peak_gib"]), *without])
    return found


def draw(jobs: Jobs, folder: Path) -> None:
    """Draw the pictures, light and dark, into a folder."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    data = drawn_from(jobs)
    panels: dict[str, Callable[..., None]] = {"hero": _hero, "budgets": _budgets}
    for name, figures in data.items():
        for scheme, ink in INK.items():
            with matplotlib.rc_context({**dict.fromkeys(INKED, ink), "font.size": 10}):
                height = 1.5 + 0.34 * len(figures) if name == "hero" else 3.6
                figure, ax = pyplot.subplots(figsize=(4.8, height), layout="constrained")
                panels[name](ax, figures, scheme)
                ax.set_facecolor("none")
                ax.spines[["top", "right"]].set_visible(False)
                figure.savefig(folder / f"{name}-{scheme}.png", dpi=160, transparent=True)
                pyplot.close(figure)


def _hero(ax: Any, bars: list[list[Any]], scheme: str) -> None:
    right, inside = 1.25 * max(1.0, *(bar[1] for bar in bars)), {"light": "white", "dark": "black"}[scheme]
    for k, (_, time, peak, without, whole) in enumerate(bars):
        ax.barh(k, time, color=OURS[scheme], height=0.62, label=None if k else "actoffload")
        ax.text(right, k, f"{time:.2f}", va="center", ha="right", fontsize=9)
        said = f"{peak:.1f} GiB, " + ("else OOM" if whole is None else f"of {whole:.1f}")
        ax.text(0.02, k, said, va="center", fontsize=8.5, color=inside)
        if without is not None:
            label = None if any(bar[3] for bar in bars[:k]) else "no offload"
            ax.plot(without, k, "D", color=inside, markersize=6, label=label, markeredgecolor=INK[scheme])
    ax.axvline(1.0, color=OTHER[scheme], linewidth=1.6, label="checkpointing")
    ax.set_yticks(range(len(bars)), [bar[0] for bar in bars])
    ax.invert_yaxis()
    ax.set_xlim(0, right)
    ax.set_xlabel("step time, × checkpointing")
    ax.figure.legend(frameon=False, fontsize=8.5, ncols=3, loc="outside upper center")


def _budgets(ax: Any, points: list[list[Any]], scheme: str) -> None:
    colours = {"none": INK[scheme], "checkpoint": OTHER[scheme]}
    budgets = sorted((peak, ratio) for arm, peak, ratio in points if arm.startswith("budget"))
    ax.plot(*zip(*budgets, strict=True), "o-", color=OURS[scheme], label="offload(model, memory_budget)")
    for (arm, colour), marker in zip(colours.items(), "Ds", strict=True):
        for _, peak, ratio in [point for point in points if point[0] == arm]:
            ax.plot(peak, ratio, marker, color=colour, markersize=8, label=ARMS[arm])
    ax.set_xlim(left=0)
    ax.set_xlabel("peak memory (GiB)")
    ax.set_ylabel("step time, × no offload")
    ax.legend(frameon=False, fontsize=8.5)
