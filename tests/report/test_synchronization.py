"""Lines that synchronize are found with the right place, and nothing is left behind."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sync_helpers
import torch
import torch.nn.functional as F
from sync_helpers import (
    ITEM,
    ReadsItsGradient,
    as_bool,
    hook,
    item,
    line_of,
    mask_index,
    nonzero,
    only,
    reads_activation,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from actoffload.report import sync_frames
from actoffload.report.synchronization import find_synchronizations

# -- Places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "text", "operation"),
    [
        (item, "y.item()", ITEM),
        (as_bool, "if y", ITEM),
        (mask_index, "x[mask]", "aten::index"),
        (nonzero, "y.nonzero()", "aten::nonzero"),
    ],
)
def test_the_line_is_named(function: Callable[..., Any], text: str, operation: str) -> None:
    with find_synchronizations() as found:
        for _ in range(3):
            function(torch.ones(4))
    one = only(found)
    assert (one.file, one.line) == (sync_helpers.__file__, line_of(function, text))
    assert (one.function, one.operation, one.count, one.in_backward) == (function.__name__, operation, 3, False)
    assert text in one.code
    assert one.why
    assert one.instead
    assert one.inside == ""
    assert found.count == 3


def test_a_line_of_a_package_is_named_beside_the_line_that_called_it(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "their_package.py"
    package.parent.mkdir()
    package.write_text("def read(x):\n    return x.item()\n")
    space: dict[str, Any] = {}
    exec(compile(package.read_text(), str(package), "exec"), space)
    with find_synchronizations() as found:
        space["read"](torch.ones(()))
    one = only(found)
    assert (one.file, "read" in one.code) == (__file__, True)
    assert one.inside == f"{package}:2"
    assert "inside their_package.py:2" in str(found)


def test_a_package_is_named_where_nothing_else_is_there(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "their_package.py"
    space: dict[str, Any] = {"sys": sys, "place_of": sync_frames.place_of}
    exec(compile("def place():\n    return place_of(sys._getframe())", str(package), "exec"), space)
    found: list[sync_frames.Place] = []
    space["found"] = found
    exec(compile("def run():\n    found.append(place())", str(package), "exec"), space)
    thread = threading.Thread(target=space["run"])
    thread.start()
    thread.join()
    assert found == [sync_frames.Place(sync_frames.Line(str(package), 2, "place"))]


def test_code_without_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with find_synchronizations() as found:
        exec(compile("def f(x):\n    x.item()\nf(x)", "<typed at a prompt>", "exec"), {"x": torch.ones(())})
    one = only(found)
    assert (one.file, one.line, one.function, one.code) == ("<typed at a prompt>", 2, "f", "")
    assert "<typed at a prompt>:2 in f, once\n  aten::item" in str(found)


def test_the_source_is_read_when_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def cache(*lines: str) -> None:
        monkeypatch.setitem(linecache.cache, "<cell>", (0, None, list(lines), "<cell>"))  # type: ignore[misc]

    cache("x = 1\n", "x.item()\n")
    with find_synchronizations() as found:
        exec(compile("x = x\nx.item()", "<cell>", "exec"), {"x": torch.ones(())})
        assert only(found).code == "x.item()"
        cache("x = 1\n", "x.item()  # edited\n")
    cache("another cell\n")
    assert only(found).code == "x.item()  # edited"


def test_own_package_is_skipped_as_torch_is() -> None:
    import actoffload

    context, sync = actoffload.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    with find_synchronizations() as found:
        with context:
            y = torch.ones(1024, 512, requires_grad=True).square()
        sync(y).sum().backward()
    assert not found, str(found)


# -- Backward -----------------------------------------------------------------------------------------------


def test_lines_of_your_own_in_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    y = ReadsItsGradient.apply(x)
    y.register_hook(hook)
    with find_synchronizations() as found:
        y.sum().backward()
    assert [(one.line, one.in_backward) for one in found] == [
        (line_of(hook, "float("), True),
        (line_of(ReadsItsGradient.backward, "scale = "), True),
    ]
    assert [one.function for one in found] == ["hook", "ReadsItsGradient.backward"]
    assert ", once, in backward" in str(found)


def test_a_recomputed_forward_is_told_apart() -> None:
    x = torch.ones(4, requires_grad=True)
    with find_synchronizations() as found:
        checkpoint(reads_activation, x, use_reentrant=False).sum().backward()
    line = line_of(reads_activation, "item")
    assert [(one.line, one.in_backward, one.count) for one in found] == [(line, False, 1), (line, True, 1)]


def test_a_built_in_backward_is_named_by_the_call() -> None:
    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        y = x[torch.tensor([True, False, True, True])].sum()
        y.backward()

    with find_synchronizations() as found:
        step()
    forward, backward = found
    assert (forward.line, forward.in_backward) == (line_of(step, "x[torch"), False)
    assert (backward.line, backward.in_backward) == (line_of(step, "backward()"), True)
    assert "backward of x[mask]" in backward.why


def test_a_thread_of_autograd_is_placed_where_backward_was_called() -> None:
    placed: list[sync_frames.Place] = []
    caller = threading.get_ident()

    def look() -> None:
        placed.append(sync_frames.place_of(None, backward_of=caller))

    def other_thread(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    y = torch.ones(2, requires_grad=True) * 2
    y.register_hook(other_thread)
    y.sum().backward()
    look()
    inside, outside = placed
    assert inside.line.function.endswith("other_thread")  # here a hook is what the caller is busy with
    assert outside == sync_frames.UNKNOWN


# -- As a whole ---------------------------------------------------------------------------------------------


def test_values_are_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(16, 4)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        F.mse_loss(model(x)[x[:, 0] > 0], torch.ones(1).expand(int((x[:, 0] > 0).sum()), 1)).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with find_synchronizations():
        watched = gradients()
    assert all(torch.equal(a, b) for a, b in zip(expected, watched, strict=True))


def test_compiled_code_stays_compiled() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    function = torch.compile(lambda x: (x * 2).sin(), backend=counter)
    function(torch.ones(4))
    with find_synchronizations() as found:
        function(torch.ones(4)).sum().item()
        torch.compile(lambda x: (x * 3).sin(), backend=counter)(torch.ones(4))
    assert counter.frame_count == 2
    assert only(found).operation == ITEM


def test_texts() -> None:
    with find_synchronizations() as found:
        pass
    assert str(found) == "No synchronization was found."
    assert (len(found), bool(found), repr(found)) == (0, False, "Synchronizations(0 found, 0 times)")
    with find_synchronizations() as found:
        torch.ones(()).item()
    text = str(found)
    assert text.startswith("The host waits for the device once, at 1 line.\n\n")
    one = only(found)
    assert f":{one.line} in test_texts, once\n    torch.ones(()).item()\n  {ITEM}: {one.why}\n  instead: " in text
    assert text.endswith("tensors on the CPU were taken for tensors on a device.")
    plain = found.to_dict()
    assert plain["count"] == 1
    assert plain["by_operator"] is True
    assert plain["synchronizations"][0] == {
        "file": __file__,
        "line": one.line,
        "function": "test_texts",
        "code": "torch.ones(()).item()",
        "operation": ITEM,
        "count": 1,
        "in_backward": False,
        "why": one.why,
        "instead": one.instead,
        "inside": "",
    }


def test_one_block_at_a_time() -> None:
    with (
        find_synchronizations(),
        pytest.raises(RuntimeError, match=r"running already.*leave its block"),
        find_synchronizations(),
    ):
        pass
    with find_synchronizations() as found:
        pass
    assert not found
