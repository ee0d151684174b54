"""The harness, the workloads and the host times at rehearsal sizes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

import harness  # noqa: E402 - lies in benchmarks, as the others
import host_time  # noqa: E402
import run  # noqa: E402
from harness import NOTHING, OURS, Arm, WholeModel, absent_bytes, saved_storages  # noqa: E402
from results_file import digest, read, write  # noqa: E402
from workloads import FULL, REHEARSAL, Stack  # noqa: E402

from actoffload.schedule import Link  # noqa: E402

pytest.importorskip("transformers", reason="transformers is not installed")
CPU = torch.device("cpu")
TINY = replace(REHEARSAL["8k"], shape=(1, 64, 128), intermediate=448, min_bytes=64 * 4 * 4, seconds=0.01)


@pytest.fixture
def tiny() -> Stack:
    return Stack(TINY, CPU)


def test_the_layers_get_the_angles_of_hugging_face(tiny: Stack) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    config = llama.LlamaConfig(hidden_size=128, num_attention_heads=4, rope_parameters=parameters)
    x = tiny.input()
    theirs = llama.LlamaRotaryEmbedding(config)(x, torch.arange(64)[None])
    assert all(map(torch.equal, tiny.model.angles(x), theirs))


def test_saved_bytes_per_token_and_limits() -> None:
    small, full = REHEARSAL["8k"], FULL["8k"]
    # Heads of the same size and an eighth of everything else: an eighth of the bytes.
    sizes = [s.shape[-1] for s in (full, small)], [s.intermediate for s in (full, small)], [full.heads, small.heads]
    assert [a / b for a, b in sizes] == [8.0] * 3
    absent = absent_bytes(saved_storages(Stack(replace(small, layers=2), CPU)), 1, small.min_bytes)
    assert absent / small.shape[1] * 8 / 1024 == pytest.approx(196, abs=0.5)
    # The log-sum-exp of attention is offloaded at every length, the root mean squares are not.
    for settings in (small, full, FULL["host"], REHEARSAL["host"]):
        assert settings.shape[1] * 4 < settings.min_bytes <= settings.shape[1] * settings.heads * 4


def test_the_twin_shares_weights_and_has_no_hook(tiny: Stack) -> None:
    source = WholeModel(tiny)
    assert all(map(lambda a, b: a is b, tiny.model.parameters(), tiny.twin.parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny.twin.modules())
    tiny.step()
    assert source.handle.statistics().tensors_saved == 0
    source.step(3)
    assert source.handle.statistics().tensors_offloaded == 3 * 15 + 2
    source.close()


def test_the_model_is_offloaded_anew_only_for_another_number(tiny: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = WholeModel(tiny), []
    offload = source._offload
    monkeypatch.setattr(source, "_offload", lambda count: (calls.append(count), offload(count)))
    for count in (3, 3, 1, 1, 2):
        row = harness.counted(source.arms[count - 1], CPU, Link(1e9, 1e9))
        assert row["bytes_reloaded"] == absent_bytes(saved_storages(tiny), count, TINY.min_bytes)
    assert calls == [1, 2]
    source.close()


def test_absent_bytes_leave_out_resident_storages() -> None:
    sizes = [(100, {0}, 100), (10, {1}, 10), (1000, {0, 2}, 1000), (7, {0}, 7), (500, {0}, 9)]
    saved = [{"nbytes": n, "layers": layers, "tensor_nbytes": tensor} for n, layers, tensor in sizes]
    found = [absent_bytes(saved, *at) for at in ((1, 10), (2, 10), (3, 10), (1, 9))]
    assert found == [100, 110, 1110, 600]


def test_bound_and_fit() -> None:
    compute = {"forward": 1.0, "backward": 2.0}
    rows = [{"d2h_seconds": d2h, "h2d_seconds": h2d} for d2h, h2d in ((1.0, 2.0), (1.1, 0.1), (0.1, 2.1), (1.5, 1.0))]
    assert [harness.fits(row, compute) for row in rows] == [True, False, False, False]
    assert harness.bound_seconds(rows[3], compute) == 3.5
    assert harness.bound_seconds({"d2h_seconds": 0.5, "h2d_seconds": 3.0}, compute) == 4.0


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0, 2), (40.0, 4), (1000.0, 9)])
def test_repeats_follow_from_the_time_there_is(seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(functions: Any, **options: Any) -> Any:
        asked.update(options)
        return {key: {NOTHING: [1.0, 3.0], OURS: [2.0, 4.0]}[key[0]] for key in functions}

    monkeypatch.setattr(harness, "measure_step_times", measure)
    arms = [Arm(NOTHING, 0, lambda: None), Arm(OURS, 1, lambda: None)]
    rows = {(NOTHING, 0): {"rough_seconds": 1.0}, (OURS, 1): {"rough_seconds": 2.33}}
    found = harness.timed(arms, rows, 0.25, seconds, steps=2)[OURS, 1]
    assert asked == {"repeats": repeats, "steps": 2, "warmup": 0}
    assert (found["ratio"], found["compute"]) == (1.5, {"forward": 0.5, "backward": 1.5})


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link so slow that the copies of two and of three layers do not fit."""
    monkeypatch.setattr(harness, "measure_link", lambda *_: Link(d2h=2**20 / 0.8e-3, h2d=1e12))
    monkeypatch.setattr(harness, "forward_share", lambda stack: 0.5e-3)
    times = lambda functions, **_: {key: [f() or 1.0] for key, f in functions.items()}  # noqa: E731
    monkeypatch.setattr(harness, "measure_step_times", times)


def test_every_number_of_llama_layers_is_measured(slow_link: None) -> None:
    part = harness.measure(TINY, CPU)
    keys = [(a["method"], a["num_layers"]) for a in part["arms"]]
    assert keys == [(NOTHING, 0), (harness.AGAIN, 0), (OURS, 1), (OURS, 2), (OURS, 3)]
    arms = part["arms"][2:]
    assert [a["fits"] for a in arms] == [True, False, False]
    for a in arms:
        assert a["r"] == 1.0
        assert a["bytes_absent"] == a["bytes_reloaded"] == a["num_layers"] * arms[0]["bytes_absent"]
        assert a["tensors_offloaded"] == a["num_layers"] * 15 + 2
        out = a["bytes_offloaded"] / part["link"]["d2h"]
        assert a["bound_seconds"] == pytest.approx(max(out, 0.5e-3) + 1 - 0.5e-3)
        assert a["bound_ratio"] == a["seconds"] / a["bound_seconds"]
    assert [step["num_layers"] for step in part["timelines"]] == [1, 2]


def test_contexts_checkpointing_and_save_on_cpu_are_measured(slow_link: None) -> None:
    data = harness.measure(REHEARSAL["linear"], CPU)
    assert [a["method"] for a in data["arms"]] == [NOTHING, harness.AGAIN, OURS, "checkpoint", "save_on_cpu"]
    moved = data["arms"][2]
    assert moved["bytes_offloaded"] == moved["bytes_absent"] == 2 * 2**20
    assert moved["r"] == moved["host_ratio"] == 1.0
    assert [len(layer["saved"]) for layer in data["layers"]] == [1] * 4


def test_host_time_counts_layers_and_tensors() -> None:
    host = host_time.measure_layers(replace(TINY, layers=3), CPU, 3)
    assert (host["num_layers"], host["tensors_offloaded"]) == (1, 17)
    added = sum(host["host"]["with"].values()) - sum(host["host"]["without"].values())
    assert host["added"] == pytest.approx(added)
    assert host["added_per_layer"] == pytest.approx(added)
    assert host["added_per_tensor"] == pytest.approx(added / 17)
    assert all(seconds >= 0 for seconds in host["behind"].values())
    hooks = {(row["call"], row["of"]): row["count"] for row in host["calls"]["with"]}
    assert hooks["pack", "InFlight"] >= 17
    assert hooks["unpack", "SavedStorage"] >= hooks["pack", "InFlight"]  # some are copied when they are final
    assert hooks["backward_reached", ""] == 3
    cases = host_time.measure_tensors(1, CPU)["cases"]
    assert [c["parameters"] for c in cases] == [1, *(1, 20, 200) * 3, 1]
    assert [c["tensors_offloaded"] for c in cases] == [0, 0, 0, 0, *[1] * 6, 80]


def test_bare_copies_give_the_gradients(tiny: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        __init__ = __enter__ = __exit__ = wait_event = record_event = lambda *_: None

    empty, inputs = torch.empty, tiny.input().detach()
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(tiny, "input", lambda: inputs.clone().requires_grad_())

    def gradients(step: Any) -> list[torch.Tensor]:
        tiny.model.zero_grad()
        step()
        return [weight.grad.clone() for weight in tiny.model.parameters()]

    want, bare = gradients(tiny.step), host_time.Bare(tiny, 2)
    assert len(bare.order) == 30
    for _ in range(2):
        assert all(map(torch.equal, gradients(bare.step), want))


def test_llama_is_written_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(settings: Any, device: torch.device) -> dict[str, Any]:
        if settings is REHEARSAL["32k"]:
            raise RuntimeError("out of memory")
        return {"tokens": settings.shape[1]}

    monkeypatch.setattr(run, "measure", measure)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.main(["llama", "--rehearse", "--only", "8k,32k", "--out", str(tmp_path)])
    found = read(tmp_path, "llama")
    assert found is not None
    assert found["parts"] == {"8k": {"tokens": 128}}
    assert found["command"].endswith("run.py llama --only 8k,32k")
    assert found["source_digest"] == digest()
    assert set(found["device"]) == {"name", "reference", "driver", "torch", "python"}


def test_unknown_parts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["llama", "--only", "8k,64k"])
    assert "--only 8k,64k: expected parts of llama: host, 8k, 32k" in capsys.readouterr().err


def test_results_of_another_format_and_double_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gpt.json").write_text('{"format": 0}', encoding="utf-8")
    with pytest.raises(ValueError, match="run the benchmark again"):
        read(tmp_path, "gpt")
    with pytest.raises(ValueError, match="would overwrite device"):
        write(tmp_path, "x", {"device": []}, "command")


class Measuring:
    """A handle whose plan is final when a number of steps have begun."""

    plan = SimpleNamespace(because="This is why.")

    def __init__(self, steps: int) -> None:
        self.left = steps

    @property
    def settling(self) -> bool:
        return self.left > 0

    def step(self) -> torch.Tensor:
        self.left -= 1
        return torch.zeros(2**10 * (2 - self.left % 2))


@pytest.mark.parametrize(("needed", "steps", "number"), [(0, 2, 0), (10, 2, 12), (10, 1, 10)])
def test_steps_until_a_plan_is_final_are_those_that_are_timed(needed: int, steps: int, number: int) -> None:
    handle = Measuring(needed)
    assert harness.settle(handle, handle.step, steps) == (number, 8 * 2**10 * bool(number))
    assert handle.left == needed - number


def test_ranks_that_decide_alone_run_equally_many_steps() -> None:
    others, handle = iter([True, True, False, False]), Measuring(9)
    number, _ = harness.settle(handle, handle.step, 2, lambda settling: next(others) or settling)
    assert number == 9
    others = iter([True, True, False])
    number, _ = harness.settle(handle, handle.step, 2, lambda settling: next(others) or settling)
    assert number == 6


def test_a_plan_that_is_never_final() -> None:
    handle = Measuring(10**9)
    with pytest.raises(RuntimeError, match=r"^The plan is not final after 60 steps: This is why\.$"):
        harness.settle(handle, handle.step, 2)
