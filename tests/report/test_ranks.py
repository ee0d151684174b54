"""The reports of many ranks in one table, gathered by real processes and alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import LIMIT, run_ranks
from report_samples import MIB, cells, report
from torch import nn

import actoffload
from actoffload import gather_reports
from actoffload.device import ReferenceDevice, use
from actoffload.report import GroupReport, RankReports, Report

FOURS = (report(),) * 4


def groups(*names: str, nbytes: int = MIB) -> tuple[GroupReport, ...]:
    return tuple(
        GroupReport(name, "layer", calls_offloaded=1, bytes_saved=nbytes, bytes_offloaded=nbytes) for name in names
    )


def lines(text: str) -> list[list[str]]:
    return [cells(line) for line in text.split("\n") if not set(line) <= {"-", " "}]


# The table


def test_equal_ranks_are_one_line_and_the_last_is_of_sums():
    """Not offloaded: of 6 groups of 512 MiB 2 stay, 6 times 2 MiB are small, 300 MiB lie outside; no weights."""
    assert lines(str(RankReports(FOURS, tuple(range(4))))) == [
        ["rank", "offload", "offloaded", "not offloaded", "freed", "at the peak", "host memory", "model.layers.*"],
        [
            "0 ... 3 (4 ranks, each)",
            "4 of 6",
            "2.00 GiB",
            "1.30 GiB",
            "93.75 %",
            "1.00 GiB",
            "2.00 GiB",
            "2.00 GiB",
        ],
        ["total", "8.00 GiB", "5.22 GiB", "8.01 GiB", "8.00 GiB"],  # no sums of R and of peaks
    ]


def test_ranks_of_a_pipeline_have_columns_of_their_own():
    """Other numbers and counts of layers are one column; a cell is empty where there are no such groups, not 0."""
    first = Report((*groups("embed.conv"), *groups(*(f"layers.{k}" for k in range(6)))))
    last = Report((*groups("layers.6", "layers.7"), *groups("head.mixer", nbytes=0)))
    reports = RankReports((first, last), (0, 1))
    assert reports.offloaded == ({"embed.conv": MIB, "layers.*": 6 * MIB}, {"layers.*": 2 * MIB, "head.mixer": 0})
    header, *rows = lines(str(reports))
    assert header[7:] == ["embed.conv", "layers.*", "head.mixer"]
    assert [row[7:] for row in rows[:2]] == [["1.0 MiB", "6.0 MiB"], ["2.0 MiB", "-"]]
    assert rows[2][-3:] == ["1.0 MiB", "8.0 MiB", "-"]


def test_without_groups_and_without_r():
    shown = lines(str(RankReports((Report(), Report(host_bytes=MIB)), (0, 1))))
    assert shown == [
        ["rank", "offload", "offloaded", "not offloaded", "freed", "at the peak", "host memory"],
        ["0", "no", "-", "-", "-", "-", "-"],
        ["1", "no", "-", "-", "-", "-", "1.0 MiB"],
        ["total", "-", "-", "1.0 MiB"],
    ]


# Gathering


class Stage(nn.Module):
    """Some of the layers of a model, under the names that they have in all of it."""

    def __init__(self, names: range) -> None:
        super().__init__()
        layer = lambda: nn.Sequential(nn.Linear(512, 512), nn.GELU())  # noqa: E731
        self.layers = nn.ModuleDict({str(name): layer() for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def of_step(names: range, **options: Any) -> Report:
    """Return the report of a recorded step, in which a list refers to an offloaded tensor."""
    stage, held = Stage(names), []
    next(iter(stage.layers.values()))[1].register_forward_pre_hook(lambda _, args: held.append(args))
    with use(ReferenceDevice()), actoffload.offload(stage, **options) as handle, handle.recording():
        stage(torch.randn(1024, 512)).square().mean().backward()
    return handle.report()


def error(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "no error"


def rank_main(_: torch.device) -> dict[str, Any]:
    """Be one of two ranks of a pipeline, of which the later one has fewer layers, and offloads fewer of them."""
    rank = dist.get_rank()
    mine = of_step(range(6)) if rank == 0 else of_step(range(6, 10), fraction=0.5)
    last = dist.new_group([1])
    both = gather_reports(mine)
    return {
        "both": dataclasses.asdict(both),
        "text": str(both),
        "mine": dataclasses.asdict(mine),
        "not a report": error(lambda: gather_reports(mine if rank == 0 else lambda: mine)),
        "last": error(lambda: gather_reports(mine, last))
        if rank == 0
        else dataclasses.asdict(gather_reports(mine, last)),
    }


pytestmark = pytest.mark.timeout(LIMIT + 300)


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    return run_ranks(rank_main, world=2, device="cpu")


def test_two_processes_see_the_same_table(pair):
    assert pair[0]["both"] == pair[1]["both"]
    assert pair[0]["text"] == pair[1]["text"]
    assert pair[0]["both"] == {"reports": [pair[0]["mine"], pair[1]["mine"]], "ranks": [0, 1]}
    header, first, second, total, *_ = lines(pair[0]["text"])
    assert header[:3] + header[-1:] == ["rank", "offload", "offloaded", "layers.*"]
    assert first[:3] + first[-1:] == ["0", "4 of 6", "16.0 MiB", "16.0 MiB"]
    assert second[:3] + second[-1:] == ["1", "1 of 4", "4.0 MiB", "4.0 MiB"]
    assert total[:2] + total[-1:] == ["total", "20.0 MiB", "20.0 MiB"]


def test_what_one_rank_gets_wrong_is_said_in_all(pair):
    """Also if it cannot be pickled; no rank waits for another."""
    for seen in pair:
        assert seen["not a report"].startswith("TypeError: gather_reports got an object of type function in rank 1;")


def test_a_part_of_the_ranks(pair):
    assert pair[0]["last"].startswith("ValueError: This rank is not in the process group: ")
    assert pair[1]["last"] == {"reports": [pair[1]["mine"]], "ranks": [1]}  # its rank in the group is 0
