"""The part of the page of benchmarks that is about pipelines: targets, and a table of phases and one of ranks."""

from __future__ import annotations

from page import PAGE, Data, origin, table, target, text

__all__ = ["pipelines_sections", "pipelines_targets"]

NOTHING, OURS, BUDGET = "no offload", "actoffload", "budget"
DIFFERS = 0.03  # of a step: by more, the page says that the simulation is off


def _title(name: str, part: Data) -> str:
    kind = "mixture of experts, " if part["mixture"] else ""
    return f"{part['schedule'].removeprefix('Schedule')}, {kind}{part['world']} GPUs"


def _arm(part: Data, method: str) -> Data:
    found: Data = next(arm for arm in part["arms"] if arm["method"] == method)
    return found


def pipelines_targets(data: Data) -> list[Data]:
    """Return the lines of the targets of all pipelines."""
    found: list[Data] = []
    for name, part in data["parts"].items():
        title, free, limited = _title(name, part), _arm(part, OURS), _arm(part, BUDGET)
        found.append(target("pipeline", free["ratio"], part=title))
        parts = [row["r"] for row in free["ranks"] if "r" in row]
        if parts:
            found.append(target("pipeline_r", min(parts), part=title))
        without, peak = (max(row[key] for row in limited["ranks"]) for key in ("peak_without", "peak_bytes"))
        found.append(target("pipeline_drop", 1 - peak / without, part=title))
        found.append(target("pipeline_budget", limited["ratio"], part=title))
        distances = [arm["seconds"] / of["seconds"] - 1 for arm in (free, limited) if (of := _predicted(arm))]
        if distances:
            found.append(target("pipeline_predicted", max(map(abs, distances)), part=title))
    return found


def _predicted(arm: Data) -> Data:
    """Return what is simulated for all ranks; empty for a phase without offload."""
    found: Data = arm["ranks"][0].get("predicted", {})
    return found


def pipelines_sections(data: Data) -> list[str]:
    """Return the section of pipelines."""
    found = ["## Pipelines", text("pipelines")]
    for name, part in data["parts"].items():
        names = PAGE["names"]["pipelines"]
        arms = [{**arm, "name": names[arm["method"]]} for arm in part["arms"]]
        words = text("pipelines_mixture" if part["mixture"] else "pipelines_dense", **part)
        found += [f"### {_title(name, part)}", words]
        phases = ({**arm, **({"predicted": of} if (of := _predicted(arm)) else {})} for arm in arms)
        found.append(table("pipelines", phases))
        offloaded = [arm for arm in arms if arm["method"] in (OURS, BUDGET)]
        rows = (
            {**row, "rank": rank, "name": arm["name"]} for arm in offloaded for rank, row in enumerate(arm["ranks"])
        )
        found.append(table("pipeline_ranks", rows))
        for arm in offloaded:
            distance = arm["seconds"] / of["seconds"] - 1 if (of := _predicted(arm)) else 0.0
            found += [text("pipelines_differs", phase=arm["name"], distance=distance)] if distance > DIFFERS else []
        found += [
            text("pipelines_because", phase=arm["name"], because=of) for arm in offloaded if (of := arm.get("because"))
        ]
    return [*found, origin(data)]
