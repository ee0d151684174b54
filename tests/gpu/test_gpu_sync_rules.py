"""Rules, the table of the page and offloading, held against torch's own reports and against what the host waits for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_harness import forward, lenient, loss, make_input, make_layers, needs_cuda, no_offload, offload
from sync_helpers import item, mask_index, nonzero, only, to_host, to_pageable
from sync_table import Row, names, rows
from torch import nn

from actoffload.report import sync_causes
from actoffload.report.synchronization import find_synchronizations

pytestmark = [pytest.mark.gpu, needs_cuda, *lenient]

REPORT = "called a synchronizing CUDA operation"


@pytest.fixture(autouse=True)
def deterministic() -> None:
    """Leave the kernels as programs have them: deterministic ones may wait where the others do not."""


def reports(function: Callable[[], object]) -> int:
    """Count what torch itself reports, without the helper."""
    former = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(former)
    return sum(REPORT in str(one.message) for one in caught)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.waits)
def test_the_table_of_the_page(row: Row) -> None:
    waits, instead = (compile(text, "<row>", "exec") for text in (row.waits, row.instead))
    for code in (waits, instead):
        exec(code, names("cuda"))  # libraries set themselves up in the first call
    space = names("cuda")
    with find_synchronizations() as found:
        exec(waits, space)
    assert {one.file for one in found} == {"<row>"}, row.waits
    space = names("cuda")
    assert reports(lambda: exec(instead, space)) == 0, row.instead
    space = names("cuda")
    with find_synchronizations() as found:
        exec(instead, space)
    assert not found, f"{row.instead}\n{found}"


@pytest.mark.parametrize(
    "line",
    [
        "loss.item()",
        "x[mask]",
        "x[mask] = rows",
        "x[mask] = 0.0",
        "x[labels % 8]",
        "x[labels] = full",
        "mask.nonzero()",
        "torch.masked_select(x[:, 0], mask)",
        "torch.unique(labels)",
        "torch.unique_consecutive(labels)",
        "torch.equal(x, full)",
        "torch.allclose(x, full)",
        "torch.bincount(labels)",
        "torch.histc(x, 4)",
        "torch.histc(x, 4, min=-1, max=1)",
        "torch.normal(x, scale)",
        "torch.normal(x, 1.0)",
        "x.repeat_interleave(repeats, 0)",
        "x.repeat_interleave(repeats, 0, output_size=16)",
        "torch.linalg.cholesky(matrix)",
        "x.cpu()",
        "x.to('cpu', non_blocking=True)",
        "host.to('cuda')",
        "host.to('cuda', non_blocking=True)",
        "host_pinned.copy_(x, non_blocking=True)",
        "host_pinned.copy_(x)",
    ],
)
def test_the_rules_agree_with_the_sync_debug_mode(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge by name and arguments, as on other devices, and compare with what torch reports on this one."""
    code = compile(line, "<line>", "exec")
    exec(code, names("cuda"))
    space = names("cuda")
    reported = reports(lambda: exec(code, space))
    judged: list[str] = []
    original = sync_causes.unreported

    def judge(name: str, args: Any, kwargs: Any) -> Any:
        if sync_causes.recognised(name, args, kwargs) is not None:
            judged.append(name)
        return original(name, args, kwargs)

    space = names("cuda")
    monkeypatch.setattr("actoffload.report.sync_watch.unreported", judge)
    with find_synchronizations() as found:
        exec(code, space)
    # `unreported` is asked only where torch said nothing: there the rules may claim nothing either.
    assert judged == []
    assert bool(found) == bool(reported)
    assert all(not one.why.startswith("waits for the device inside of") for one in found), str(found)


def test_waits_that_torch_does_not_report() -> None:
    x = torch.ones(16, 2, device="cuda")

    def distinct_rows() -> None:
        torch.unique(x, dim=0)

    distinct_rows()
    with find_synchronizations() as found:
        distinct_rows()
    one = only(found)
    assert one.operation == "aten::unique_dim"
    assert host_waits(distinct_rows)


# -- What a wait does, and who waits not --------------------------------------------------------------------


def host_waits(function: Callable[[], object]) -> bool:
    """Tell whether the host gets past `function` only after the device has done what was queued before."""
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # clock cycles: a fifth of a second, far longer than any launch
    done.record()
    function()
    waited = done.query()
    torch.cuda.synchronize()
    return waited


@pytest.mark.parametrize("function", [item, nonzero, mask_index, to_host, to_pageable])
def test_the_host_does_wait(function: Callable[..., Any]) -> None:
    x = torch.ones(16, device="cuda")
    function(x)
    assert host_waits(lambda: function(x))


def step_of(count: int, pair: Any) -> Callable[[], torch.Tensor]:
    layers = make_layers("mlp", count)
    optimizer = torch.optim.AdamW(layers.parameters())
    x = make_input(layers)

    def step() -> torch.Tensor:
        value = loss(forward(layers, x, pair))
        value.backward()
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


@pytest.fixture(params=["plain", "offloaded"])
def asynchronous_step(request: pytest.FixtureRequest) -> Callable[[], torch.Tensor]:
    step = step_of(8, offload(4, 8) if request.param == "offloaded" else no_offload())
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step


def test_an_asynchronous_step_finds_nothing(asynchronous_step: Callable[[], torch.Tensor]) -> None:
    with find_synchronizations() as found:
        asynchronous_step()
    assert not found, str(found)


def test_the_host_runs_ahead_of_an_asynchronous_step(asynchronous_step: Callable[[], torch.Tensor]) -> None:
    assert reports(asynchronous_step) == 0
    assert not host_waits(asynchronous_step)
    assert host_waits(lambda: asynchronous_step().item())
