"""The picture of the landing page: time against peak of a Trainer run, and device memory over a step of Llama layers.

Where the memory of a step is not recorded, time against peak of Llama layers takes its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

# Colours that can be told apart on white and on black, and without colour by place and label.
INK = {"light": "#24292f", "dark": "#ced6dd"}
COLOURS = {
    "no offload": {"light": "#57606a", "dark": "#a8b1ba"},
    "checkpoint": {"light": "#c04f00", "dark": "#f0975a"},
    "actoffload": {"light": "#0072b2", "dark": "#6cb6e8"},
    "budget": {"light": "#0072b2", "dark": "#6cb6e8"},
}
LABELS = {
    "no offload": "no offload",
    "checkpoint": "checkpointing",
    "actoffload": "offload(model)",
    "budget": "offload(model, memory_budget)",
}
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
"""Settings of matplotlib that have the colour of the ink."""
MARKERS = {"no offload": "D", "checkpoint": "s", "actoffload": "o", "budget": "^"}
LOWEST = 0.95  # step time at the lower end of the axis
BELOW_LEGEND = 0.65  # part of the height that the points may have


def draw(results: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Draw ``hero-time`` and ``hero-step``, light and dark, from GPU results; return the files."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    found = {name: data for name, data in results.items() if not data["device"]["reference"]}
    panels = {
        "time": ("trainer", _trainer),
        "step": ("memory", _memory) if "memory" in found else ("frontier", _frontier),
    }
    files = []
    for title, (name, panel) in panels.items():
        for scheme, ink in INK.items() if name in found else ():
            with matplotlib.rc_context({**dict.fromkeys(INKED, ink), "font.size": 10}):
                figure, ax = pyplot.subplots(figsize=(4.9, 3.4), layout="constrained")
                panel(ax, found[name], scheme)
                ax.set_facecolor("none")
                ax.spines[["top", "right"]].set_visible(False)
                ax.set_title(found[name]["device"]["name"], fontsize=8, loc="right")
                files.append(folder / f"hero-{title}-{scheme}.png")
                figure.savefig(files[-1], dpi=160, transparent=True)
                pyplot.close(figure)
    return files


def _trainer(ax: Any, data: dict[str, Any], scheme: str) -> None:
    row = data["rows"][0]
    for method, arm in ((arm["method"], arm) for arm in row["arms"] if arm["method"] in LABELS):
        _point(ax, method, arm, scheme)
    ax.set_title(
        f"Trainer, {row['tokens']} tokens × {data['settings']['batch']}",
        fontsize=10,
        loc="left",
    )
    _axes(ax)


def _frontier(ax: Any, data: dict[str, Any], scheme: str) -> None:
    part = next(iter(data["parts"].values()))
    budgets = sorted((a["peak_bytes"], a["ratio"]) for a in part["arms"] if a["method"] == "actoffload")
    peaks, ratios = [peak / 2**30 for peak, _ in budgets], [ratio for _, ratio in budgets]
    ax.plot(peaks, ratios, MARKERS["budget"], color=COLOURS["budget"][scheme], linestyle="-", label=LABELS["budget"])
    for method in ("checkpoint", "no offload"):
        _point(ax, method, next(a for a in part["arms"] if a["method"] == method), scheme)
    settings = part["settings"]
    ax.set_title(f"{settings['layers']} Llama layers, {settings['tokens']} tokens", fontsize=10, loc="left")
    _axes(ax)


def _point(ax: Any, method: str, arm: dict[str, Any], scheme: str) -> None:
    peak, colour = arm["peak_bytes"] / 2**30, COLOURS[method][scheme]
    label = f"{LABELS[method]}: {peak:.1f} GiB, {arm['ratio']:.2f} ×"
    ax.plot(peak, arm["ratio"], MARKERS[method], color=colour, markersize=9, label=label)


def _axes(ax: Any) -> None:
    ax.set_xlim(left=0)
    highest = max(max(line.get_ydata()) for line in ax.lines)
    ax.set_ylim(LOWEST, max(1.45, LOWEST + (highest - LOWEST) / BELOW_LEGEND))
    ax.set_xlabel("peak memory (GiB)")
    ax.set_ylabel("step time, × no offload")
    ax.legend(frameon=False, fontsize=8.5, loc="upper left")


def _memory(ax: Any, data: dict[str, Any], scheme: str) -> None:
    for method, arm in data["arms"].items():
        name = "budget" if method == "actoffload" else method
        seconds, used = zip(*arm["samples"], strict=True)
        label = f"{LABELS[name]}: {arm['peak_bytes'] / 2**30:.1f} GiB"
        line = [s * 1e3 for s in seconds], [nbytes / 2**30 for nbytes in used]
        ax.plot(*line, color=COLOURS[name][scheme], marker=".", markersize=3, linewidth=1.6, label=label)
    settings = data["settings"]
    layers, tokens = settings["layers"], settings["shape"][0] * settings["shape"][1]
    ax.set_ylim(bottom=0)
    ax.set_xlabel("time in one step (ms)")
    ax.set_ylabel("device memory (GiB)")
    ax.set_title(f"{layers} Llama layers, {tokens} tokens", fontsize=10, loc="left")
    ax.legend(frameon=False, fontsize=8.5, loc="lower right")
