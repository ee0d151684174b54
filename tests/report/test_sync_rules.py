"""What synchronizes and what does not, by operator and arguments; the table of the page is run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sync_table import Row, names, rows
from torch import nn

from actoffload.report import sync_causes
from actoffload.report.synchronization import find_synchronizations

on_cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator would be used")


@on_cpu_only
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.waits)
def test_the_table_of_the_page(row: Row) -> None:
    space = names("cpu")
    if row.without_accelerator:
        with find_synchronizations() as found:
            exec(compile(row.waits, "<row>", "exec"), space)
        assert {one.file for one in found} == {"<row>"}, row.waits
        assert found.by_operator
    space = names("cpu")
    if "stream." not in row.instead and "pin_memory" not in row.instead:
        with find_synchronizations() as found:
            exec(compile(row.instead, "<row>", "exec"), space)
        assert not found, f"{row.instead}\n{found}"


def test_the_table_has_its_lines() -> None:
    assert len(rows()) == 23
    assert len({row.waits for row in rows()}) == 23


@on_cpu_only
@pytest.mark.parametrize(
    "line",
    [
        "x[mask] = 0.0",
        "y = x[labels]",
        "x[labels] = full",
        "x.masked_fill_(mask[:, None], 0.0)",
        "h = torch.histc(x, 4, min=-1, max=1)",
        "n = torch.normal(x, 1.0)",
        "y = x.repeat_interleave(2, 0)",
        "y = x.to(device)",
        "hot = F.one_hot(labels, 8)",
        "hot = F.one_hot(input=labels, num_classes=8)",
        "y = x.sort(); z = x.topk(2); w = x.cumsum(0)",
        "y = F.cross_entropy(x, labels % 4)",
    ],
)
def test_lines_that_do_not_synchronize(line: str) -> None:
    with find_synchronizations() as found:
        exec(compile(line, "<line>", "exec"), names("cpu"))
    assert not found, str(found)


@on_cpu_only
@pytest.mark.parametrize(
    ("line", "operation"),
    [
        ("y = torch.histc(x, 4)", "aten::histc"),
        ("n = torch.normal(x, scale)", "aten::normal"),
        ("y = torch.masked_select(x[:, 0], mask)", "aten::masked_select"),
        ("u = torch.unique_consecutive(labels)", "aten::unique_consecutive"),
        ("u = torch.unique(x, dim=0)", "aten::unique_dim"),
        ("same = torch.allclose(x, x)", "aten::allclose"),
        ("values = labels.tolist()", "torch.Tensor.tolist"),
        ("hot = F.one_hot(labels)", "torch.nn.functional.one_hot"),
        ("hot = F.one_hot(input=labels, num_classes=-1)", "torch.nn.functional.one_hot"),
        ("i = torch.linalg.inv(matrix)", "aten::_linalg_check_errors"),
        ("w = torch.where(mask)", "aten::nonzero"),
        ("x[mask, 0] = 1.0; x[mask, labels[:4] % 4] = 1.0", "aten::index_put_"),
    ],
)
def test_lines_that_synchronize(line: str, operation: str) -> None:
    with find_synchronizations() as found:
        exec(compile(line, "<line>", "exec"), names("cpu"))
    assert {one.operation for one in found} == {operation}


@on_cpu_only
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("scaler.step(optimizer)", "fused=True"),
        ("clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)", "error_if_nonfinite"),
        ("torch.distributions.Normal(x, scale)", "validate_args"),
        ("encoder(x[None], mask=causal)", "is_causal"),
    ],
)
def test_functions_of_torch_that_read_values_have_their_own_advice(line: str, instead: str) -> None:
    with find_synchronizations() as found:
        exec(compile(line, "<line>", "exec"), names("cpu"))
    assert all(instead in one.instead for one in found)
    assert found


@on_cpu_only
def test_a_range_check_of_one_hot_hides_nothing_else() -> None:
    with find_synchronizations() as found:
        exec(compile("hot = F.one_hot(labels, 8)\nn = labels.sum().item()", "<line>", "exec"), names("cpu"))
    assert [one.line for one in found] == [2]


@on_cpu_only
def test_one_hot_in_one_graph() -> None:
    torch._dynamo.reset()
    routed = torch.compile(lambda labels: F.one_hot(labels, 8) * 2, fullgraph=True, backend="aot_eager")
    labels = torch.arange(8)
    with find_synchronizations() as found:
        hot = routed(labels)
    assert not found, str(found)
    assert torch.equal(hot, 2 * torch.eye(8, dtype=torch.int64))
    torch._dynamo.reset()


@on_cpu_only
def test_wrong_arguments_are_told_by_torch_itself() -> None:
    with find_synchronizations(), pytest.raises(TypeError, match="one_hot"):
        F.one_hot(torch.arange(8), classes=8)


@on_cpu_only
def test_what_torch_keeps_on_the_host_is_left_out() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    data = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    with find_synchronizations() as found:
        for batch in data:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not found, str(found)


class Told(torch.Tensor):
    """A tensor that claims to lie on another device and in pinned memory or not."""

    told_device: torch.device
    told_pinned: bool

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.told_device

    def is_pinned(self) -> bool:  # type: ignore[override]
        return self.told_pinned


def told(device: str, pinned: bool = False, size: int = 2) -> torch.Tensor:
    tensor = torch.ones(size).as_subclass(Told)
    tensor.told_device, tensor.told_pinned = torch.device(device), pinned
    return tensor


@pytest.mark.parametrize(
    ("source", "target", "non_blocking", "pinned", "cause"),
    [
        ("cuda", "cpu", False, True, sync_causes.BLOCKING_OUT),
        ("cuda", "cpu", True, True, None),
        ("cuda", "cpu", True, False, sync_causes.PAGEABLE_OUT),
        ("cpu", "cuda", False, True, sync_causes.BLOCKING_IN),
        ("cpu", "cuda", True, False, None),
        ("cuda", "cuda", False, False, None),
        ("cpu", "cpu", False, False, None),
    ],
)
def test_copies(source: str, target: str, non_blocking: bool, pinned: bool, cause: sync_causes.Cause | None) -> None:
    to, of = told(target, pinned), told(source, pinned)
    assert sync_causes.recognised("aten::copy_", (to, of, non_blocking), {}) is cause
    assert sync_causes.recognised("aten::copy_", (to, of), {"non_blocking": non_blocking}) is cause
    unreported = cause if cause is sync_causes.PAGEABLE_OUT else None
    assert sync_causes.unreported("aten::copy_", (to, of, non_blocking), {}) is unreported
    # `_to_copy` makes pinned memory for a copy that is not to block.
    options = {"device": torch.device(target), "non_blocking": non_blocking}
    made = None if cause is sync_causes.PAGEABLE_OUT else cause
    assert sync_causes.recognised("aten::_to_copy", (of,), options) is made
    assert sync_causes.recognised("aten::copy_", (told(target, size=0), told(source, size=0)), {}) is None
