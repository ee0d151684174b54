"""Pictures of the results: step time and peak memory by the number of offloaded layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

# Okabe and Ito's palette, dark enough for white; told apart without colour by their markers.
STYLE = {
    "actoffload": ("actoffload", "#0072b2", "o-"),
    "checkpoint": ("checkpoint", "#d55e00", "s--"),
    "save_on_cpu": ("save_on_cpu, pinned", "#b8659a", "^:"),
}


WAYS = {
    "actoffload": ("memory_budget", "#0072b2", "o-"),
    "layers": ("num_layers", "#56b4e9", "v:"),
    "no offload": ("no offload", "#404040", "D"),
    "checkpoint": ("activation checkpointing", "#d55e00", "s"),
    "selective": ("selective checkpointing", "#e69f00", "P"),
    "save_on_cpu": ("save_on_cpu, pinned", "#b8659a", "^"),
}
HIGHEST = 2.5  # ratio; slower arms are left out of the picture


def draw(results: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draw ``frontier.png``, ``compare.png`` of the GPT benchmark and ``llama.png`` into a folder."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    if "frontier" in results:
        _frontier(results["frontier"], pyplot).savefig(folder / "frontier.png", dpi=150)

    for name, panels in (("gpt", _compare), ("llama", _llama)):
        if name not in results:
            continue
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        panels(results[name], axes)
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_ylim(bottom=0)
        axes[0].legend(frameon=False, fontsize=8)
        figure.suptitle(results[name]["device"]["name"], fontsize=9, x=0.995, ha="right")
        figure.savefig(folder / {"gpt": "compare.png", "llama": "llama.png"}[name], dpi=150)
        pyplot.close(figure)


def _frontier(data: dict[str, Any], pyplot: Any) -> Any:
    parts = data["parts"]
    figure, axes = pyplot.subplots(1, len(parts), figsize=(3.4 * len(parts), 3.3), layout="constrained", squeeze=False)
    for ax, part in zip(axes[0], parts.values(), strict=True):
        for method, (label, colour, style) in WAYS.items():
            arms = [a for a in part["arms"] if a["method"] == method and a["ratio"] <= HIGHEST]
            arms.sort(key=lambda a: float(a["peak_bytes"]))
            peaks = [a["peak_bytes"] / 2**30 for a in arms]
            ax.plot(peaks, [a["ratio"] for a in arms], style, color=colour, label=label, markersize=5)
        settings = part["settings"]
        ax.axhline(1.0, color="#808080", linewidth=0.8)
        kind = "compiled layers" if part["compiled"] else "layers"
        ax.set_title(f"{settings['layers']} {kind}, {settings['tokens']} tokens", fontsize=9, loc="left")
        ax.set_xlabel("peak memory (GiB)")
        ax.set_xlim(left=0)
        ax.set_ylim(0.9, None)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("step time, × no offload")
    axes[0][0].legend(frameon=False, fontsize=7)
    figure.suptitle(data["device"]["name"], fontsize=9, x=0.995, ha="right")
    return figure


def _sorted(arms: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return sorted((a for a in arms if a["method"] == method), key=lambda a: int(a["num_layers"]))


def _compare(data: dict[str, Any], axes: Any) -> None:
    none = next(a for a in data["arms"] if not a["num_layers"])
    for method, (label, colour, style) in STYLE.items():
        arms = [none, *_sorted(data["arms"], method)]
        counts = [a["num_layers"] for a in arms]
        axes[0].plot(counts, [a["ratio"] for a in arms], style, color=colour, label=label)
        axes[1].plot(counts, [a["peak_bytes"] / 2**30 for a in arms], style, color=colour)
    axes[0].axhline(1.0, color="#808080", linewidth=0.8)
    for ax, title in zip(axes, ("step time, × no offload", "peak memory (GiB)"), strict=True):
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel(f"layers offloaded, of {data['settings']['layers']}")


def _llama(data: dict[str, Any], axes: Any) -> None:
    label, colour, style = STYLE["actoffload"]
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
