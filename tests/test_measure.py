import pytest
import torch
from torch import nn

import actoffload
from actoffload.measure import (
    DeviceInfo,
    Measurement,
    Measurements,
    MemoryMeter,
    compare_steps,
    measure_step_times,
    measure_steps,
    trace_memory,
)
from actoffload.report.plots import plot_trace

MIB = 2**20
pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="how memory is followed without an accelerator"
)


def floats(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes // 4)


def test_meter_counts_what_is_computed_again() -> None:
    """One block at a time, as with checkpointing; replay runs below dispatch modes, which count everything else."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.sin(x * self.scale)
            return x

    model = nn.Sequential(Block(), Block())

    def peak_of_backward() -> int:
        for _ in range(3):
            loss = model(floats(MIB).requires_grad_()).sum()
            with MemoryMeter() as meter:
                loss.backward()
        return meter.peak_bytes

    without = peak_of_backward()
    with actoffload.offload(model, layers="?", recompute=True, fraction=0.0, min_bytes=1024):
        recomputed = peak_of_backward()
    assert 10 * MIB < recomputed - without < 13 * MIB, "twelve results of a block, of which backward frees one at once"


def test_meter_counts_storages_and_not_tensors() -> None:
    before = floats(8 * MIB)
    with MemoryMeter() as meter:
        a = floats(4 * MIB)
        views = [a[:10], a.view(2, -1), a.t() if a.dim() == 2 else a.unsqueeze(0)]
        a.add_(1.0)
        before.mul_(2.0)
        b = before[:100]
        found = [meter.bytes_in_use]
        c = a * 2
        found.append(meter.bytes_in_use)
        del c
        found.append(meter.bytes_in_use)
        del a, views
        found.append(meter.bytes_in_use)
    assert meter.peak_bytes == 8 * MIB
    assert found == [4 * MIB, 8 * MIB, 4 * MIB, 0]
    assert b.numel() == 100


def test_several_steps_are_timed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 0.25

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert measure_step_times({"step": step}, repeats=2, steps=4) == {"step": [0.25, 0.25]}


def test_meter_leaves_nothing_behind_an_exception() -> None:
    meter = MemoryMeter()

    def fail() -> None:
        with meter:
            floats(MIB)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert meter.peak_bytes == MIB
    floats(2 * MIB)
    assert meter.peak_bytes == MIB


def test_peaks_are_measured_after_a_warmup() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        if len(kept) < 2:
            kept.append(floats(16 * MIB))
        floats(MIB)

    assert measure_steps({"step": step}, warmup=1)["step"].peak_bytes == MIB
    assert len(kept) == 2


def test_step_times_are_interleaved() -> None:
    calls: list[str] = []
    arms = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = measure_step_times(arms, repeats=3, steps=2, warmup=1)
    # One untimed run before each measurement of two; every repeat has each arm once, in an order of its own.
    assert "".join(calls[:2]) == "ab"
    rounds = ["".join(calls[2 + 6 * k : 8 + 6 * k]) for k in range(3)]
    assert set(rounds) == {"aaabbb", "bbbaaa"}
    assert calls == ["a", "b", *"".join(rounds)]
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 3, "b": 3}
    assert all(sample >= 0 for samples in seconds.values() for sample in samples)


def measurements(*peaks: int, device: DeviceInfo | None = None, **more: int) -> Measurements:
    device = device or DeviceInfo("Some GPU", False, "1.2", "2.11", "3.12")
    names = ("without", "with offload")
    return Measurements(
        device, {n: Measurement(p, 0.1 + 0.001 * k) for k, (n, p) in enumerate(zip(names, peaks, strict=True))}, **more
    )


def test_the_table_of_a_comparison() -> None:
    shown = measurements(100 * MIB, 60 * MIB, bytes_offloaded=40 * MIB)
    assert str(shown).splitlines() == [
        "                peak memory      drop    step time    x without",
        "------------  -------------  --------  -----------  -----------",
        "without           100.0 MiB   0 bytes    100.00 ms        1.000",
        "with offload       60.0 MiB  40.0 MiB    101.00 ms        1.010",
        "R = drop / 40.0 MiB offloaded = 100.00 %",
        "measured on Some GPU, driver 1.2, torch 2.11, Python 3.12",
    ]
    assert measurements(100 * MIB, 70 * MIB, bytes_offloaded=40 * MIB).ratio == 0.75
    assert measurements(MIB, MIB, bytes_offloaded=0).ratio == 1.0
    assert "R =" not in str(measurements(MIB, MIB))
    reference = measurements(MIB, MIB, device=DeviceInfo("reference device (CPU)", True, ""))
    assert " ms" not in str(reference)


def test_measured_steps_are_joined_and_drawn() -> None:
    pytest.importorskip("matplotlib").use("agg")
    found = measure_steps({"large": lambda: floats(2 * MIB)}) | measure_steps({"small": lambda: floats(MIB)}, warmup=0)
    assert {name: of.peak_bytes for name, of in found.steps.items()} == {"large": 2 * MIB, "small": MIB}
    assert found["small"].seconds == 0.0
    ax = found.plot()
    assert [patch.get_width() for patch in ax.patches] == [2.0, 1.0]
    assert [text.get_text() for text in ax.texts] == ["2.0 MiB", "1.0 MiB"]


def test_traces_have_a_value_at_each_border_and_leave_no_hook() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(torch.randn(1024, 256)).square().mean().backward()

    step()
    trace = trace_memory(step, model)
    assert len(trace) == 8
    assert trace[0] == trace[-1] == 0
    assert trace[1:4] == [2 * MIB, 3 * MIB, 4 * MIB]
    assert trace[4] > trace[5] > trace[6]
    assert not any(module._forward_hooks for module in model)
    ax = plot_trace({"step": trace})
    assert ax.lines[0].get_ydata()[3] == 4.0


@pytest.mark.parametrize("held", [False, True])
def test_compare_steps_of_a_handle(held: bool) -> None:
    """With a handle, where `without` pauses it; and R says so if a hook refers to a part of the offloaded tensors."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    handle = actoffload.offload(model)
    holding: list[torch.Tensor] = []
    if held:
        model[1].register_forward_hook(lambda module, args, output: holding.append(output))

    def step() -> None:
        holding.clear()
        model.zero_grad(set_to_none=False)
        model(torch.randn(1024, 256)).square().mean().backward()

    def without() -> None:
        with handle.paused():
            step()

    result = compare_steps(without, step, handle, repeats=1, steps=1)
    assert result.bytes_offloaded == 4 * MIB
    assert result.drop == (3 if held else 4) * MIB
    assert result.ratio == (0.75 if held else 1.0)
    handle.remove()
