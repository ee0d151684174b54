"""Rows of the results: medians, spreads, ratios, peaks, and what replaces what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rows

GIB = 2**30


def sample(arm: str, seconds: list[float], number: int = 0, **more: Any) -> dict[str, Any]:
    base = {"job": "P8", "series": "1", "arm": arm, "round": number, "status": "ok", "seconds": seconds}
    base |= {"pass_seconds": seconds, "host_seconds": [s / 2 for s in seconds], "values": ["0x1p+0"]}
    return {**base, "peak_bytes": 2 * GIB, "highest_bytes": 3 * GIB, **more}


def test_times_are_medians_of_the_rounds_and_ratios_are_to_no_offload_of_the_same_round() -> None:
    samples = [sample("none", [1.0, 1.1, 9.0]), sample("none2", [1.3, 1.3]), sample("budget", [2.4, 2.4])]
    samples += [sample("none", [2.0], 1), sample("none2", [2.0], 1), sample("budget", [3.0], 1)]
    none, again, budget = rows.summarize(samples)
    assert (none["step_ms"], none["step_ms_low"], none["step_ms_high"]) == ("1550", "1100", "2000")
    assert (budget["step_ms"], budget["rounds"], budget["host_forward_ms"]) == ("2700", "2", "1350")
    assert (budget["ratio"], budget["ratio_low"], budget["ratio_high"]) == ("1.75", "1.5", "2")
    assert float(none["ratio"]) + float(again["ratio"]) == pytest.approx(2.0)
    assert (budget["peak_gib"], budget["highest_gib"], budget["passes"]) == ("2", "3", "")


def test_the_spread_of_one_round_is_that_of_its_steps() -> None:
    (row,) = rows.summarize([sample("offload", [3.0, 1.0, 2.0], passes=5, startup_seconds=1.5, kernel_seconds=0.25)])
    assert (row["step_ms"], row["step_ms_low"], row["step_ms_high"], row["ratio"]) == ("2000", "1000", "3000", "")
    assert (row["passes"], row["startup_s"], row["kernel_ms"]) == ("5", "1.5", "250")


def test_predictions_and_budgets_have_their_units() -> None:
    more = {"predicted_bytes": GIB, "predicted_seconds": 0.5, "budget_bytes": 4 * GIB}
    (row,) = rows.summarize([sample("budget", [1.0], **more)])
    assert (row["predicted_peak_gib"], row["predicted_pass_ms"], row["budget_gib"]) == ("1", "500", "4")


def test_ranks_have_a_value_each() -> None:
    ranks = [{"peak_bytes": GIB, "drop_bytes": GIB // 2}, {"peak_bytes": 2 * GIB}]
    higher = [{**rank, "peak_bytes": rank["peak_bytes"] + GIB} for rank in ranks]
    samples = [sample("qkv", [1.0], ranks=ranks), sample("qkv", [1.0], 1, ranks=higher), sample("none", [1.0])]
    row, none = rows.summarize(samples)
    assert (row["rank_peaks_gib"], row["rank_drops_gib"]) == ("2 3", "")
    assert none["rank_peaks_gib"] == ""


def test_bits_are_compared_with_no_offload_or_else_with_checkpointing() -> None:
    samples = [sample("none", [1.0]), sample("budget", [1.0]), sample("budget", [1.0], 1, values=["0x1p+1"])]
    assert [row["same_bits"] for row in rows.summarize(samples)] == ["yes", "no"]
    failed = {"job": "L16", "series": "1", "arm": "none", "round": 0, "status": "out of memory", "note": "of the host"}
    of_job = [failed, *({**s, "job": "L16"} for s in (sample("checkpoint", [1.0]), sample("offload", [1.0])))]
    found = rows.summarize(of_job)
    assert [(row["status"], row["same_bits"]) for row in found] == [("out of memory", ""), ("ok", "yes"), ("ok", "yes")]
    assert (found[0]["note"], found[0]["step_ms"], found[1]["ratio"]) == ("of the host", "", "")


def test_an_arm_that_was_begun_and_not_ended_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for line in (sample("none", [1.0], series="0"), {**sample("none", [2.0]), "note": "a"}, sample("none2", [2.0])):
        rows.append(path, line)
    rows.append(path, {"job": "P8", "series": "1", "arm": "budget", "round": 0, "status": "begun"})
    with path.open("a") as file:
        file.write('{"job": "P8", "torn')
    found = rows.summarize(rows.samples_of(path))
    assert [(row["arm"], row["status"], row["step_ms"]) for row in found] == [
        ("none", "ok", "2000"),  # the earlier run of the job is left out
        ("none2", "ok", "2000"),
        ("budget", "stopped", ""),
    ]


def test_an_arm_that_is_measured_again_replaces_its_rows(tmp_path: Path) -> None:
    old = rows.summarize([sample("none", [1.0]), sample("budget", [1.0]), sample("none", [1.0], job="T1")])
    old += rows.summarize([sample("offload", [1.0], job="context", tokens=1024, memory_gb=24.0)])
    new = rows.summarize([sample("none", [2.0]), sample("offload", [1.0], job="context", tokens=2048)])
    merged = rows.merge(old, new)
    assert [(row["job"], row["arm"], row["step_ms"], row["tokens"], row["memory_gb"]) for row in merged] == [
        ("P8", "budget", "1000", "", ""),
        ("T1", "none", "1000", "", ""),
        ("context", "offload", "1000", "1024", "24"),
        ("P8", "none", "2000", "", ""),
        ("context", "offload", "1000", "2048", ""),
    ]
    rows.write(tmp_path / "results.csv", merged)
    assert rows.read(tmp_path / "results.csv") == merged
    (tmp_path / "older.csv").write_text("job,arm\nP8,none\n")
    assert rows.read(tmp_path / "older.csv")[0]["rank_peaks_gib"] == ""
    assert rows.read(tmp_path / "none.csv") == []
