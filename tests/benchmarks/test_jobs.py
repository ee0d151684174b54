"""Each job in tiny sizes on the reference device, and arms that fail."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import harness
import trainer
from harness import Recorder, Way, run_arms
from jobs import ARMS, JOBS

# PEFT asks models of transformers 5 by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
SMALL = {"rounds": 1, "warm_up": 2, "steps": 2}
ARMS_HERE = "none", "checkpoint", "offload", "budget"


def of_job(name: str, arms: tuple[str, ...] = ARMS_HERE, **more: Any) -> dict[str, dict[str, Any]]:
    job = replace(JOBS[name], **{**SMALL, **more})
    train = importlib.import_module(job.module).trainer(name, rehearse=True)
    written: list[dict[str, Any]] = []
    found = run_arms(job, train, written.append, arms)
    assert [sample for sample in written if sample["status"] != "begun"] == found
    assert len(written) == 2 * len(found)
    return {sample["arm"]: sample for sample in found}


@pytest.mark.parametrize("name", ["P8", "T1", "L4", "ViT-L", "DiT-XL"])
def test_each_arm_trains_with_the_same_bits(name: str) -> None:
    found = of_job(name)
    assert {arm: sample["status"] for arm, sample in found.items()} == dict.fromkeys(ARMS_HERE, "ok"), found
    none = found["none"]
    for sample in found.values():
        assert sample["values"] == none["values"]
        assert len(sample["values"]) >= 2
        assert len(sample["seconds"]) == len(sample["pass_seconds"]) == len(sample["host_seconds"]) == SMALL["steps"]
        assert all(a >= b > 0 for a, b in zip(sample["seconds"], sample["pass_seconds"], strict=True))
    assert found["checkpoint"]["peak_bytes"] <= none["peak_bytes"]
    assert found["budget"]["budget_bytes"] == int(1.03 * found["checkpoint"]["highest_bytes"])
    assert "kept" in found["offload"]["plan"]
    assert found["offload"]["final"]
    if name == "P8":
        assert max(found[arm]["peak_bytes"] for arm in ("checkpoint", "offload")) < none["peak_bytes"]


def test_arms_that_run_out_of_memory_or_fail_are_samples_and_the_others_go_on() -> None:
    problems = {True: torch.OutOfMemoryError("CUDA out of memory. Tried"), False: ValueError("no\nsuch")}

    def train(way: Way, recorder: Recorder) -> None:
        if way.ours is not None:
            raise problems["memory_budget" not in way.ours]
        for _ in range(4):
            recorder.begin()
            recorder.forward_ended()
            recorder.backward_ended()
            recorder.step_ended()

    written: list[dict[str, Any]] = []
    job = replace(JOBS["P8"], **{**SMALL, "rounds": 2})
    run_arms(job, train, written.append, ("offload", "checkpoint", "budget"))
    ended = [(s["arm"], s["round"], s["status"]) for s in written if s["status"] != "begun"]
    assert ended == [
        ("offload", 0, "out of memory"),
        ("checkpoint", 0, "ok"),
        ("budget", 0, "failed"),
        ("checkpoint", 1, "ok"),
    ]
    assert next(s["note"] for s in written if s["status"] == "failed") == "no such"


def test_a_search_writes_a_sample_for_each_length() -> None:
    written: list[dict[str, Any]] = []
    trainer.search("context", written.append, ("checkpoint", "offload"), 24.0, rehearse=True)
    ended = [(s["arm"], s["tokens"], s["status"], s["memory_gb"]) for s in written if s["status"] != "begun"]
    assert ended == [(arm, tokens, "ok", 24.0) for arm in ("checkpoint", "offload") for tokens in (32, 64)]


def test_every_job_has_known_arms_and_a_module() -> None:
    for name, job in JOBS.items():
        assert {arm.partition(":")[0] for arm in job.arms} <= set(ARMS), name
        assert (Path(harness.__file__).parent / f"{job.module}.py").is_file()
        assert job.minutes * 60 <= 1.4 * job.limit
