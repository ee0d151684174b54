"""The page, the headline and the pictures, made of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_run
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


def test_the_section_of_a_job() -> None:
    text = report.section("L16", L16)
    assert "## Llama 8B LoRA, 16k" in text
    lines = text.splitlines()
    assert "| method | step (ms) | × checkpointing | peak (GiB) |" in lines
    assert "| no offload | out of memory |  |  |" in lines
    assert "| offload(model) | 1500.0 (1500.0 to 1600.0) | 0.750 | 70.00 |" in lines
    assert "| method | host, forward (ms) | passes | start-up (s) |" in lines
    assert "| offload(model) | 10.0 | 5 | 1.5 |" in lines
    assert "offload(model): A note. Recorded on 2026-12-01 from commit `0123456789ab`: GPU, torch 2.11." in text


def test_notes_that_all_rows_have_come_once() -> None:
    found = [row("P8", "none", 1, note="Busy."), row("P8", "budget", 1, note="Busy. Old.")]
    assert report.notes(found) == ["Busy.", "offload(model, memory_budget): Old."]


def test_predictions_are_shown_as_differences() -> None:
    found = row("P8", "budget:15.4", 100, predicted_peak_gib=20.2, predicted_pass_ms=97)
    (line,) = report.job_table(report.DETAILS, [found]).splitlines()[2:]
    assert line.startswith("| offload(model, memory_budget) of 15.4 GiB |")
    assert line.endswith("| +1.0 % | -3.0 % |")


def test_drops_by_rank_beside_those_of_the_plan() -> None:
    none = row("E4", "none", 100, rank_peaks_gib="16.5 12", peak_gib=16.5)
    ours = row("E4", "qkv", 100.3, rank_peaks_gib="15.5 11.502", rank_drops_gib="1 0.5")
    kept = row("E4", "offload", 100, rank_peaks_gib="16.5 12", rank_drops_gib="0 0")
    assert report.rank_table([none, kept]) == report.rank_table([ours]) == ""
    lines = report.section("E4", [none, ours]).splitlines()
    arm = 'offload(layers="*.qkv", fraction=1.0)'
    assert f"| {arm} | 0 | 16.50 | 15.50 | 1.000 | 1.000 | 100.00 % |" in lines
    assert f"| {arm} | 1 | 12.00 | 11.50 | 0.498 | 0.500 | 99.60 % |" in lines


def test_copies_of_all_gpus_beside_those_of_one(tmp_path: Path) -> None:
    assert report.link_table(tmp_path) == ""
    rates = {"d2h_alone": 55e9, "d2h": 38e9, "h2d_alone": 55.5e9, "h2d": 37.94e9}
    links = {**row("links", ""), "ranks": [{"rank": rank, **rates} for rank in range(2)]}
    (tmp_path / "links.json").write_text(json.dumps(links))
    text = report.page([], tmp_path)
    assert "| 1 | 55.0 | 38.0 | 55.5 | 37.9 |" in text
    assert "from commit `0123456789ab`" in text


def test_the_longest_sequences_in_all_memory_and_in_parts() -> None:
    first, _, second = report.search_tables(SEARCH)
    assert "| offload(model) | 262,144 | 90.0 | 2,913 | 20 |" in first
    assert "32,768" not in first
    assert second.splitlines()[0] == "| memory | no offload | checkpointing, inputs offloaded | offload(model) |"
    assert "| 24 GB | 0 | 0 | 32,768 |" in second


def test_the_headline_says_most_with_what_is_recorded() -> None:
    assert report.headline([]) == "No results are recorded yet."
    found = report.headline(P8)
    assert "Trains" not in found
    assert "in 1 of 1 jobs shown, at its memory: 0.84 to 0.84" in found
    assert "all memory of the GPU" not in found
    assert "bits" not in found
    found = report.headline([*P8, *L16, *BITS])
    assert "in 2 of 2 jobs shown, at its memory: 0.75 to 0.84" in found
    assert "A job that runs out of memory without offload has all memory of the GPU." in found
    assert "**Same bits.**" in found
    assert "Recorded on GPU, 2026-12-01." in found
    found = report.headline([*L16, *SEARCH])
    assert "256k tokens, 8k with no offload, 128k with checkpointing, inputs offloaded" in found
    assert "Slower" not in found
    e4 = [row("E4", "none", 100), row("E4", "checkpoint", 120), row("E4", "budget", 150)]
    assert "Slower than checkpointing: Experts in a pipeline on four GPUs, 1.25 ×." in report.headline([*P8, *e4])
    assert "bits" not in report.headline([*P8, *BITS[:-1], row("bits", "budget", 100, same_bits="no")])


def test_the_overview_takes_the_default_where_nothing_else_fits() -> None:
    lines = report.overview(report.by_job([*P8, *L16, *SEARCH])).splitlines()[2:]
    assert lines == [
        "| Llama 8B LoRA, 16k | out of memory | 2000 ms, 43.0 GiB | 1500 ms, 70.0 GiB | 0.750 |",
        "| 16 layers, 8k | 100 ms, 32.0 GiB | 125 ms, 20.0 GiB | 105 ms, 20.0 GiB | 0.840 |",
    ]


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


# The script for tests and gallery on a GPU machine


def test_gpu_run_chooses_steps_stops_them_and_reads_outcomes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    known = gpu_run.steps(tmp_path, select="pool")
    assert [step.name for step in gpu_run.chosen("gallery,tests,gallery", known)] == ["gallery", "tests"]
    assert known["tests"].command[-2:] == ("-k", "pool")
    with pytest.raises(SystemExit, match="no step nonsense"):
        gpu_run.chosen("tests,nonsense", known)
    log = tmp_path / "run.log"
    asleep = gpu_run.Step("asleep", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 3)
    failing = gpu_run.Step("failing", ("-c", "raise SystemExit(4)"), 60)
    outcomes = gpu_run.run_steps([asleep, failing], log, 60)
    assert [(o.status, o.last_lines) for o in outcomes] == [("stopped after 3 s", ("begun",)), ("exit status 4", ())]
    gpu_run.summary(outcomes, tmp_path)
    assert "stopped after 3 s" in capfd.readouterr().out
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite time="2.5"><testcase classname="tests.gpu.test_a" name="b[1]" time="1"/>'
        '<testcase classname="tests.gpu.test_a" name="c" time="2.5"><failure message="assert 1 ==\n 2"/></testcase>'
        '<testcase classname="tests.gpu.test_a" name="d"><skipped message="two devices"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert gpu_run.failures(path) == ["c (2.5 s): assert 1 == 2"]
    found = gpu_run.test_outcomes(path)
    assert found["counts"] == {"passed": 1, "failure": 1, "error": 0, "skipped": 1}
    gpu_run.write_test_outcomes(tmp_path, "pool")
    assert "--select pool" in (tmp_path / "gpu-tests.json").read_text()
