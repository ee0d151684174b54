"""The picture of the comparison: step time and peak memory by the number of offloaded layers."""

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
