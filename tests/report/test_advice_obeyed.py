"""Advice is true and leads somewhere: its arguments are passed to `offload`, until there is nothing to do."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from whole_model import UNIT, Transformer, data, offload

from actoffload.report import Report

Make = Callable[[], nn.Module]


def followed(make: Make, options: dict[str, Any]) -> Report:
    """Return the report of a recorded step with these arguments."""
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of arguments that offload nothing, and of a full host
        with offload(model, **options) as handle:
            step(model)
            handle.reset_statistics()
            with handle.recording():
                step(model)
            return handle.report()


def step(model: nn.Module) -> None:
    model(data() * 1.0).sum().backward()


def changes(report: Report) -> list[dict[str, Any]]:
    """Return the arguments that advice names."""
    found: list[dict[str, Any]] = []
    for sentence in report.advice:
        if number := re.search(r"(min_bytes|max_host_bytes)(?:=|, if it is set, to at least )(\d+)", sentence):
            found.append({number[1]: int(number[2])})
    return found


def obey(make: Make, **options: Any) -> list[Report]:
    """Follow the advice with arguments that comes first, again and again; each time something has to improve."""
    reports = [followed(make, options)]
    while found := changes(reports[-1]):
        assert len(reports) < 12, options
        for name, value in found[0].items():
            assert options.get(name) != value, (name, value)
        options = {**options, **found[0]}
        reports.append(followed(make, options))
        before, after = ((each.totals.bytes_saved, each.totals.bytes_offloaded) for each in reports[-2:])
        assert sum(after) > sum(before), (found[0], before, after)
    return reports


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Transformer(8), {}),
        (lambda: Transformer(8), {"min_bytes": 16 * UNIT}),
        (lambda: Transformer(8), {"max_host_bytes": 1}),
        (lambda: Transformer(8), {"min_bytes": 16 * UNIT, "max_host_bytes": 1}),
    ],
)
def test_advice_that_is_followed_leads_to_a_good_report(make, options):
    reports = obey(make, **options)
    last = reports[-1]
    assert last.coverage > 0.8
    assert last.totals.bytes_offloaded > 0
    assert [advice for advice in last.advice if advice.startswith("Nothing to change")] == list(last.advice)
    assert len(reports) <= 5
