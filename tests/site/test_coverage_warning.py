"""The guide on modules: when a warning says that groups cover little, and when only the advice of the report does."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actoffload


class Sines(nn.Module):
    """Saves two thirds outside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sin().cos().sin().cos()
        return x


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({}, True),
        ({"layers": [..., "blocks.0.0"]}, True),
        ({"layers": "blocks"}, False),
        ({"num_layers": 4}, False),
        ({"fraction": 0.5}, False),
        ({"max_inflight": 2}, False),
    ],
)
def test_groups_that_the_first_pass_found_and_others(arguments: dict[str, Any], warned: bool) -> None:
    model = Sines()
    with actoffload.offload(model, min_bytes=0, **arguments) as handle:
        for expected in (warned, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(torch.randn(64, 64)).square().mean().backward()
            assert len(caught) == expected
            assert all("The groups of this Sines cover 33%" in str(each.message) for each in caught)
        report = handle.report()
    assert report.coverage == pytest.approx(1 / 3, abs=0.01)
    assert any("saved outside of the chosen modules" in advice for advice in report.advice)
