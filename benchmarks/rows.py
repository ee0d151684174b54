"""Samples and rows of the results: a row of the CSV file summarizes the samples of one arm.

A job writes each sample as a line of JSON, at once. The summary needs neither torch nor the library.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

__all__ = ["COLUMNS", "RESULTS", "Row", "append", "merge", "read", "samples_of", "summarize", "write"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
NOTHING = "none", "none2"
KEY = "job", "memory_gb", "tokens", "arm"
"""What the samples of one row have in common."""
ORIGIN = "device", "driver", "torch", "python", "transformers", "commit", "date", "command"
COLUMNS = (
    *("job", "arm", "tokens", "memory_gb", "status", "rounds"),
    *("step_ms", "step_ms_low", "step_ms_high", "ratio", "ratio_low", "ratio_high", "peak_gib", "highest_gib"),
    *("pass_ms", "kernel_ms", "host_forward_ms", "passes", "startup_s"),
    *("budget_gib", "predicted_peak_gib", "predicted_pass_ms", "same_bits", "note", *ORIGIN),
    *("rank_peaks_gib", "rank_drops_gib"),
)
"""Columns of the CSV file.

A step is from the end of one step to that of the next, a pass its forward and backward. Low and high are the extremes
of the rounds, or of the steps of the only round. A ratio is to the mean of both arms without offload in the same round.
The highest peak is that of all steps, also of those in which the plan is not final.
Columns of ranks have a value for each, with spaces between: the peak, and by how much the plan lowers it in the
simulation.
"""

FIGURES: dict[str, tuple[str, float, Callable[..., float]]] = {
    "peak_gib": ("peak_bytes", 1 / GIB, max),
    "highest_gib": ("highest_bytes", 1 / GIB, max),
    "budget_gib": ("budget_bytes", 1 / GIB, max),
    "predicted_peak_gib": ("predicted_bytes", 1 / GIB, max),
    "predicted_pass_ms": ("predicted_seconds", 1e3, median),
    "kernel_ms": ("kernel_seconds", 1e3, median),
    "passes": ("passes", 1, max),
    "startup_s": ("startup_seconds", 1, max),
}
"""Columns by what they are of each sample, its unit, and what is taken of all rounds."""
OF_RANKS = {"rank_peaks_gib": "peak_bytes", "rank_drops_gib": "drop_bytes"}
"""Columns with a value for each rank, the largest of all rounds."""

Row: TypeAlias = dict[str, str]
"""A row of the CSV file; what was not measured is empty."""


def append(path: Path, sample: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(sample) + "\n")


def samples_of(path: Path) -> list[dict[str, Any]]:
    """Return the samples in a file of JSON lines, of each job those of its last run; a torn last line is left out."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    last = {(sample["job"], sample.get("memory_gb")): sample["series"] for sample in found}
    return [sample for sample in found if sample["series"] == last[sample["job"], sample.get("memory_gb")]]


def summarize(samples: Iterable[dict[str, Any]]) -> list[Row]:
    """Return a row for each arm of each job, in the order in which they were first begun."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample.get(key) for key in KEY), []).append(sample)
    ended = {key: [s for s in group if s["status"] != "begun"] for key, group in groups.items()}
    good = {key: [s for s in group if s["status"] == "ok"] for key, group in groups.items()}
    baselines: dict[tuple[Any, ...], list[float]] = {}
    for (*job, arm), group in good.items():
        for sample in group if arm in NOTHING else ():
            baselines.setdefault((*job, sample["round"]), []).append(median(sample["seconds"]))
    rows = []
    for key, group in groups.items():
        reference = next(filter(None, (good.get((*key[:-1], name)) for name in ("none", "checkpoint"))), [])
        rows.append(_row(ended[key] or [{**group[-1], "status": "stopped"}], good[key], baselines, reference))
    return rows


def _row(
    group: Sequence[dict[str, Any]],
    good: Sequence[dict[str, Any]],
    baselines: dict[tuple[Any, ...], list[float]],
    reference: Sequence[dict[str, Any]],
) -> Row:
    last = group[-1]
    row: dict[str, Any] = {key: last.get(key) for key in (*KEY, *ORIGIN)}
    row["status"] = last["status"]
    row["note"] = " ".join(dict.fromkeys(filter(None, (sample.get("note", "") for sample in group))))
    if good:
        row |= _times(good, baselines)
        for column, (key, scale, of_rounds) in FIGURES.items():
            figures = [sample[key] * scale for sample in good if sample.get(key) is not None]
            row[column] = of_rounds(figures) if figures else None
        for column, key in OF_RANKS.items():
            rounds = [[rank.get(key) for rank in sample.get("ranks", ())] for sample in good]
            if all(of_round and None not in of_round for of_round in rounds):
                row[column] = " ".join(_text(max(values) / GIB) for values in zip(*rounds, strict=True))
        wanted = reference[0]["values"] if reference else []
        if wanted and good[0]["values"]:
            # Kernels that add in any order differ without offload too, so only deterministic ones can say "no".
            same = all(sample["values"] == wanted for sample in good)
            row["same_bits"] = "yes" if same else "no" if row["job"] == "bits" else ""
    return {column: _text(row.get(column)) for column in COLUMNS}


def _times(good: Sequence[dict[str, Any]], baselines: dict[tuple[Any, ...], list[float]]) -> dict[str, Any]:
    each = [median(sample["seconds"]) for sample in good]
    spread = each if len(good) > 1 else good[0]["seconds"]
    row: dict[str, Any] = {
        "rounds": len(good),
        "step_ms": median(each) * 1e3,
        "step_ms_low": min(spread) * 1e3,
        "step_ms_high": max(spread) * 1e3,
        "pass_ms": median(median(sample["pass_seconds"]) for sample in good) * 1e3,
        "host_forward_ms": median(median(sample["host_seconds"]) for sample in good) * 1e3,
    }
    ratios = []
    for sample, seconds in zip(good, each, strict=True):
        nothing = baselines.get((*(sample.get(key) for key in KEY[:-1]), sample["round"]))
        ratios += [seconds * len(nothing) / sum(nothing)] if nothing else []
    if ratios:
        row |= {"ratio": median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    return row


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def read(path: Path = RESULTS / "results.csv") -> list[Row]:
    """Return the rows of a CSV file; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{column: row.get(column, "") for column in COLUMNS} for row in csv.DictReader(file)]


def write(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def merge(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return earlier rows in which those of each arm of a job that was measured again are replaced."""
    again = {(row["job"], row["memory_gb"], row["arm"]) for row in rows}
    again |= {(job, memory, "none2") for job, memory, arm in again if arm == "none"}  # says how those two differ
    return [row for row in earlier if (row["job"], row["memory_gb"], row["arm"]) not in again] + list(rows)
