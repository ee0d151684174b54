"""A report whose numbers can be added up by hand, and a reader of its tables."""

import re

import torch
from torch import nn

from actoffload.report import GroupReport, Holder, Reason, Report
from actoffload.report.holders import find_all_holders

MIB = 2**20


def attribute(path: str, owner: str) -> Holder:
    return Holder("attribute", path, owner)


def output(path: str) -> Holder:
    return Holder("output", path, "the model")


def input_(path: str) -> Holder:
    return Holder("input", path, "the model")


def block(index: int, **more: object) -> GroupReport:
    """Return a group of 512 MiB, which is offloaded up to the fourth."""
    offloaded = index < 4
    numbers = {
        "kind": "Block",
        "calls_offloaded": int(offloaded),
        "bytes_saved": 512 * MIB,
        "bytes_offloaded": 512 * MIB if offloaded else 0,
        "kept": {Reason.PARAMETER: (4, 100 * MIB), Reason.SMALL: (6, 2 * MIB)},
        "reloaded_ahead": 8 if offloaded else 0,
        "bytes_reloaded": 512 * MIB if offloaded else 0,
    }
    return GroupReport(f"model.layers.{index}", **{**numbers, **more})


def report(**more: object) -> Report:
    numbers = {
        "groups": tuple(block(k) for k in range(6)),
        "outside": {Reason.OUTSIDE: (2, 300 * MIB), Reason.PARAMETER: (1, 50 * MIB)},
        "passes": 7,
        "peak_resident_bytes": 1024 * MIB,
        "host_bytes": 2050 * MIB,
        "host_bytes_high_water": 2048 * MIB,
        "expected_bytes": 2048 * MIB,
        "dropped_bytes": 1920 * MIB,
    }
    return Report(**{**numbers, **more})


class Box:
    """An object with attributes."""


def make() -> torch.Tensor:
    return torch.ones(1000)


def address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()._cdata


def find_holders(where: int, modules: dict[nn.Module, str] | None = None) -> tuple[str, ...]:
    return tuple(map(str, find_all_holders([where], modules)[where]))


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def table(text: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with a word, without rules and its header."""
    blocks = [part.split("\n") for part in text.split("\n\n")]
    lines = next(lines for lines in blocks if lines[0].startswith(first))
    return [cells(line) for line in lines if not set(line) <= {"-", " "}]
