"""On CUDA, waits are found where they happen, in every thread and in backward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sync_helpers
import torch
from gpu_harness import lenient, needs_cuda
from sync_helpers import (
    ITEM,
    ReadsItsGradient,
    hook,
    item,
    line_of,
    mask_index,
    nonzero,
    only,
    reads_activation,
    to_host,
    to_pageable,
)
from torch.utils.checkpoint import checkpoint

from actoffload.report import sync_causes
from actoffload.report.synchronization import find_synchronizations

pytestmark = [pytest.mark.gpu, needs_cuda, *lenient]


@pytest.fixture(autouse=True)
def deterministic() -> None:
    """Leave the kernels as programs have them: deterministic ones may wait where the others do not."""


# -- Places -------------------------------------------------------------------------------------------------


def synchronize(x: torch.Tensor) -> None:
    x * 2
    torch.cuda.synchronize()


def synchronize_accelerator(x: torch.Tensor) -> None:
    x * 2
    torch.accelerator.synchronize()


def synchronize_stream(x: torch.Tensor) -> None:
    stream = torch.cuda.current_stream()
    stream.synchronize()


def synchronize_event(x: torch.Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def synchronize_generic_stream(x: torch.Tensor) -> None:
    stream = torch.Stream(device="cuda")
    stream.synchronize()


def values_to_device(x: torch.Tensor) -> torch.Tensor:
    values = [1.0, 2.0]
    return torch.tensor(values, device="cuda")


@pytest.mark.parametrize(
    ("function", "text", "operation"),
    [
        (item, "y.item()", ITEM),
        (nonzero, "y.nonzero()", "aten::nonzero"),
        (mask_index, "x[mask]", "aten::index"),
        (to_host, "y.cpu()", "aten::_to_copy"),
        (to_pageable, "y.copy_", "aten::copy_"),
        (synchronize, "torch.cuda.synchronize()", "torch.cuda.synchronize"),
        (synchronize_accelerator, "torch.accelerator.synchronize()", "torch.accelerator.synchronize"),
        (synchronize_stream, "stream.synchronize()", "torch.cuda.Stream.synchronize"),
        (synchronize_event, "event.synchronize()", "torch.cuda.Event.synchronize"),
        (synchronize_generic_stream, "stream.synchronize()", None),
        (values_to_device, "torch.tensor(values", None),
    ],
)
def test_the_line_is_named(
    function: Callable[..., Any], text: str, operation: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(16, device="cuda")
    function(x)
    capfd.readouterr()
    with find_synchronizations() as found:
        function(x)
        function(x)
    one = only(found)
    assert (one.file, one.line, one.function) == (
        inspect.getsourcefile(function),
        line_of(function, text),
        function.__name__,
    )
    assert (one.count, one.in_backward) == (2, False)
    if operation is not None:
        assert one.operation == operation
    assert not found.by_operator
    assert torch.cuda.get_sync_debug_mode() == 0
    assert capfd.readouterr() == ("", "")


def test_two_threads() -> None:
    x = torch.ones(16, device="cuda")
    with find_synchronizations() as found:
        threads = [threading.Thread(target=item, args=(x,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    one = only(found)
    assert (one.line, one.count) == (line_of(item, "y.item()"), 4)


@pytest.mark.parametrize("former", [0, 1])
def test_the_mode_is_put_back(former: int) -> None:
    class StopStepError(Exception):
        pass

    def step() -> None:
        assert torch.cuda.get_sync_debug_mode() == 1
        item(torch.ones(16, device="cuda"))
        raise StopStepError

    torch.cuda.set_sync_debug_mode(former)
    try:
        with pytest.raises(StopStepError), find_synchronizations() as found:
            step()
        assert torch.cuda.get_sync_debug_mode() == former
    finally:
        torch.cuda.set_sync_debug_mode(0)
    assert len(found) == 1


def test_values_of_the_host_are_left_out() -> None:
    x = torch.ones(16, device="cuda")
    with find_synchronizations() as found:
        (x * torch.ones(()).item()).sum()
        torch.ones(4)[torch.ones(4) > 0]
    assert not found, str(found)


# -- Backward -----------------------------------------------------------------------------------------------


def test_lines_of_your_own_in_backward() -> None:
    x = torch.ones(16, device="cuda", requires_grad=True)
    y = ReadsItsGradient.apply(x)
    y.register_hook(hook)
    with find_synchronizations() as found:
        y.sum().backward()
    assert [(one.file, one.line, one.in_backward) for one in found] == [
        (sync_helpers.__file__, line_of(hook, "float("), True),
        (sync_helpers.__file__, line_of(ReadsItsGradient.backward, "scale = "), True),
    ]


def test_a_recomputed_forward() -> None:
    x = torch.ones(16, device="cuda", requires_grad=True)
    with find_synchronizations() as found:
        checkpoint(reads_activation, x, use_reentrant=False).sum().backward()
    line = line_of(reads_activation, "item")
    assert [(one.line, one.in_backward) for one in found] == [(line, False), (line, True)]


def test_a_built_in_backward_is_named_by_the_call() -> None:
    def step() -> None:
        x = torch.ones(16, device="cuda", requires_grad=True)
        y = x[x > 0].sum()
        y.backward()

    with find_synchronizations() as found:
        step()
    forward, backward = found
    assert (forward.line, forward.in_backward) == (line_of(step, "x[x > 0]"), False)
    assert (backward.line, backward.in_backward) == (line_of(step, "y.backward()"), True)
    assert backward.why == sync_causes.MASK_BACKWARD.why


def test_a_backward_that_another_thread_calls() -> None:
    x = torch.ones(16, device="cuda", requires_grad=True)
    y = x[x > 0].sum()

    def work() -> None:
        y.backward()

    with find_synchronizations() as found:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    one = only(found)
    assert (one.line, one.in_backward, one.operation) == (
        line_of(work, "y.backward()"),
        True,
        "an operation of backward",
    )
