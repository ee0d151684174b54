"""The report as data and text: every number in its place, and every sum from one place."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from report_samples import MIB, attribute, block, report, table

from actoffload.report import GroupReport, Holder, Reason, Report
from actoffload.report.holders import HeldStorage, merge_held
from actoffload.report.report import sum_groups

# Data


def test_weights_are_no_activations_and_refused_storages_count_once():
    group = GroupReport(
        "a",
        bytes_saved=100,
        kept={
            Reason.PARAMETER: (1, 1000),
            Reason.BUFFER: (1, 1000),
            Reason.SMALL: (1, 10),
            Reason.HOST_FULL: (1, 30),  # among the bytes saved
            Reason.SHARED: (1, 7),
        },
    )
    assert group.activation_bytes == 110
    assert group.bytes_kept == 47
    assert Report((group,), outside={Reason.OUTSIDE: (1, 5), Reason.PARAMETER: (1, 9)}).activation_bytes == 115
    assert sum_groups((), "total") == GroupReport("total", calls=0)


def test_r_is_the_share_that_is_gone():
    assert report().r == 0.9375
    assert report(expected_bytes=0, dropped_bytes=0).r is None
    assert report(dropped_bytes=None).r is None


def test_a_dict_goes_through_json():
    held = HeldStorage("model.layers.3", 128 * MIB, (attribute("cache", "a (B)"),))
    data = dataclasses.asdict(report(held=(held,)))
    data = json.loads(json.dumps(data, allow_nan=False))
    assert data["groups"][0]["kept"] == {"parameter": [4, 100 * MIB], "smaller than the limit": [6, 2 * MIB]}
    assert data["held"][0]["holders"] == [{"kind": "attribute", "path": "cache", "owner": "a (B)"}]


# Text


def test_the_table_of_groups_by_hand():
    assert table(str(report()), "group") == [
        ["group", "offload", "saved", "offloaded", "excluded"],
        ["model.layers.0 ... 3 (4 groups, each)", "yes", "512.0 MiB", "512.0 MiB", "2.0 MiB"],
        ["model.layers.4, 5 (2 groups, each)", "no", "512.0 MiB", "-", "2.0 MiB"],
        ["total", "4 of 6", "3.00 GiB", "2.00 GiB", "12.0 MiB"],
    ]


def test_columns_appear_with_their_numbers_only():
    plain = table(str(report()), "group")[0]
    late = block(2, reloaded_on_demand=3, bytes_not_freed=128 * MIB, calls=2, calls_offloaded=2)
    groups = (block(0), GroupReport("head", "Linear", bytes_saved=MIB), late)
    shown = str(report(groups=groups))
    assert "1.00 GiB on the device, of what can be offloaded, and up to 128.0 MiB more that were not freed" in shown
    rows = table(shown, "group")
    assert {"on demand", "not freed", "kind", "calls", "forward", "stalled"}.isdisjoint(plain)
    assert rows[0] == ["group", "kind", "offload", "calls", "saved", "offloaded", "excluded", "on demand", "not freed"]
    assert rows[3] == ["model.layers.2", "Block", "yes", "2", "512.0 MiB", "512.0 MiB", "2.0 MiB", "3", "128.0 MiB"]
    assert rows[4][:3] == ["total", "3 of 4", "4"]  # the cell of the kind is empty


def again(*nbytes: int | None, **more: object) -> Report:
    """Return a report of groups of which some MiB are recomputed and none saved; None for one that is kept."""
    groups = tuple(
        block(k, calls_offloaded=0, bytes_offloaded=0) if each is None else recomputed(k, each * MIB)
        for k, each in enumerate(nbytes)
    )
    return report(groups=groups, **more)


def recomputed(index: int, nbytes: int) -> GroupReport:
    return GroupReport(f"model.layers.{index}", "Block", recomputed=True, bytes_recomputed=nbytes)


def test_what_is_recomputed_has_a_column():
    rows = table(str(again(None, 448, 448)), "group")
    assert rows[0] == ["group", "offload", "saved", "recomputed", "excluded"]
    assert [row[3] for row in rows[1:4]] == ["-", "448.0 MiB", "896.0 MiB"]
    rows = table(str(again(None, 0, 0)), "group")
    assert [row[0] for row in rows[1:3]] == ["model.layers.0", "model.layers.1, 2 (2 groups, each)"]
    assert [row[3] for row in rows[1:4]] == ["-", "yes", "yes"]
    assert (again(None, 448).totals.recomputed, again(None, 448).totals.bytes_recomputed) == (True, 448 * MIB)
    assert not report().totals.recomputed


def test_recomputed_activations_count_in_shares():
    shown = again(None, 448, outside={Reason.OUTSIDE: (1, 300 * MIB)})
    assert shown.coverage == pytest.approx(962 / 1262)
    assert "coverage     76.2 % of the activations lie in groups" in str(shown)


def test_times_are_means_of_folded_groups_and_a_stall_stands_alone():
    def timed(index: int) -> GroupReport:
        stall = 0.004 if index == 3 else 0.0
        times = {"forward_seconds": 0.010 + index * 0.001, "backward_seconds": 0.020, "stall_seconds": stall}
        return block(index, **times)

    text = str(report(groups=tuple(timed(k) for k in range(6)), step_seconds=0.2))
    rows = table(text, "group")
    assert rows[0][-3:] == ["forward", "backward", "stalled"]
    assert [row[0] for row in rows[1:4]] == [
        "model.layers.0 ... 2 (3 groups, each)",
        "model.layers.3",
        "model.layers.4, 5 (2 groups, each)",
    ]
    assert [row[-3:] for row in rows[1:5]] == [
        ["11.00 ms", "20.00 ms", "0.00 ms"],
        ["13.00 ms", "20.00 ms", "4.00 ms"],
        ["14.50 ms", "20.00 ms", "0.00 ms"],
        ["75.00 ms", "120.00 ms", "4.00 ms"],
    ]
    assert "step         200.00 ms, 4.00 ms of it stalled (2.0 %)" in text


def test_the_facts_of_a_report():
    known = {
        "because": "copies of four groups fit beside compute",
        "next_choice": "A fifth group costs 2 ms.",
        "proven_bytes": MIB,
        "samples": 5,
    }
    shown = report(**known)
    assert dict(table(str(shown), "passes")) == {
        "passes": "7",
        "coverage": "91.1 % of the activations lie in groups",
        "plan": known["because"],
        "next choice": known["next_choice"],
        "at the peak": "1.00 GiB on the device, of what can be offloaded",
        "freed": "93.75 %, 1.88 GiB of 2.00 GiB that the plan frees in forward",
        "reloaded": "2.00 GiB: 32 storages ahead, 0 on demand",
        "proven": "1.0 MiB computed again have the same bits, and samples of 5 values since then",
        "host memory": "2.00 GiB allocated, at most 2.00 GiB in use",
    }
    assert set(dict(table(str(report(outside=None)), "passes"))) == {
        "passes",
        "at the peak",
        "freed",
        "reloaded",
        "host memory",
    }


def test_the_first_line_is_what_is_saved_and_what_it_costs_in_time():
    def first(**more: object) -> str:
        return str(report(**more)).split("\n")[0]

    counted = "Saves 2.00 GiB of 3.30 GiB of activations."
    assert first() == counted
    peaks = {"peak_bytes": 3 * 2**30, "baseline_peak_bytes": 5 * 2**30}
    seconds = {"seconds": 0.11, "baseline_seconds": 0.1}
    assert first(**peaks, **seconds) == (
        "Saves 2.00 GiB: the peak is 3.00 GiB instead of about 5.00 GiB. "
        "A pass takes 110.00 ms instead of about 100.00 ms (+10.0 %)."
    )
    assert first(**peaks, **seconds, times=False) == counted, "they are of another device"
    assert first(peak_bytes=5 * 2**30, baseline_peak_bytes=3 * 2**30) == counted, "nothing is saved at the peak"
    replayed = {"groups": (recomputed(0, 448 * MIB), block(5)), "outside": None, "dropped_bytes": 0}
    assert first(**replayed, peak_resident_bytes=512 * MIB).startswith("Saves 448.0 MiB of 962.0 MiB of activations.")
    assert first(**replayed, peak_resident_bytes=900 * MIB).startswith("Saves 60.0 MiB of 962.0 MiB")
    several = {**replayed, "peak_resident_bytes": 4096 * MIB}
    assert not first(**several).startswith("Saves"), "that is the peak of several passes"
    assert first(**{**several, "dropped_bytes": 64 * MIB}).startswith(
        "Saves 64.0 MiB of 962.0 MiB of activations at the"
    )
    assert first(groups=(block(5),)) == "Nothing is offloaded or recomputed."
    assert first(dropped_bytes=None).startswith("group"), "of a pipeline"


def test_what_modules_in_keep_save_does_not_count_as_not_covered():
    outside = {Reason.OUTSIDE: (1, 30), Reason.KEPT: (1, 50), Reason.PARAMETER: (1, 1000)}
    assert Report((GroupReport("a", bytes_saved=70),), outside=outside).coverage == 0.7
    assert Report(outside={Reason.KEPT: (1, 50)}).coverage is None
    assert Report(outside={Reason.SMALL: (1, 50)}).coverage == 0.0


def test_what_was_kept_is_shown_inside_and_outside_with_weights_last():
    assert table(str(report()), "kept on the device") == [
        ["kept on the device", "tensors", "in groups", "outside"],
        ["saved outside of the chosen modules", "2", "-", "300.0 MiB"],
        ["smaller than the limit", "36", "12.0 MiB", "-"],
        ["parameter (always kept)", "25", "600.0 MiB", "50.0 MiB"],
    ]
    assert list(report().kept) == [Reason.PARAMETER, Reason.OUTSIDE, Reason.SMALL]


def test_holders_are_shown_once_for_groups_that_differ_in_numbers():
    held = [HeldStorage(f"layers.{k}", MIB, (attribute(f"cache[{k}]", f"layers.{k} (Block)"),)) for k in range(3)]
    held += [
        HeldStorage(
            "head",
            5 * MIB,
            (Holder("global", "x", "module __main__"), Holder("local variable", "y", "f (a.py:3)")),
        )
    ]
    held += [HeldStorage("tail", MIB, ()), HeldStorage("stem", 1)]
    assert table(str(report(held=tuple(held))), "not freed") == [
        ["not freed", "referenced by", "bytes"],
        ["head", "global `x` of module __main__", "5.0 MiB"],
        ["local variable `y` of f (a.py:3)"],
        ["layers.0 ... 2", "attribute `cache[0]` of layers.0 (Block)", "3.0 MiB"],
        ["tail", "autograd of another graph, a library, or C++", "1.0 MiB"],
        ["stem", "not known: record a step", "1 bytes"],
    ]
    assert merge_held(held)[1] == (("layers.0", "layers.1", "layers.2"), 3 * MIB, held[0].holders)


def test_advice_comes_last_and_an_empty_report_prints():
    assert str(report(advice=("First.", "Second."))).endswith("\n\n- First.\n- Second.")
    assert str(Report()) == (
        "passes       0\n"
        "at the peak  0 bytes on the device, of what can be offloaded\n"
        "host memory  0 bytes allocated, at most 0 bytes in use"
    )


def test_the_guide_explains_each_column_and_each_line():
    guide = (Path(__file__).parents[2] / "docs/guide/reading_the_report.md").read_text("utf-8")
    explained = set(re.findall(r"\*([a-z][a-z ]+)\*", guide))
    groups = (block(0, reloaded_on_demand=3, bytes_not_freed=128 * MIB, stall_seconds=0.1), recomputed(1, MIB))
    times = {"forward_seconds": 1.0, "backward_seconds": 1.0}
    known = {"because": "x", "next_choice": "y", "proven_bytes": 1, "step_seconds": 1.0}
    text = str(report(groups=(dataclasses.replace(groups[0], **times), groups[1]), **known))
    columns, lines = table(text, "group")[0], table(text, "passes")
    assert (len(columns), len(lines)) == (11, 10)
    assert {*columns[1:], *(label for label, *_ in lines)} <= explained


# Folded lines


@pytest.mark.parametrize(
    "other",
    [
        {"name": "head"},
        {"calls_offloaded": 0},
        {"bytes_saved": MIB},
        {"stall_seconds": 0.001},
    ],
)
def test_groups_that_differ_in_anything_shown_have_their_own_lines(other):
    groups = tuple(dataclasses.replace(block(k, stall_seconds=0.0), **(other if k == 2 else {})) for k in range(4))
    rows = table(str(Report(groups)), "group")
    folded = "model.layers.0, 1, 3 (3 groups, each)"
    assert [row[0] for row in rows[1:3]] == [folded, groups[2].name]
