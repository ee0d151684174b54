"""Reports of the sync debug mode, played by a warning that torch raises on the CPU, and explicit calls."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from sync_helpers import line_of, only

from actoffload.report import sync_causes, sync_watch
from actoffload.report.synchronization import find_synchronizations


class Cuda:
    """Lets the watch believe in CUDA: one of torch's warnings stands for its report of a synchronization."""

    mode: int | str = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Take indexing with uint8, of which torch's C++ code warns in forward and backward, for a synchronization."""
    played = Cuda()
    device_of = sync_watch._device_of
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: played.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(played, "mode", mode))
    monkeypatch.setattr(sync_watch, "_REPORT", "indexing with dtype torch.uint8")
    monkeypatch.setattr(sync_watch, "_device_of", lambda *given: device_of(*given) and "cuda")
    torch.set_warn_always(True)
    yield played
    torch.set_warn_always(False)


BYTES = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)


def test_a_report_is_placed_and_its_operator_is_named(cuda: Cuda, capfd: pytest.CaptureFixture[str]) -> None:
    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        y = x[BYTES].sum()
        y.backward()
        x.sum().item()  # without a report nothing is found on CUDA

    with find_synchronizations() as found:
        assert cuda.mode == "warn"
        step()
    assert cuda.mode == 0
    forward, backward = found
    assert (forward.line, forward.in_backward) == (line_of(step, "x[BYTES]"), False)
    assert (forward.operation, forward.why) == ("aten::index", sync_causes.MASK.why)
    assert (backward.line, backward.in_backward) == (line_of(step, "y.backward()"), True)
    assert (backward.operation, backward.why) == ("aten::index_put", sync_causes.MASK_BACKWARD.why)
    assert not found.by_operator
    assert capfd.readouterr() == ("", "")


def test_a_report_that_comes_when_backward_ends(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that no dispatch mode sees: torch collects its warning until backward ends."""
    y = torch.ones(4, requires_grad=True)[BYTES.bool()].sum()
    z = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z = z[BYTES].sum()
    monkeypatch.setattr(sync_watch, "_Recognizer", lambda watch: warnings.catch_warnings())
    with find_synchronizations() as found:
        y.backward()
        z.backward()
    one = only(found)
    assert "z.backward()" in one.code
    assert (one.in_backward, one.operation, one.why) == (True, "an operation of backward", sync_causes.REPLAYED.why)


def test_a_report_outside_of_operators(cuda: Cuda) -> None:
    with find_synchronizations() as found:
        warnings.warn("indexing with dtype torch.uint8", stacklevel=1)
    one = only(found)
    assert "warnings.warn" in one.code
    assert (one.operation, one.why) == ("no operator", sync_causes.OUTSIDE.why)


def test_reports_of_other_threads(cuda: Cuda) -> None:
    def work() -> None:
        torch.ones(4)[BYTES]

    with find_synchronizations() as found:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    one = only(found)
    assert (one.line, one.count) == (line_of(work, "[BYTES]"), 4)
    assert (one.operation, one.why) == ("an unknown operator", sync_causes.OTHER_THREAD.why)


def test_what_cuda_does_not_report(cuda: Cuda) -> None:
    with find_synchronizations() as found:
        torch.unique(torch.ones(4, 2), dim=0)
        torch.unique_consecutive(torch.ones(4, 2), dim=0)
        torch.unique_consecutive(torch.ones(4))
        torch.unique(torch.ones(4))
    assert [one.operation for one in found] == ["aten::unique_dim", "aten::unique_consecutive"]


def test_host_values_are_left_out_where_an_accelerator_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device_of = sync_watch._device_of
    monkeypatch.setattr(
        sync_watch, "_device_of", lambda args, kwargs: "xpu" if "alpha" in kwargs else device_of(args, kwargs)
    )
    with find_synchronizations() as found:
        torch.ones(()).item()
        assert len(found) == 1
        assert found.by_operator
        torch.add(torch.ones(2), torch.ones(2), alpha=2)
    assert not found
    assert not found.by_operator


def test_other_warnings_go_their_way(cuda: Cuda) -> None:
    with warnings.catch_warnings(record=True) as caught, find_synchronizations() as found:
        warnings.simplefilter("always")
        warnings.warn("something else", stacklevel=1)
        torch.ones(4)[BYTES]
    assert [str(one.message) for one in caught] == ["something else"]
    assert len(found) == 1


@pytest.mark.parametrize("former", [0, 1, 2])
def test_everything_is_put_back_after_an_error(cuda: Cuda, former: int) -> None:
    cuda.mode = former
    show, filters, modes = warnings.showwarning, list(warnings.filters), torch._C._len_torch_dispatch_stack()
    methods = [vars(owner).get(name) for owner, name, _ in sync_watch._explicit_functions()]

    def step() -> None:
        assert torch._C._len_torch_dispatch_stack() == modes + 1
        torch.ones(4)[BYTES]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), find_synchronizations() as found:
        step()
    assert len(found) == 1
    assert cuda.mode == former
    assert warnings.showwarning is show
    assert list(warnings.filters) == filters
    assert torch._C._len_torch_dispatch_stack() == modes
    assert [vars(owner).get(name) for owner, name, _ in sync_watch._explicit_functions()] == methods
    assert {"cpu", "tolist"}.isdisjoint(vars(torch.Tensor))


# -- Explicit calls -----------------------------------------------------------------------------------------


def test_explicit_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_synchronizeDevice", lambda index: calls.append("device"))
    monkeypatch.setattr(torch.accelerator, "_get_device_index", lambda *given, **options: 0)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: calls.append("event"))
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: calls.append("stream"))
    from torch.accelerator import synchronize

    def waits() -> None:
        synchronize()
        torch.cuda.Event.synchronize(None)  # type: ignore[arg-type]
        torch.cuda.Stream.synchronize(None)  # type: ignore[arg-type]

    with find_synchronizations() as found:
        waits()
    assert calls == ["device", "event", "stream"]
    assert [one.operation for one in found] == [
        "torch.accelerator.synchronize",
        "torch.cuda.Event.synchronize",
        "torch.cuda.Stream.synchronize",
    ]
    first = line_of(waits, "        synchronize()")
    assert [one.line for one in found] == [first, first + 1, first + 2]
    assert not found.by_operator
    waits()
    assert len(list(found)) == 3


def test_a_wait_inside_of_an_explicit_call_counts_once(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: torch.ones(4)[BYTES])
    with find_synchronizations() as found:
        torch.cuda.Stream.synchronize(None)  # type: ignore[arg-type]
    one = only(found)
    assert (one.operation, one.count) == ("torch.cuda.Stream.synchronize", 1)
