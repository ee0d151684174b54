from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import gpu_run  # noqa: E402 - lies in tools
import report  # noqa: E402 - lies in benchmarks
import results_file  # noqa: E402

GIB = 2**30


def row(method: str, count: int, seconds: float, peak: float, **more: Any) -> dict[str, Any]:
    drop = int((14 - peak) * GIB)
    entry = {"method": method, "num_layers": count, "seconds": seconds, "samples": [seconds], "ratio": seconds / 0.2}
    return {**entry, "peak_bytes": int(peak * GIB), "drop_bytes": drop, **more}


def ours(count: int, seconds: float, peak: float, **more: Any) -> dict[str, Any]:
    entry = row("actoffload", count, seconds, peak)
    derived = {
        "bytes_offloaded": count * GIB,
        "bytes_absent": count * GIB,
        "r": entry["drop_bytes"] / (count * GIB),
        "host_bytes": count * GIB,
        "host_ratio": 1.0,
        "stalls": 0,
        "bound_seconds": 0.2,
        "bound_ratio": seconds / 0.2,
        "predicted_seconds": 0.2,
        "deviation": seconds / 0.2 - 1,
        "copies": {"d2h": 50e9, "h2d": 51e9, "stall_seconds": 0.0},
    }
    return {**entry, **derived, **more}


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    origin = {
        "format": 1,
        "command": "PYTHONPATH=src python benchmarks/compare.py gpt",
        "date": "2026-11-20T10:00:00+00:00",
        "device": {"name": "Some GPU", "reference": False, "driver": "1.2", "torch": "2.11", "python": "3.12"},
        "source_digest": "0123456789abcdef",
    }
    gpt = {
        **origin,
        "benchmark": "gpt",
        "settings": {"name": "gpt", "shape": [1, 8192, 4096], "dtype": "bfloat16", "heads": 32, "layers": 12},
        "link": {"d2h": 55e9, "h2d": 56e9},
        "compute": {"forward": 0.07, "backward": 0.13},
        "noise": 0.001,
        "arms": [
            row("no offload", 0, 0.2, 14.0),
            row("no offload, again", 0, 0.2002, 14.0),
            ours(4, 0.201, 10.0),
            ours(10, 0.23, 4.0),
            row("checkpoint", 4, 0.22, 10.5),
        ],
    }
    cases = [
        {
            "case": name,
            "tensors": 64,
            "tensors_offloaded": moved,
            "forward_seconds": a,
            "backward_seconds": b,
            "seconds": a + b,
        }
        for name, moved, a, b in (
            ("passed through, too small", 0, 2e-6, 1e-6),
            ("offloaded and reloaded", 64, 40e-6, 30e-6),
        )
    ]
    return {"gpt": gpt, "overhead": {**origin, "benchmark": "overhead", "repeats": 3, "cases": cases}}


def store(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    for name, data in results.items():
        (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")


def test_targets_say_by_how_much_they_are_missed(results: dict[str, dict[str, Any]]) -> None:
    rows = {target.what: target.row() for target in report.targets(results)}
    assert rows["GPT, 4 of 12 layers: step / no offload"][1:] == ("≤ 1.010", "1.005", "met")
    assert rows["GPT, 10 of 12 layers: step / bound"][1:] == ("≤ 1.100", "1.150", "missed by 0.050")
    assert rows["GPT, 10 of 12 layers: distance from simulate"][3] == "missed by 12.00 %"
    assert rows["GPT: smallest R"][1:] == ("≥ 99.50 %", "100.00 %", "met")
    assert rows["Host time for a saved tensor: passed through, too small"][3] == "met"
    assert rows["Host time for a saved tensor: offloaded and reloaded"][3] == "missed by 10.0 µs"


def test_a_lower_limit_is_missed_below_it() -> None:
    assert report.Target("R", 99.5, 99.4, " %", at_least=True).row()[3] == "missed by 0.100 %"
    assert report.Target("R", 99.5, 99.5, " %", at_least=True).met


def test_report_has_every_arm_and_its_origin(results: dict[str, dict[str, Any]]) -> None:
    text = report.report(results)
    assert "| no offload | 0 | 200.00 | 1.000 | 14.00 | 0.00 |" in text
    assert "| actoffload | 10 | 230.00 | 1.150 | 4.00 | 10.00 |" in text
    assert "| torch.utils.checkpoint | 4 | 220.00 | 1.100 | 10.50 | 3.50 |" in text
    assert "| 4 | 4096 | 100.00 % | 1.000 | 1.005 | 200.00 | +0.5 % | 50.0 / 51.0 |" in text
    assert "Some GPU, driver 1.2, torch 2.11, Python 3.12, D2H 55.0 GB/s, H2D 56.0 GB/s, 2026-11-20" in text
    assert "`0123456789ab`" in text
    assert "Rehearsal" not in text
    results["gpt"]["device"]["reference"] = True
    assert "**Rehearsal on the reference device; no GPU figures.**" in report.report(results)


def test_report_of_nothing() -> None:
    assert "No results are recorded yet." in report.report({})


def test_headline_takes_the_most_layers_that_are_nearly_free(
    tmp_path: Path, results: dict[str, dict[str, Any]]
) -> None:
    store(tmp_path, results)
    sentence = report.headline(tmp_path)
    assert sentence.startswith("On one Some GPU, offloading 4 of 12 GPT blocks (hidden size 4096, 32 heads")
    assert "from 14.0 to 10.0 GiB at 1.005 × the step time" in sentence
    assert sentence.endswith("checkpointing the same blocks takes 1.100 ×.")


def test_headline_takes_the_cheapest_if_none_is_nearly_free(tmp_path: Path, results: dict[str, dict[str, Any]]) -> None:
    results["gpt"]["arms"][2]["ratio"] = 1.5
    store(tmp_path, results)
    assert "offloading 10 of 12" in report.headline(tmp_path)


def test_headline_without_gpu_results(tmp_path: Path, results: dict[str, dict[str, Any]]) -> None:
    assert report.headline(tmp_path) == "No GPU results are recorded yet."
    changed = copy.deepcopy(results)
    changed["gpt"]["device"]["reference"] = True
    store(tmp_path, changed)
    assert report.headline(tmp_path) == "No GPU results are recorded yet."


def test_report_is_written_drawn_and_checked(tmp_path: Path, results: dict[str, dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    store(tmp_path, results)
    assert report.main(["--results", str(tmp_path), "--check"]) == 1
    assert report.main(["--results", str(tmp_path)]) == 0
    assert report.main(["--results", str(tmp_path), "--check"]) == 0
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    results["gpt"]["arms"][2]["seconds"] *= 2
    store(tmp_path, results)
    assert report.main(["--results", str(tmp_path), "--check"]) == 1


def test_committed_report_is_what_the_committed_results_give() -> None:
    if not report.load(results_file.RESULTS):
        pytest.skip("no results are recorded yet")
    assert report.main(["--check"]) == 0


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gpt.json").write_text('{"format": 0}', encoding="utf-8")
    with pytest.raises(ValueError, match="run the benchmark again"):
        results_file.read(tmp_path, "gpt")


def test_results_carry_their_origin(tmp_path: Path) -> None:
    results_file.write(tmp_path, "overhead", {"cases": []}, "python x.py")
    found = results_file.read(tmp_path, "overhead")
    assert found is not None
    assert found["source_digest"] == results_file.digest()
    assert len(found["source_digest"]) == 64
    assert set(found["device"]) == {"name", "reference", "driver", "torch", "python"}


def test_gpu_run_chooses_steps_in_their_order(tmp_path: Path) -> None:
    known = gpu_run.steps(tmp_path, rehearse=True, select="")
    assert [s.name for s in gpu_run.chosen("benchmarks,tests", known)] == ["tests", "overhead", "linear", "gpt"]
    with pytest.raises(SystemExit, match="no step nonsense"):
        gpu_run.chosen("tests,nonsense", known)


def test_gpu_run_stops_a_step_at_its_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    asleep = gpu_run.Step("asleep", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 60)
    outcome = gpu_run.run(asleep, log, limit=3)
    assert outcome.status == "stopped after 3 s"
    assert outcome.last_lines == ("begun",)
    failing = gpu_run.run(gpu_run.Step("failing", ("-c", "raise SystemExit(4)"), 60), log, limit=30)
    assert failing.status == "exit status 4"
    gpu_run.summary([outcome, failing], tmp_path)
    assert "stopped after 3 s" in capfd.readouterr().out


def test_gpu_run_names_failed_tests(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite><testcase name="good" time="1"/><testcase name="bad" time="2.5">'
        '<failure message="assert 1 ==\n 2"/></testcase></testsuite></testsuites>',
        encoding="utf-8",
    )
    assert gpu_run.failures(path) == ["bad (2.5 s): assert 1 == 2"]
    assert gpu_run.failures(tmp_path / "none.xml") == []


def test_outcomes_of_the_gpu_tests_are_read_from_junit(tmp_path: Path) -> None:
    xml = (
        '<testsuites><testsuite time="2.5"><testcase classname="tests.gpu.test_a" name="b[1]" time="1"/>'
        '<testcase classname="tests.gpu.test_a" name="c"><failure message="no"/></testcase>'
        '<testcase classname="tests.gpu.test_a" name="d"><skipped message="two devices"/></testcase>'
        "</testsuite></testsuites>"
    )
    path = tmp_path / "tests.xml"
    path.write_text(xml, encoding="utf-8")
    found = gpu_run.test_outcomes(path)
    assert found["counts"] == {"passed": 1, "failure": 1, "error": 0, "skipped": 1}
    assert found["tests"] == {"test_a::b[1]": "passed", "test_a::c": "failure", "test_a::d": "skipped"}
    assert found["seconds"] == 2.5


def test_a_result_cannot_overwrite_its_origin(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="would overwrite device"):
        results_file.write(tmp_path, "x", {"device": []}, "command")


def test_all_runs_are_listed_in_order(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert report.runs(tmp_path) == ""
    committed = sorted((ROOT / "benchmarks" / "results" / "runs").glob("gpt-*.json"))
    for path in committed[:2]:
        (tmp_path / "runs" / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    lines = report.runs(tmp_path).splitlines()
    assert len(lines) == 4
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in committed[:2])
    assert first["source_digest"][:8] in lines[2]
    assert second["source_digest"][:8] in lines[3]
