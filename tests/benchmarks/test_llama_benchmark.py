"""The Llama benchmark at rehearsal sizes: the model, its own account of what is saved, the measurements, the tables."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import gpu_run  # noqa: E402 - lies in tools
import llama  # noqa: E402 - lies in benchmarks, as the others
import llama_host  # noqa: E402
import report  # noqa: E402
import report_llama  # noqa: E402
import results_file  # noqa: E402
from llama_arms import Offloaded  # noqa: E402
from llama_model import LlamaSettings, Stack, _Saved, absent_bytes, saved_storages  # noqa: E402
from report_parts import table  # noqa: E402

from actoffload.schedule import Link  # noqa: E402

CPU = torch.device("cpu")
TINY = replace(llama.REHEARSAL["8k"], tokens=64, layers=4, hidden=128, intermediate=448, heads=4, kv_heads=1)
TINY = replace(TINY, min_bytes=64 * 4 * 4, seconds=0.01)


@pytest.fixture
def tiny() -> Stack:
    return Stack(TINY, CPU)


@pytest.fixture(scope="module")
def hugging_face() -> tuple[Any, Stack]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=8,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(1)
    model = transformers.LlamaModel(config)
    rates = model.rotary_emb.inv_freq.clone()  # stays in float32, also in models that are loaded in bfloat16
    model = model.to(torch.bfloat16)
    model.rotary_emb.inv_freq = rates
    stack = Stack(TINY, CPU)
    stack.model.load_state_dict({k: v for k, v in model.state_dict().items() if k.startswith("layers.")})
    return model, stack


def test_layers_give_the_bits_of_hugging_face(hugging_face: tuple[Any, Stack]) -> None:
    model, stack = hugging_face
    outputs: list[torch.Tensor] = []
    handle = model.layers[-1].register_forward_hook(lambda _, args, output: outputs.append(output))
    x = stack.input()
    y = x.detach().clone().requires_grad_()
    model(inputs_embeds=x, use_cache=False)
    handle.remove()
    mine = stack.model(y)
    assert torch.equal(mine, outputs[0])
    outputs[0].float().square().mean().backward()
    mine.float().square().mean().backward()
    assert torch.equal(x.grad, y.grad)


def test_layers_save_what_hugging_face_saves(hugging_face: tuple[Any, Stack]) -> None:
    model, stack = hugging_face
    theirs = _Saved(model)
    with saved_tensors_hooks(theirs.pack, lambda tensor: tensor):
        output = model(inputs_embeds=stack.input(), use_cache=False).last_hidden_state
    theirs.remove()
    found = [(s.dtype, s.shape, s.nbytes, len(s.layers)) for s in theirs.storages.values() if 2 in s.layers]
    mine = [(s.dtype, s.shape, s.nbytes, len(s.layers)) for s in saved_storages(stack) if 2 in s.layers]
    assert sorted(mine) == sorted(found)
    assert len(mine) == 19
    del output


def test_bytes_of_a_token_are_those_that_the_settings_name() -> None:
    # Heads of the same size and an eighth of everything else: an eighth of the bytes that leave.
    small = llama.REHEARSAL["8k"]
    full = llama.FULL["8k"]
    ratios = [getattr(full, name) / getattr(small, name) for name in ("hidden", "intermediate", "heads", "kv_heads")]
    assert ratios == [8.0] * 4
    saved = saved_storages(Stack(replace(small, layers=2), CPU))
    leaving = absent_bytes(saved, 1, small.min_bytes)
    assert leaving / small.tokens * 8 / 1024 == pytest.approx(196, abs=0.5)
    # The limits let the same tensors leave at every length: attention's sums do, the root mean squares do not.
    for settings in (small, full, llama.HOST, llama.REHEARSAL_HOST):
        assert settings.tokens * 4 < settings.min_bytes <= settings.tokens * settings.heads * 4
    assert full.min_bytes == LlamaSettings(1, 1).min_bytes == 2**20


def test_the_twin_shares_weights_and_sees_no_hook(tiny: Stack) -> None:
    offloaded = Offloaded(tiny)
    assert all(map(lambda a, b: a is b, tiny.model.parameters(), tiny.twin.parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny.twin.modules())
    tiny.step(tiny.twin)
    assert offloaded.handle.statistics().tensors_saved == 0
    tiny.step(tiny.model)
    assert offloaded.handle.statistics().tensors_offloaded == 3 * 15 + 2
    offloaded.handle.remove()


def test_the_schedule_changes_only_when_it_has_to(tiny: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = Offloaded(tiny)
    calls: list[int] = []
    reschedule = offloaded.handle.reschedule

    def counting(*, num_layers: int) -> None:
        calls.append(num_layers)
        reschedule(num_layers=num_layers)

    monkeypatch.setattr(offloaded.handle, "reschedule", counting)
    for count in (3, 3, 1, 1, 2):
        statistics, _, _ = offloaded.counted(count)
        assert statistics.bytes_reloaded == absent_bytes(saved_storages(tiny), count, TINY.min_bytes)
    assert calls == [1, 2]
    offloaded.handle.remove()


def test_absent_bytes_leave_out_what_stays() -> None:
    def storage(nbytes: int, layers: set[int], tensor: int = 0) -> Any:
        return llama.SavedStorage("", "", (), nbytes, tensor or nbytes, layers)

    saved = [storage(100, {0}), storage(10, {1}), storage(1000, {0, 2}), storage(7, {0}), storage(500, {0}, tensor=9)]
    assert absent_bytes(saved, 1, 10) == 100
    assert absent_bytes(saved, 2, 10) == 110
    assert absent_bytes(saved, 3, 10) == 1110
    assert absent_bytes(saved, 1, 9) == 600


def test_bound_and_fit() -> None:
    compute = {"forward": 1.0, "backward": 2.0}
    assert llama.fits({"d2h_seconds": 1.0, "h2d_seconds": 2.0}, compute)
    assert not llama.fits({"d2h_seconds": 1.1, "h2d_seconds": 0.1}, compute)
    assert not llama.fits({"d2h_seconds": 0.1, "h2d_seconds": 2.1}, compute)
    assert llama.bound_seconds({"d2h_seconds": 1.5, "h2d_seconds": 1.0}, compute) == 3.5
    assert llama.bound_seconds({"d2h_seconds": 0.5, "h2d_seconds": 3.0}, compute) == 4.0


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0, 2), (40.0, 4), (1000.0, 7)])
def test_repeats_follow_from_the_time_there_is(seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(functions: Any, **options: Any) -> Any:
        asked.update(options)
        times = {llama.NOTHING: [1.0, 3.0], llama.OURS: [2.0, 4.0]}
        return {arm: times[arm[0]] for arm in functions}

    monkeypatch.setattr(llama, "measure_step_times", measure)
    nothing, ours = (llama.NOTHING, 0), (llama.OURS, 1)
    functions = dict.fromkeys((nothing, ours), lambda: None)
    found = llama.timed(functions, 0.25, {nothing: 1.0, ours: 2.33}, seconds, steps=2)
    assert (asked["repeats"], asked["steps"], asked["warmup"]) == (repeats, 2, 0)
    assert found[ours]["ratio"] == 1.5
    assert found[ours]["compute"] == {"forward": 0.5, "backward": 1.5}


@pytest.fixture
def result(measured: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(measured)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a result with a slow link, so that two numbers of layers do not fit."""
    patch = pytest.MonkeyPatch()
    patch.setattr(llama, "measure_link", lambda *_: Link(d2h=2**20 / 0.8e-3, h2d=1e12))
    patch.setattr(llama, "forward_share", lambda stack: 0.5e-3)
    patch.setattr(
        llama, "measure_step_times", lambda functions, **_: {arm: [f() or 1.0] for arm, f in functions.items()}
    )
    try:
        parts = {name: llama.measure(name, TINY, CPU) for name in ("8k", "32k")}
    finally:
        patch.undo()
    parts["host"] = llama_host.measure_host(replace(TINY, layers=3), CPU, small=True)
    folder = tmp_path_factory.mktemp("results")
    results_file.write(folder, "llama", {"parts": parts}, "python benchmarks/llama.py")
    found = results_file.read(folder, "llama")
    assert found is not None
    return found


def test_every_number_of_layers_is_measured(result: dict[str, Any]) -> None:
    part = result["parts"]["8k"]
    assert [(a["method"], a["num_layers"]) for a in part["arms"]] == [
        ("no offload", 0), ("no offload, again", 0), ("actoffload", 1), ("actoffload", 2), ("actoffload", 3),
    ]  # fmt: skip
    one, two, three = report_llama.ours(part)
    assert [one["fits"], two["fits"], three["fits"]] == [True, False, False]
    for arm in (one, two, three):
        assert arm["r"] == 1.0
        assert arm["bytes_absent"] == arm["bytes_reloaded"] == arm["num_layers"] * one["bytes_absent"]
        assert arm["tensors_offloaded"] == arm["num_layers"] * 15 + 2
        out = arm["bytes_offloaded"] / part["link"]["d2h"]
        assert arm["bound_seconds"] == pytest.approx(max(out, 0.5e-3) + 1 - 0.5e-3)
        assert arm["bound_ratio"] == arm["seconds"] / arm["bound_seconds"]
    assert [step["num_layers"] for step in part["timelines"]] == [1, 2]
    assert part["timelines"][1]["bytes"] == {"d2h": two["bytes_offloaded"], "h2d": two["bytes_reloaded"]}


def test_host_time_counts_layers_and_tensors(result: dict[str, Any]) -> None:
    host = result["parts"]["host"]
    assert (host["num_layers"], host["tensors_offloaded"]) == (1, 17)
    added = sum(host["host"]["with"].values()) - sum(host["host"]["without"].values())
    assert host["added"] == pytest.approx(added)
    assert host["added_per_layer"] == pytest.approx(added)
    assert host["added_per_tensor"] == pytest.approx(added / 17)
    assert all(seconds >= 0 for seconds in host["behind"].values())


def test_page_has_tables_and_says_what_was_missed(result: dict[str, Any]) -> None:
    part = result["parts"]["8k"]
    one, two, three = report_llama.ours(part)
    two["fits"] = True
    one["ratio"], two["ratio"], two["bound_ratio"], three["bound_ratio"], three["r"] = 1.25, 1.005, 1.05, 1.15, 0.99
    result["parts"]["host"]["added_per_layer"] = 0.5e-3
    rows = {target.what: target.row() for target in report.targets({"llama": result})}
    assert rows["Llama, 8k tokens: step / bound (N = 1 to 3, worst at 3)"][1:] == (
        "≤ 1.100", "1.150", "missed by 0.050",
    )  # fmt: skip
    free = rows["Llama, 8k tokens: step / no offload where copies fit (N = 1 to 2, worst at 1)"]
    assert free[1:] == ("≤ 1.010", "1.250", "missed by 0.240")
    assert rows["Llama, 8k tokens: smallest R"][2:] == ("99.00 %", "missed by 0.50 %")
    assert rows["Llama: host time added for each offloaded layer"][1:] == ("≤ 1.00 ms", "0.50 ms", "met")
    text = report.report({"llama": result})
    assert "Slower than 1.10 × the bound: 1.150 × with 3." in text
    assert "Slower than 1.01 × no offload, although their copies fit: 1.250 × with 1." in text
    assert "| mlp.down_proj | bfloat16, 64 × 448 | 0.05 | yes |" in text
    assert "| self_attn | bfloat16, 1 × 1 × 64 × 32 | 0.00 | no: one for all layers |" in text
    assert "| 3 | 0.00 |" in text
    assert "**Rehearsal on the reference device; no GPU figures.**" in text


def test_page_names_the_compute_that_each_row_refers_to(result: dict[str, Any]) -> None:
    part = result["parts"]["8k"]
    one, two, three = report_llama.ours(part)
    for arm in (one, two, three):
        arm["compute"] = {"forward": 0.1, "backward": 0.25}
    text = report.report({"llama": result}).split("### 8k tokens")[1].split("### 32k tokens")[0]
    assert "Forward computes for 100.0 ms and backward for 250.0 ms." in text
    assert "rounds" not in text
    for arm in (two, three):
        arm["compute"] = {"forward": 0.2, "backward": 0.3}
        arm["bound_seconds"] = 0.6
    text = report.report({"llama": result})
    assert "N = 1 beside forward of 100.0 ms and backward of 250.0 ms, 350.0 ms together; " in text
    assert "N = 2 to 3 beside forward of 200.0 ms and backward of 300.0 ms, 500.0 ms together." in text
    row = next(line for line in text.split("### 8k")[1].splitlines() if line.startswith("| 3 |"))
    assert row.split(" | ")[5] == "600.0"


def test_steps_below_their_bound_are_explained(result: dict[str, Any]) -> None:
    one, two, three = report_llama.ours(result["parts"]["8k"])
    for arm in (one, two, three, *report_llama.ours(result["parts"]["32k"])):
        arm["bound_ratio"] = 1.0
    assert "below their bound" not in report.report({"llama": result})
    one["bound_ratio"], three["bound_ratio"] = 0.995, 0.98
    assert "Steps with N = 1, 3 lie below their bound, by 2.0 % at most" in report.report({"llama": result})


def test_scalars_are_named(result: dict[str, Any]) -> None:
    entry = result["parts"]["8k"]["saved"][0]
    entry["shape"], entry["dtype"] = [], "uint64"
    assert f"| {entry['module']} | uint64, scalar | " in report.report({"llama": result})


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    assert table(("layers", "ms"), [("1", "2.0"), ("10", "2.5")]).splitlines()[1] == "| ---: | ---: |"
    assert table(("what", "ms"), [("1", "2.0"), ("GPT", "2.5")]).splitlines()[1] == "| --- | ---: |"
    assert table(("what", "ms"), []).splitlines()[1] == "| --- | ---: |"


def test_page_of_one_part(result: dict[str, Any]) -> None:
    only = {**result, "parts": {"32k": result["parts"]["32k"]}}
    text = report.report({"llama": only})
    assert "### 32k tokens" in text
    assert "### 8k tokens" not in text
    assert "### Host time of a layer" not in text
    assert {t.what.split(":")[0] for t in report.targets({"llama": only})} == {"Llama, 32k tokens"}


def test_calls_of_the_driver_are_told(result: dict[str, Any]) -> None:
    part = result["parts"]["32k"]
    part["driver_calls"] = {"num_device_alloc": 0, "num_alloc_retries": 0}
    assert "No memory was taken from the driver" in report.report({"llama": result})
    part["driver_calls"] = {"num_device_alloc": 2, "num_alloc_retries": 0}
    assert "the untimed first ones among them: 2 × num_device_alloc." in report.report({"llama": result})


def test_numbers_in_words() -> None:
    def arms(*counts: int) -> list[dict[str, Any]]:
        return [{"num_layers": count} for count in counts]

    assert report_llama.numbers(arms(3, 1, 2)) == "1 to 3"
    assert report_llama.numbers(arms(1, 4, 5)) == "1, 4 to 5"


def test_picture_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "llama.json").write_text(json.dumps(result), encoding="utf-8")
    assert report.main(["--results", str(tmp_path)]) == 0
    assert (tmp_path / "llama.png").read_bytes().startswith(b"\x89PNG")
    assert "](llama.png)" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert report.main(["--results", str(tmp_path), "--check"]) == 0


def test_result_is_written_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, settings: Any, device: torch.device) -> dict[str, Any]:
        if name == "32k":
            raise RuntimeError("out of memory")
        return {"name": name}

    monkeypatch.setattr(llama, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["llama.py", "--rehearse", "--parts", "8k,32k", "--out", str(tmp_path)])
    with pytest.raises(RuntimeError, match="out of memory"):
        llama.main()
    found = results_file.read(tmp_path, "llama")
    assert found is not None
    assert found["parts"] == {"8k": {"name": "8k"}}
    assert found["command"].endswith("--parts 8k,32k")


def test_unknown_parts_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["llama.py", "--parts", "8k,64k"])
    with pytest.raises(SystemExit):
        llama.main()
    assert "no part 64k; expected host, 8k, 32k" in capsys.readouterr().err


def test_gpu_run_runs_it_when_it_is_named(tmp_path: Path) -> None:
    known = gpu_run.steps(tmp_path, rehearse=True, select="")
    assert [step.name for step in gpu_run.chosen("llama", known)] == ["llama"]
    assert "llama" not in [step.name for step in gpu_run.chosen("tests,gallery,benchmarks", known)]
    assert known["llama"].command == ("benchmarks/llama.py", "--out", str(tmp_path), "--rehearse")
