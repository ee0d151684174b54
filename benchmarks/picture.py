"""Pictures of the results: time against peak, and step time by the number of offloaded layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from hero import INK, INKED

# Okabe and Ito's palette, dark enough for white; told apart without colour by their markers.
WAYS = {
    "actoffload": ("offload(model, memory_budget)", "#0072b2", "o-"),
    "default": ("offload(model)", "#009e73", "*"),
    "layers": ("offload(model, num_layers)", "#56b4e9", "v:"),
    "no offload": ("no offload", "", "D"),
    "checkpoint": ("activation checkpointing", "#d55e00", "s"),
    "selective": ("selective checkpointing", "#e69f00", "P"),
    "save_on_cpu": ("save_on_cpu, pinned", "#b8659a", "^"),
}
HIGHEST = 1.4  # ratio; slower arms are left out of the picture


def draw(results: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draw ``frontier-light.png``, ``frontier-dark.png`` and ``llama.png`` into a folder."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    for scheme, ink in INK.items() if "frontier" in results else ():
        with matplotlib.rc_context(dict.fromkeys(INKED, ink)):
            figure = _frontier(results["frontier"], pyplot, ink)
            figure.savefig(folder / f"frontier-{scheme}.png", dpi=150, transparent=True)

    if "llama" in results:
        _llama(results["llama"], pyplot).savefig(folder / "llama.png", dpi=150)
    pyplot.close("all")


def _frontier(data: dict[str, Any], pyplot: Any, ink: str) -> Any:
    parts = list(data["parts"].values())
    rows = math.ceil(len(parts) / 2)
    figure, axes = pyplot.subplots(
        rows, 2, figsize=(8.4, 0.7 + 2.7 * rows), layout="constrained", sharey=True, squeeze=False
    )
    for ax in axes.flat[len(parts) :]:
        ax.set_visible(False)
    labels = {}
    for ax, part in zip(axes.flat, parts, strict=False):
        for method, (label, colour, style) in WAYS.items():
            arms = [a for a in part["arms"] if a["method"] == method and a["ratio"] <= HIGHEST]
            arms.sort(key=lambda a: float(a["peak_bytes"]))
            peaks = [a["peak_bytes"] / 2**30 for a in arms]
            if arms:
                (labels[label],) = ax.plot(peaks, [a["ratio"] for a in arms], style, color=colour or ink, markersize=5)
        settings = part["settings"]
        ax.axhline(1.0, color="#808080", linewidth=0.8)
        kind = "compiled layers" if part["compiled"] else "layers"
        ax.set_title(f"{settings['layers']} {kind}, {settings['tokens']} tokens", fontsize=10, loc="left")
        ax.set_xlim(left=0)
        ax.set_ylim(0.97, HIGHEST)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("step time, × no offload")
    for ax in axes[-1]:
        ax.set_xlabel("peak memory (GiB)")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    devices = dict.fromkeys(part.get("device", data["device"])["name"] for part in parts)
    figure.suptitle(", ".join(devices), fontsize=9, x=0.995, ha="right")
    return figure


def _sorted(arms: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return sorted((a for a in arms if a["method"] == method), key=lambda a: int(a["num_layers"]))


def _llama(data: dict[str, Any], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    label, colour, style = "actoffload", "#0072b2", "o-"
    parts = {name: part for name, part in data["parts"].items() if "arms" in part}
    for ax, (name, part) in zip(axes, parts.items(), strict=False):
        arms = _sorted(part["arms"], "actoffload")
        counts = [0, *(a["num_layers"] for a in arms)]
        bounds = [1.0, *(a["bound_seconds"] / sum(a["compute"].values()) for a in arms)]
        ax.plot(counts, bounds, color="#606060", linewidth=1.0, label="bound, from compute and link")
        ax.fill_between(counts, bounds, color="#ececec")
        ax.plot(counts, [1.0, *(a["ratio"] for a in arms)], style, color=colour, label=label)
        last = max((a["num_layers"] for a in arms if a["fits"]), default=None)
        if last is not None:
            ax.plot([last + 0.5] * 2, [0.0, 1.0], color="#606060", linewidth=0.8, linestyle=":")
            ax.text(last + 0.4, 0.05, "← copies fit", fontsize=8, ha="right", color="#404040")
        ax.set_title(f"{name} tokens: step time, × no offload", fontsize=10, loc="left")
        ax.set_xlabel(f"layers offloaded, of {part['settings']['layers']}")
        ax.set_ylim(0, 1.25 * max(a["ratio"] for a in arms))  # room for the legend
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(data["device"]["name"], fontsize=9, x=0.995, ha="right")
    return figure
