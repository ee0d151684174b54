"""The part of the page about ranks: targets, and a table for each way to train in parallel."""

from __future__ import annotations

from page import PAGE, Data, fill, origin, table, target, text

__all__ = ["sections", "targets"]

CHECKPOINT, BUDGET, DEFAULT, LAYERS = "checkpoint", "budget", "default", "num_layers"
COLLECTIVES = "collectives"
DIFFERS = 0.03  # of a step: by more, the page says that the prediction is off


def targets(data: Data) -> list[Data]:
    """Return the lines of the targets whose figures were measured."""
    found: list[Data] = []
    for name, part in data["parts"].items():
        if name == COLLECTIVES:
            beside = [row for row in part["rows"] if not row["beside"].startswith("alone")]
            worst = max(beside, key=lambda row: float(row["ratio"]))
            found.append(target("collectives", worst["ratio"], **worst))
            continue
        stack = _stack(name, part)
        rows = {(row["method"], row["num_layers"]): row for row in part["rows"]}
        two, default = rows.get((LAYERS, 2)), rows.get((DEFAULT, None))
        if two is not None:
            found.append(target("ranks", two["ratio"], stack=stack, how="2 layers offloaded"))
        if default is not None:
            found.append(target("ranks", default["ratio"], stack=stack, how="`offload(model)`"))
        for row in part["rows"]:
            if row["method"] == BUDGET:
                share = (row["ratio"] - 1) / (rows[CHECKPOINT, None]["ratio"] - 1)
                found.append(target("share", share, stack=stack, gib=row["budget"]))
    return found


def sections(data: Data) -> list[str]:
    """Return the section of all parts."""
    found = ["## Several GPUs", text("ranks")]
    for name, part in data["parts"].items():
        if name == COLLECTIVES:
            found += [f"### {PAGE['names']['ranks'][name]}", text("collectives", **part)]
            found.append(table("collectives", map(_known, part["rows"])))
            continue
        _, tokens, hidden = part["settings"]["shape"]
        found += [f"### {_stack(name, part)}", text("ranks_part", **part, tokens=tokens, hidden=hidden)]
        found.append(table("ranks", (_row(row) for row in part["rows"])))
        if f"ranks_{name}" in PAGE["text"]:
            found.append(text(f"ranks_{name}"))
        longer = [row for row in part["rows"] if "predicted" in row and row["ratio"] - row["predicted"] > DIFFERS]
        if counts := [str(row["num_layers"]) for row in longer if row["method"] == LAYERS]:
            worst = max((row["ratio"] for row in data["parts"].get(COLLECTIVES, {"rows": []})["rows"]), default=1.0) - 1
            found.append(text("ranks_differs", layers=" and ".join(counts), worst=worst))
        plans = [row for row in part["rows"] if row["method"] in (DEFAULT, BUDGET)]
        for row in plans:
            found += [text("ranks_plan", method=_name(row)), f"```text\n{row['plan']}\n```"]
    return [*found, origin(data)]


def _stack(name: str, part: Data) -> str:
    return f"{PAGE['names']['ranks'][name]}, {part['settings']['layers']} layers on {part['world']} GPUs"


def _name(row: Data) -> str:
    name = str(PAGE["names"]["ranks_methods"].get(row["method"], row["method"]))
    return name if row["budget"] is None else fill("{} of {:GiB.2} GiB", name, row["budget"])


def _known(row: Data) -> Data:
    """Return a row without what is not known, whose cells stay empty."""
    return {key: value for key, value in row.items() if value is not None}


def _row(row: Data) -> Data:
    """Return a row of the table: the values of all ranks in one cell."""
    shown = {**_known(row), "name": _name(row), "low": min(row["samples"]), "high": max(row["samples"])}
    for key, form in (("peak_bytes", "{:GiB.2}"), ("bytes_offloaded", "{:GiB.2}"), ("stall_seconds", "{:ms.1}")):
        values = [value for value in row.get(key, ()) if value is not None]
        if values:
            shown[f"{key}_of_ranks"] = _each(values, form)
    return shown


def _each(values: list[float], form: str) -> str:
    """Return the values of the ranks, once if all are shown the same."""
    texts = [fill(form, value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
