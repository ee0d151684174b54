"""The rows of the results, and the page, the headline and the pictures that are made of them."""

from pathlib import Path
from typing import Any

import pictures
import pytest
import report
import rows

Row = dict[str, str]


def row(job: str, arm: str, step: float | None = None, **more: Any) -> Row:
    found: Row = dict.fromkeys(rows.COLUMNS, "")
    found |= {"job": job, "arm": arm, "status": "ok", "device": "GPU", "torch": "2.11", "date": "2026-12-01T10:00"}
    found |= {"commit": "0123456789abcdef"}
    if step is not None:
        times = dict.fromkeys(("step_ms", "step_ms_low", "step_ms_high", "pass_ms"), str(step))
        found |= {**times, "ratio": str(step / 100), "peak_gib": "20", "host_forward_ms": "10"}
    return found | {key: str(value) for key, value in more.items()}


L16 = [
    row("L16", "none", status="out of memory"),
    row("L16", "checkpoint", 2000, ratio="", peak_gib=43),
    row("L16", "offload", 1500, ratio="", peak_gib=70, passes=5, startup_s=1.5, step_ms_high=1600, note="A note."),
]
BITS = [row("bits", arm, 100, same_bits="yes") for arm in ("none", "none2", "checkpoint", "offload", "budget")]
SEARCH = [
    row("context", "none", 900, tokens=8192, ratio=""),
    row("context", "checkpoint_offload", 40000, tokens=131072, ratio=""),
    row("context", "offload", 90000, tokens=262144, ratio=""),
    row("context", "offload", tokens=393216, status="out of memory"),
    row("context", "offload", 9000, tokens=32768, memory_gb=24, ratio=""),
]
P8 = [row("P8", "none", 100, peak_gib=32), row("P8", "checkpoint", 125), row("P8", "budget", 105, budget_gib=20.6)]


def test_recorded_jobs_are_taken_over_written_drawn_and_checked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, new = tmp_path / "results", tmp_path / "new"
    results.mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.MARKS[0]}old\n{report.MARKS[1]}\nafter\n")
    rows.write(
        results / "results.csv", [*P8, *L16, *BITS, *SEARCH, row("B8", "budget:20", 110), row("B8", "none", 100)]
    )
    arguments = ["--results", str(results), "--readme", str(readme)]
    assert [report.main([*arguments, *more]) for more in (["--check"], [], ["--check"])] == [1, 0, 0]
    assert readme.read_text().startswith(f"before\n{report.MARKS[0]}- **Trains what does not fit.**")
    assert readme.read_text().endswith(f"{report.MARKS[1]}\nafter\n")
    for stem in ("hero", "budgets"):
        assert (results / f"{stem}-dark.png").read_bytes().startswith(b"\x89PNG")
    sample = {"job": "T1", "series": "1", "arm": "budget", "round": 0, "status": "ok", "device": "GPU", "commit": "c"}
    sample |= {key: [0.2] for key in ("seconds", "pass_seconds", "host_seconds")}
    sample |= {"peak_bytes": 1, "values": [], "date": "2026-12-02", "report": f"pass  {'word ' * 30}"}
    rows.append(new / "samples.jsonl", sample)
    (new / "machine.txt").write_text("GPU, torch 2.11\n\ndevice  GPU\n")
    assert report.main([*arguments, "--add", str(new / "samples.jsonl")]) == 0
    assert "```text\ndevice  GPU\n```" in (results / "report.md").read_text()
    shown = (results / "report-of-a-budget.txt").read_text()
    assert max(map(len, shown.splitlines()[:-1])) <= report.COLUMNS
    assert "Recorded on 2026-12-02 from commit `c`: GPU" in shown
    assert [found["job"] for found in rows.read(results / "results.csv")].count("T1") == 1
    rows.append(new / "samples.jsonl", {**sample, "job": "P8", "device": "reference device (CPU)"})
    with pytest.raises(SystemExit, match="reference device: P8"):
        report.main([*arguments, "--add", str(new / "samples.jsonl")])


def test_what_is_committed_is_that_of_the_results() -> None:
    assert report.main(["--check"]) == 0
    assert {found["job"] for found in rows.read()} <= set(report.JOBS)
    assert set(pictures.HERO) <= set(report.JOBS)


# Rows


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


def test_bits_are_compared_with_no_offload_or_else_with_checkpointing() -> None:
    samples = [sample("none", [1.0]), sample("budget", [1.0]), sample("budget", [1.0], 1, values=["0x1p+1"])]
    deterministic = [{**s, "job": "bits"} for s in samples]
    assert [row["same_bits"] for row in rows.summarize(deterministic)] == ["yes", "no"]
    assert [row["same_bits"] for row in rows.summarize(samples)] == ["yes", ""]
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
