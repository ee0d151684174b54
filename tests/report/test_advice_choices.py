"""What a report advises where nothing is offloaded: the argument that keeps everything, and no other."""

from __future__ import annotations

import pytest
from torch import nn
from whole_model import Transformer, data, offload

from actoffload.report import GroupReport, Report
from actoffload.report.advice import advise


def groups(*calls: int) -> tuple[GroupReport, ...]:
    return tuple(GroupReport(f"layers.{k}", "Block", calls=n, bytes_saved=2**20) for k, n in enumerate(calls))


def test_a_fraction_of_nothing_is_not_taken_for_the_number_of_layers():
    report = Report(groups(1, 1, 1, 1, 1), passes=3, num_layers=3)
    assert advise(report) == ("None of 5 groups is offloaded: pass fraction=0.34 or more.",)
    assert advise(report)[0].change == {"fraction": 0.34}
    report = Report(groups(1, 1, 1, 1, 1), passes=3, num_layers=0)
    assert advise(report) == ("None of 5 groups is offloaded: pass num_layers=1 or more.",)


@pytest.mark.parametrize("num_layers", [0, 3])
def test_where_one_group_runs_neither_number_nor_fraction_changes_anything(num_layers):
    (sentence,) = advise(Report(groups(0, 0, 1, 0), passes=3, num_layers=num_layers))
    assert "None of 4 groups" in sentence
    assert sentence.endswith("choose several with layers.")


def test_the_advice_of_a_model_may_be_followed():
    model = Transformer(6)
    handle = offload(model, fraction=0.0)
    model(data()).sum().backward()
    assert handle.report().advice[0] == "None of 6 groups is offloaded: pass fraction=0.25 or more."
    change = handle.report().advice[0].change
    handle.remove()
    handle = offload(model, **change)
    model(data()).sum().backward()
    assert len(handle.report().offloaded_groups) == 1


class OneOfSix(Transformer):
    """Runs another one of its blocks in each forward."""

    def forward(self, x):
        self.turn = getattr(self, "turn", -1) + 1
        return self.blocks[self.turn % 6](self.inp(x))


def test_what_was_copied_for_a_longer_pass_is_explained():
    model: nn.Module = OneOfSix()
    handle = offload(model, num_layers=3)
    model(data()).sum().backward()
    report = handle.report()
    assert report.totals.bytes_wasted == report.totals.bytes_offloaded > 0
    assert not report.offloaded_groups
    assert "kept because the execution order changed" in str(report)
    assert "share the storages" not in str(report)
