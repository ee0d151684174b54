"""The benchmark with the Trainer of Hugging Face, at rehearsal sizes, and its part of the page."""

from __future__ import annotations

import copy
import gc
import json
import logging
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

import headline  # noqa: E402 - lies in benchmarks, as the next ones
import report  # noqa: E402
import trainer  # noqa: E402
from harness import AGAIN, CHECKPOINT, NOTHING, OURS  # noqa: E402

CPU = torch.device("cpu")
GIB = 2**30
TOKENS = 128
TINY = replace(
    trainer.REHEARSAL,
    layers=4,
    tokens=(TOKENS,),
    budget_tokens=TOKENS,
    rounds=(1,),
    warm_up=1,
    steps=3,
)


def run(seconds: float, gib: float, **more: Any) -> dict[str, Any]:
    times = {"seconds": [seconds, seconds, 9.0], "pass_seconds": [seconds / 2, seconds / 2, 9.0]}
    times["forward_seconds"] = [seconds / 5] * 3
    return {**times, "queue_seconds": [seconds / 10] * 3, "peak_bytes": gib * GIB, **more}


def of_plan(seconds: float, gib: float) -> dict[str, float]:
    return {"seconds": seconds, "peak_bytes": gib * GIB}


@pytest.fixture
def data() -> dict[str, Any]:
    """Two rounds of one length; the host of the second round is twice as slow."""

    def ours(seconds: float, gib: float, predicted: dict[str, float]) -> dict[str, Any]:
        return run(seconds, gib, predicted=predicted, plan="all of it", bytes_offloaded=GIB)

    one, two = ours(0.1, 19, of_plan(0.052, 19.19)), ours(0.22, 20, of_plan(0.1166, 19.6))
    first = {NOTHING: run(0.09, 30), OURS: one, CHECKPOINT: run(0.13, 18), AGAIN: run(0.11, 30)}
    second = {NOTHING: run(0.2, 30), OURS: two, CHECKPOINT: run(0.3, 18), AGAIN: run(0.2, 31)}
    row = trainer.rows({4096: [first, second]})
    origin = {"date": "2026-11-22T10:00:00", "source_digest": "0" * 64, "command": "python benchmarks/run.py trainer"}
    device = {"name": "H", "reference": False, "driver": "", "torch": "2", "python": "3"}
    return {"settings": vars(trainer.FULL), "rows": row, "device": device, **origin}


def test_ratios_refer_to_the_parts_without_offload_of_the_same_round(data: dict[str, Any]) -> None:
    (row,) = data["rows"]
    arms = {arm["method"]: arm for arm in row["arms"]}
    assert arms[OURS]["ratios"] == pytest.approx([1.0, 1.1])
    assert arms[OURS]["ratio"] == pytest.approx(1.05)
    assert arms[OURS]["seconds"] == pytest.approx(0.16)
    assert arms[OURS]["peak_bytes"] == 20 * GIB
    assert arms[OURS]["distance"] == pytest.approx({"seconds": 0.06, "peak_bytes": -0.02})
    assert arms[NOTHING]["distance"] == {}
    assert row["noise"] == pytest.approx(0.2)


def test_page_has_targets_arms_and_plan(data: dict[str, Any]) -> None:
    page = report.report({"trainer": data})
    assert "| Trainer, 4096 tokens × 2: step / no offload | ≤ 1.020 | 1.050 | missed by 0.030 |" in page
    prediction = "largest distance from the plan's prediction | ≤ 3.00 % |"
    assert (
        f"| Trainer, 4096 tokens × 2, offload(model): forward and backward, {prediction} 6.00 % | missed by 3.00 % |"
        in page
    )
    assert f"| Trainer, 4096 tokens × 2, offload(model): peak, {prediction} 2.00 % | met |" in page
    assert "| 4096 | offload(model) | 160.0 | 1.050 | 1.000 to 1.100 | 80.0 | +6.0 % | 20.00 | -2.0 % | 1.00 |" in page
    assert "| 4096 | no offload | 145.0 | 0.950 | 0.900 to 1.000 | 72.5 |  | 30.00 |  |  |" in page
    assert "```text\nall of it\n```" in page
    assert "differ by at most 20.0 % at 4096 tokens." in page


def test_page_has_the_plan_of_a_budget_and_what_the_host_takes(data: dict[str, Any]) -> None:
    page = report.report({"trainer": data})
    assert "for the budget of" not in page
    arms = data["rows"][0]["arms"]
    (ours,) = [arm for arm in arms if arm["method"] == OURS]
    limited = {**ours, "method": trainer.BUDGET, "budget": 19 * GIB, "plan": "some of it"}
    arms.append({**limited, "queue_seconds": 0.04})
    page = report.report({"trainer": data})
    assert "The plan of the last round for the budget of 19.00 GiB:\n\n```text\nsome of it\n```" in page
    assert (
        "40.0 ms to queue a forward with the budget, 21.5 ms with activation checkpointing and 14.5 ms without" in page
    )


def test_page_names_steps_that_are_much_longer_than_the_others(data: dict[str, Any]) -> None:
    row = data["rows"][0]
    steady, long = {"seconds": [0.2, 0.22, 0.29]}, {"seconds": [0.2, 0.2, 0.31]}
    row["runs"] = [{"budget": steady, CHECKPOINT: long}] * 2
    assert report._long_steps(row) == []
    row["runs"] = [{"budget": long, CHECKPOINT: steady}, {"budget": steady, CHECKPOINT: steady}]
    (sentence,) = report._long_steps(row)
    assert "with the budget 1 of 6 steps took more than one and a half times their median, up to 310 ms" in sentence
    assert "with activation checkpointing none." in sentence
    row["runs"] = [{"budget": long, CHECKPOINT: long}]
    assert "with activation checkpointing 1." in report._long_steps(row)[0]


def test_the_report_of_a_budget_is_shown_as_it_was_printed(data: dict[str, Any], tmp_path: Path) -> None:
    assert headline.report_of_a_budget(tmp_path) == "No report is recorded yet."
    runs = data["rows"][0]["runs"]
    printed = f"group  {'offload  ' * 12}\n-----\n\nplan         {'because ' * 20}"
    runs[-1]["budget"] = {**runs[-1][OURS], "report": printed}
    (tmp_path / "trainer.json").write_text(json.dumps({**data, "format": 1}), encoding="utf-8")
    shown = headline.report_of_a_budget(tmp_path)
    block = shown.split("```")[1]
    assert f"text\ngroup  {'offload  ' * 12}\n-----\n\nplan         because because" in block
    assert max(map(len, block.partition("-----")[2].splitlines())) <= headline.COLUMNS
    assert block.count("because") == 20


def test_headline_begins_with_the_trainer(data: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps({**data, "format": 1}), encoding="utf-8")
    found = headline.headline(tmp_path)
    assert "| no offload | 1.000 | 30.0 |  |  |\n| offload(model) | 1.050 | 20.0 |  |  |" in found
    assert "with 4096 tokens × 2." in found
    assert "The budgets are" not in found
    assert "before the default changed" not in found
    same = {a["method"]: a for a in copy.deepcopy(data)["rows"][0]["arms"]}
    same["budget"] = {**same["checkpoint"], "method": "budget", "ratio": 1.15, "budget": 18.9 * GIB}
    rows = [{**data["rows"][0], "arms": list(same.values())}]
    path.write_text(json.dumps({**data, "rows": rows, "format": 1}), encoding="utf-8")
    limited = headline.headline(tmp_path)
    assert "| offload(model, memory_budget) | 1.150 | 18.0 |  |  |\n| activation checkpointing |" in limited
    assert "The budgets are 5 % above the peaks of activation checkpointing." in limited
    assert "the host limits the step" not in limited
    same["checkpoint"]["ratios"] = [1.2, 1.22]
    same["budget"] |= {"ratio": same["checkpoint"]["ratio"] + 0.01, "queue_seconds": 0.074, "ratios": [1.34, 1.18]}
    path.write_text(json.dumps({**data, "rows": rows, "format": 1}), encoding="utf-8")
    slow = headline.headline(tmp_path)
    assert "the host limits the step: it queues a forward of the budget in 74 ms" in slow
    assert "was busy" not in slow
    path.write_text(json.dumps({**data, "rows": rows, "beside": "peers", "format": 1}), encoding="utf-8")
    assert "Another GPU of the host was busy." in headline.headline(tmp_path)
    path.write_text(json.dumps({**data, "benchmark": "trainer", "format": 1}), encoding="utf-8")
    assert "(library sources `000000000000`, before the default changed):" in headline.headline(tmp_path)
    assert "before the default changed" in report.report({"trainer": {**data, "benchmark": "trainer"}})
    data["device"]["reference"] = True
    path.write_text(json.dumps({**data, "format": 1}), encoding="utf-8")
    assert headline.headline(tmp_path) == "No GPU results are recorded yet."


def test_headline_names_the_device_of_each_column(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "trainer.json").write_text(json.dumps({**data, "format": 1}), encoding="utf-8")
    arm = {"num_layers": None, "seconds": 0.1, "ratio": 1.0, "peak_bytes": GIB, "budget": None}
    arms = [{**arm, "method": method} for method in (NOTHING, OURS, CHECKPOINT)]
    settings = {"layers": 2, "hidden": 8, "tokens": 16}
    other = {**data, "device": {**data["device"], "name": "another H"}, "arms": arms, "settings": settings, "format": 1}
    (tmp_path / "peers.json").write_text(json.dumps(other), encoding="utf-8")
    found = headline.headline(tmp_path)
    assert found.startswith("Measured on one GPU each, the Trainer on H and the plain loop on another H:\n")
    assert "*Plain loop*: 2 layers" in found


def test_bytes_that_differ_between_rounds_are_those_of_each_round() -> None:
    runs = [{OURS: {"bytes_offloaded": nbytes}, NOTHING: {}} for nbytes in (GIB, 2 * GIB, GIB)]
    assert report._moved({"runs": runs}, OURS) == "1.00, 2.00, 1.00"
    assert report._moved({"runs": runs[::2]}, OURS) == "1.00"
    assert report._moved({"runs": runs}, NOTHING) == ""


def test_plans_without_predictions_have_no_targets_of_them() -> None:
    assert trainer.planned(SimpleNamespace(seconds=1.0, peak_bytes=None))["predicted"] == {"seconds": 1.0}
    rounds = [{method: run(0.1, 1, **trainer.planned("a plan")) for method in trainer.METHODS}]
    data = {"settings": {"batch": 2}, "rows": trainer.rows({512: rounds})}
    (only,) = report.targets({"trainer": data})
    assert only["what"] == "Trainer, 512 tokens × 2: step / no offload"


def test_messages_of_the_library_are_collected() -> None:
    logger = logging.getLogger("actoffload")
    level, handlers = logger.level, list(logger.handlers)
    with trainer.messages() as found:
        logging.getLogger("actoffload.model").info("decided %d", 3)
    assert found == ["decided 3"]
    assert (logger.level, logger.handlers) == (level, handlers)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_each_run_trains_a_new_model_and_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    models, saved, make = [], [], trainer.Training.model

    def model(settings: trainer.Training) -> Any:
        found = make(settings)
        models.append(weakref.ref(found))
        return found

    monkeypatch.setattr(trainer.Training, "model", model)
    monkeypatch.setattr(trainer.actoffload, "offload", partial(trainer.actoffload.offload, min_bytes=2**14))
    data = trainer.measure_trainer(TINY, CPU, lambda data: saved.append(len(data["rows"])))
    arms = {arm["method"]: arm for arm in data["rows"][0]["arms"]}
    assert list(arms) == list(trainer.METHODS)
    for found in data["rows"][0]["runs"][0].values():
        assert len(found["seconds"]) == len(found["pass_seconds"]) == 3
        assert len(found["queue_seconds"]) == len(found["forward_seconds"]) == 3
        assert all(
            0 < forward < of_pass
            for forward, of_pass in zip(found["forward_seconds"], found["pass_seconds"], strict=True)
        )
        assert all(
            0 < queue < of_pass for queue, of_pass in zip(found["queue_seconds"], found["pass_seconds"], strict=True)
        )
        assert all(of_pass < step for of_pass, step in zip(found["pass_seconds"], found["seconds"], strict=True))
    assert arms[OURS]["bytes_offloaded"] >= 2 * 2 * 2 * TOKENS * TINY.hidden * 4  # two inputs of norms in two layers
    assert arms[CHECKPOINT]["peak_bytes"] < arms[NOTHING]["peak_bytes"] == arms[AGAIN]["peak_bytes"]
    assert saved == [1]
    gc.collect()
    assert [alive() for alive in models] == [None] * 2


@pytest.mark.parametrize("settles", [0, 1, 4])
def test_steps_are_measured_when_the_plan_is_final(settles: int) -> None:
    class Handle:
        plan = SimpleNamespace(because="This is why.")

        @property
        def settling(self) -> bool:
            return len(ended) < settles

    ended, begun, control = list[int](), list[int](), SimpleNamespace(should_training_stop=False)
    part = trainer.Part(2, 3, handle=Handle, measure=lambda: begun.append(len(ended)))
    run = trainer.Parts(part)
    run.on_train_begin(None, None, control)
    while not control.should_training_stop:
        for _ in range(3):  # around a forward and behind its backward
            run._sample()
        ended.append(1)
        run.on_step_end(None, None, control)
    assert begun == [max(settles - 1, 0) + 2]
    assert len(ended) == begun[0] + 3 <= run.most
    assert len(part.seconds) == 3


def test_a_plan_of_a_run_that_is_never_final() -> None:
    handle = SimpleNamespace(settling=True, plan=SimpleNamespace(because="This is why."))
    run = trainer.Parts(trainer.Part(2, 3, handle=lambda: handle))
    run.on_train_begin(None, None, None)
    for _ in range(trainer.SETTLING - 1):
        run.on_step_end(None, None, None)
    with pytest.raises(RuntimeError, match="The plan is not final after 60 steps: This is why"):
        run.on_step_end(None, None, None)
