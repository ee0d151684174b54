"""The page of the benchmarks, made of the recorded results, and the script for a GPU machine."""

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
import headline  # noqa: E402 - lies in benchmarks, as the next ones
import page  # noqa: E402
import report  # noqa: E402
import results_file  # noqa: E402
from results_file import RESULTS  # noqa: E402

Results = dict[str, dict[str, Any]]
RECORDED = report.load(RESULTS)


@pytest.fixture
def results() -> Results:
    """Return a copy of the recorded results, to be changed by a test."""
    return copy.deepcopy(RECORDED)


def store(folder: Path, results: Results) -> None:
    for name, data in results.items():
        (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")


def verdicts(results: Results) -> dict[str, tuple[str, ...]]:
    return {line["what"]: tuple(line.values())[1:] for line in report.targets(results)}


def test_targets_say_by_how_much_they_are_missed(results: Results) -> None:
    four, ten = (report.arm(results["gpt"], "actoffload", count) for count in (4, 10))
    four["ratio"], four["r"], ten["bound_ratio"], ten["deviation"] = 1.005, 0.99, 1.15, -0.15
    case = {"tensors": 64, "forward_seconds": 0.0, "backward_seconds": 0.0}
    cases = [("passed through", 1, 3e-6), ("passed through", 200, 9e-6), ("offloaded and reloaded", 1, 60e-6)]
    results["overhead"]["cases"] = [{**case, "case": c, "parameters": n, "seconds": s} for c, n, s in cases]
    host = results["llama"]["parts"]["host"]
    host["added"], host["added_bare"], host["added_per_layer"] = 3.0, 1.5, 0.5e-3
    found = verdicts(results)
    assert found["GPT, 4 of 12 layers: step / no offload"] == ("≤ 1.010", "1.005", "met")
    assert found["GPT, 10 of 12 layers: step / bound"] == ("≤ 1.050", "1.150", "missed by 0.100")
    assert found["GPT, 10 of 12 layers: distance from simulate"][2] == "missed by 12.00 %"
    assert found["GPT: smallest R"] == ("≥ 99.50 %", "99.00 %", "missed by 0.50 %")
    tensor = "Host time for a saved tensor: passed through (1, 200 parameters, worst at 200)"
    assert found[tensor] == ("≤ 5.0 µs", "9.0 µs", "missed by 4.0 µs")
    assert found["Host time for a saved tensor: offloaded and reloaded"][2] == "met"
    assert found["Llama: host time added for each offloaded layer"] == ("≤ 1.00 ms", "0.50 ms", "met")
    bare = "Llama: host time added / added by the same copies with hooks and CUDA calls alone"
    assert found[bare] == ("≤ 1.50", "2.00", "missed by 0.50")


def test_targets_of_llama_name_the_worst_arm(results: Results) -> None:
    part = results["llama"]["parts"]["8k"]
    part["arms"] = [a for a in part["arms"] if a["num_layers"] in (1, 2, 3, 4, 6, 8, 11)]
    arms = report.ours(part)
    for arm in arms:
        arm["fits"] = arm["num_layers"] <= 3
    arms[0]["ratio"], arms[2]["bound_ratio"] = 1.25, 1.15
    found = verdicts(results)
    bound = found["Llama, 8k tokens: step / bound (N = 1, 2, 3, 4, 6, 8, 11, worst at 3)"]
    assert bound[1:] == ("1.150", "missed by 0.050")
    free = found["Llama, 8k tokens: step / no offload where copies fit (N = 1, 2, 3, worst at 1)"]
    assert free == ("≤ 1.010", "1.250", "missed by 0.240")


def test_page_has_every_arm_and_its_origin(results: Results) -> None:
    gpt = results["gpt"]
    arm = report.arm(gpt, "checkpoint", 4)
    arm |= {"seconds": 0.22, "ratio": 1.1, "peak_bytes": 10.5 * 2**30, "drop_bytes": 3.5 * 2**30}
    gpt |= {"source_digest": "0123456789abcdef", "link": {"d2h": 55e9, "h2d": 56e9}, "date": "2026-11-20T10:00:00"}
    sizes = {"nbytes": 8, "tensor_nbytes": 8, "layers": [1]}
    results["llama"]["parts"]["8k"]["saved"].append({"module": "mlp", "dtype": "uint64", "shape": [], **sizes})
    page = report.report(results)
    assert "| torch.utils.checkpoint | 4 | 220.00 | 1.100 | 10.50 | 3.50 |" in page
    assert "D2H 55.0 GB/s, H2D 56.0 GB/s, 2026-11-20, library sources `0123456789ab`" in page
    assert "| mlp.down_proj | bfloat16, 8192 × 14336 | 224.00 | yes |" in page
    assert "| self_attn | bfloat16, 1 × 1 × 8192 × 128 | 2.00 | once for all layers |" in page
    assert "| mlp | uint64, scalar | 0.00 | no: small |" in page
    assert "Rehearsal" not in page
    gpt["device"]["reference"] = True
    assert "**Rehearsal on the reference device; no GPU figures.**" in report.report(results)


def test_a_pass_above_its_budget_is_commented_on(results: Results) -> None:
    parts = results["frontier"]["parts"]
    for part in parts.values():
        for arm in part["arms"]:
            arm["highest_bytes"] = arm["peak_bytes"] = min(arm["peak_bytes"], arm["budget"] or 0)
    assert "took more memory than the budget" not in report.report(results)
    arm = next(a for part in parts.values() for a in part["arms"] if a["budget"])
    arm["highest_bytes"] = 1.05 * arm["budget"]
    assert "With 1 of the budgets a pass that tried a plan took more memory than the budget, up to 5.0 % more." in (
        report.report(results)
    )


def test_host_time_shows_its_noise(results: Results) -> None:
    results["llama"]["parts"]["host"] |= {"added_bare": 0.01, "tensors_bare": 150}
    results["llama"]["parts"]["host"] |= {"ratio": 2.5, "ratio_quartiles": [2.4, 2.6]}
    assert "(quartiles over the repeats: 2.40 and 2.60)." in report.report(results)


def test_page_of_one_part(results: Results) -> None:
    results["llama"]["parts"] = {"32k": results["llama"]["parts"]["32k"]}
    page = report.report({"llama": results["llama"]})
    assert "### 32k tokens" in page
    assert "### 8k tokens" not in page
    assert "### Host time of a layer" not in page
    results["llama"]["parts"]["32k"]["driver_calls"] = {"num_device_alloc": 0, "num_host_alloc": 0}
    assert "No memory was allocated from the driver" in report.report({"llama": results["llama"]})
    results["llama"]["parts"]["32k"]["driver_calls"]["num_device_alloc"] = 2
    assert "warm-up included: 2 × num_device_alloc." in report.report({"llama": results["llama"]})


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    for name, line in (("1", "| ---: | ---: | ---: | ---: |"), ("GPT", "| --- | ---: | ---: | ---: |")):
        row = {"name": name, "forward": 0.002, "backward": 0.001, "both": 0.003}
        assert report.table("host", [row]).splitlines()[1:] == [line, f"| {name} | 2.00 | 1.00 | 3.00 |"]


def test_nothing_recorded(tmp_path: Path) -> None:
    assert "No results are recorded yet." in report.report({})
    assert headline.headline(tmp_path) == "No GPU results are recorded yet."


def test_report_is_written_drawn_and_checked(tmp_path: Path, results: Results) -> None:
    pytest.importorskip("matplotlib")
    store(tmp_path, results)
    assert [report.main(["--results", str(tmp_path), *more]) for more in (["--check"], [], ["--check"])] == [1, 0, 0]
    assert (tmp_path / "llama.png").read_bytes().startswith(b"\x89PNG")
    report.arm(results["gpt"], "actoffload", 4)["seconds"] *= 2
    store(tmp_path, results)
    assert report.main(["--results", str(tmp_path), "--check"]) == 1


def test_sections_of_other_sources_are_named(tmp_path: Path, results: Results) -> None:
    store(tmp_path, {name: {**results[name], "source_digest": report.digest()} for name in ("gpt", "memory")})
    assert report.notes(folder=tmp_path) == ""
    store(tmp_path, {"gpt": results["gpt"] | {"source_digest": "0"}})
    changed = "The library's sources have changed since these sections were measured: Twelve GPT blocks."
    assert report.notes(folder=tmp_path) == report.notes("gpt", folder=tmp_path) == changed
    assert report.notes("memory", "peers", folder=tmp_path) == ""


def test_what_a_machine_measured_is_shown_as_it_was_printed(results: Results) -> None:
    origin = {key: results["memory"][key] for key in ("command", "date", "device", "source_digest")}
    printed = "device  Some GPU\nproducts beside copies  1.028 x as long\n\n- " + "word " * 40
    page = report.readers_page({"machine": {**origin, "printed": printed}})
    assert "```text\ndevice  Some GPU\nproducts beside copies  1.028 x as long\n\n- word" in page
    block = page.split("```")[1]
    assert block.count("word") == 40
    assert max(map(len, block.splitlines())) <= 100


def test_committed_report_is_what_the_committed_results_give() -> None:
    assert report.main(["--check"]) == 0


def test_gpu_run_chooses_steps_in_the_named_order(tmp_path: Path) -> None:
    known = gpu_run.steps(tmp_path, rehearse=True, select="")
    named = [s.name for s in gpu_run.chosen("gpt,benchmarks,tests", known)]
    assert named == ["gpt", "overhead", "linear", "tests"]
    assert "pinned_num_register_threads" in gpu_run.environment(known["frontier-8k"])["PYTORCH_ALLOC_CONF"]
    assert "pinned" not in gpu_run.environment(known["tests"]).get("PYTORCH_ALLOC_CONF", "")
    assert known["llama"].command == ("benchmarks/run.py", "llama", "--out", str(tmp_path), "--rehearse")
    with pytest.raises(SystemExit, match="no step nonsense"):
        gpu_run.chosen("tests,nonsense", known)


def test_gpu_run_has_steps_beside_others_on_a_second_gpu(tmp_path: Path) -> None:
    known = gpu_run.steps(tmp_path, rehearse=True, select="")
    every = gpu_run.chosen("gpt,linear", known), gpu_run.chosen("tests", known)
    first, second = gpu_run.lanes(*every, tmp_path)
    assert [step.name for step in (*first.steps, *second.steps)] == ["gpt", "linear", "tests"]
    for lane, gpu, beside in ((first, "0", "tests"), (second, "1", "gpt, linear")):
        environment = gpu_run.environment(lane.steps[0], lane)
        assert (environment["CUDA_VISIBLE_DEVICES"], environment[results_file.BESIDE]) == (gpu, beside)
    (alone,) = gpu_run.lanes(every[0], [], tmp_path)
    assert results_file.BESIDE not in gpu_run.environment(alone.steps[0], alone)
    with pytest.raises(SystemExit, match="gpt of --only"):
        gpu_run.lanes(every[0], every[0][:1], tmp_path)


def test_gpu_run_runs_both_lanes_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for a file of the other one."""
    code = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch()\n"
    code += "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)"
    steps = [gpu_run.Step(a, ("-c", code, str(tmp_path / a), str(tmp_path / b)), 60) for a, b in ("xy", "yx")]
    outcomes = gpu_run.run_lanes(gpu_run.lanes(steps[:1], steps[1:], tmp_path), 60)
    assert [(outcome.step.name, outcome.status) for outcome in outcomes] == [("x", "ok"), ("y", "ok")]
    assert all((tmp_path / log).read_text().startswith("=== ") for log in gpu_run.LOGS)


def test_results_say_what_ran_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(results_file.BESIDE, "tests")
    for data in ({}, {"parts": {"8k": results_file.beside()}}):
        results_file.write(tmp_path, "frontier", data, "command")
        found = results_file.read(tmp_path, "frontier")
        assert found is not None
        when = "while `8k` was measured" if data else "at the same time"
        assert f"Another GPU of the host ran tests {when}." in page.origin(found)
    assert "beside" not in found


def test_gpu_run_stops_a_step_at_its_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    asleep = gpu_run.Step("asleep", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 60)
    outcome = gpu_run.run(asleep, log, limit=3)
    assert (outcome.status, outcome.last_lines) == ("stopped after 3 s", ("begun",))
    failing = gpu_run.run(gpu_run.Step("failing", ("-c", "raise SystemExit(4)"), 60), log, limit=30)
    assert failing.status == "exit status 4"
    gpu_run.summary([outcome, failing], tmp_path)
    assert "stopped after 3 s" in capfd.readouterr().out


def test_gpu_run_reads_the_outcomes_of_the_tests(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite time="2.5"><testcase classname="tests.gpu.test_a" name="b[1]" time="1"/>'
        '<testcase classname="tests.gpu.test_a" name="c" time="2.5"><failure message="assert 1 ==\n 2"/></testcase>'
        '<testcase classname="tests.gpu.test_a" name="d"><skipped message="two devices"/></testcase>'
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    assert gpu_run.failures(path) == ["c (2.5 s): assert 1 == 2"]
    assert gpu_run.failures(tmp_path / "none.xml") == []
    found = gpu_run.test_outcomes(path)
    assert found["counts"] == {"passed": 1, "failure": 1, "error": 0, "skipped": 1}
    assert found["tests"] == {"test_a::b[1]": "passed", "test_a::c": "failure", "test_a::d": "skipped"}
    assert found["seconds"] == 2.5
