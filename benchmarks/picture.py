"""Pictures of the results: step time and peak memory by the number of offloaded layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's palette, dark enough for white; told apart without colour by their markers.
STYLE = {
    "actoffload": ("actoffload", "#0072b2", "o-"),
    "checkpoint": ("checkpoint", "#d55e00", "s--"),
    "save_on_cpu": ("save_on_cpu, pinned", "#b8659a", "^:"),
}


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw one result into a file.

    Parameters
    ----------
    data : dict
        A result of ``compare.py``.
    path : Path
        With the suffix of an image format.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    none = next(a for a in data["arms"] if not a["num_layers"])
    figure, (times, peaks) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for method, (label, colour, style) in STYLE.items():
        arms = sorted((a for a in data["arms"] if a["method"] == method), key=lambda a: a["num_layers"])
        if not arms:
            continue
        counts = [0, *(a["num_layers"] for a in arms)]
        times.plot(counts, [1.0, *(a["ratio"] for a in arms)], style, color=colour, label=label)
        levels = [none["peak_bytes"], *(a["peak_bytes"] for a in arms)]
        peaks.plot(counts, [level / 2**30 for level in levels], style, color=colour, label=label)
    times.axhline(1.0, color="#808080", linewidth=0.8)
    layers = data["settings"]["layers"]
    for ax, title in ((times, "step time, × no offload"), (peaks, "peak memory (GiB)")):
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel(f"layers offloaded, of {layers}")
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(bottom=0)
    times.legend(frameon=False, fontsize=8)
    figure.suptitle(data["device"]["name"], fontsize=9, x=0.995, ha="right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_llama(data: dict[str, Any], path: Path) -> None:
    """Draw step times and bounds of the Llama benchmark into a file, one panel for each length.

    Parameters
    ----------
    data : dict
        A result of ``llama.py``.
    path : Path
        With the suffix of an image format.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    parts = {name: part for name, part in data["parts"].items() if "arms" in part}
    figure, panels = pyplot.subplots(1, max(1, len(parts)), figsize=(9, 3.4), layout="constrained", squeeze=False)
    for ax, (name, part) in zip(panels[0], parts.items(), strict=False):
        arms = sorted((a for a in part["arms"] if a["num_layers"]), key=lambda a: a["num_layers"])
        counts = [a["num_layers"] for a in arms]
        bounds = [a["bound_seconds"] / sum(a["compute"].values()) for a in arms]
        label, colour, style = STYLE["actoffload"]
        ax.plot([0, *counts], [1.0, *bounds], color="#606060", linewidth=1.0, label="bound, from compute and link")
        ax.fill_between([0, *counts], [1.0, *bounds], color="#ececec")
        ax.plot([0, *counts], [1.0, *(a["ratio"] for a in arms)], style, color=colour, label=label)
        last = max((a["num_layers"] for a in arms if a["fits"]), default=None)
        if last is not None:
            ax.plot([last + 0.5] * 2, [0.0, 1.0], color="#606060", linewidth=0.8, linestyle=":")
            ax.text(last + 0.4, 0.05, "← copies fit", fontsize=8, ha="right", color="#404040")
        ax.set_title(f"{name} tokens: step time, × no offload", fontsize=10, loc="left")
        ax.set_xlabel(f"layers offloaded, of {part['settings']['layers']}")
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xticks([0, *counts])
        ax.set_ylim(0, 1.25 * max(a["ratio"] for a in arms))  # room for the legend
    panels[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(data["device"]["name"], fontsize=9, x=0.995, ha="right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
