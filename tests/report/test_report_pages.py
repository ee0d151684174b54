"""The report in Markdown: the numbers of the text, and names that mean something there are only names."""

from __future__ import annotations

import re

from report_samples import MIB, attribute, report

from actoffload.report import GroupReport, Report
from actoffload.report.groups import HeldStorage
from actoffload.report.tables import Bytes, Table

NASTY = "layers|0<b>`&*_"


def rows_of_markdown(markdown: str) -> list[list[str]]:
    """Return the cells of all tables in Markdown: a pipe ends a cell unless a backslash comes before it."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_markdown_has_the_numbers_of_the_text():
    rows = rows_of_markdown(report(advice=("Do `this_one` & *that*.",)).to_markdown())
    assert rows[0] == ["group", "offload", "saved", "offloaded", "excluded"]
    assert [re.sub("-+", "-", cell) for cell in rows[1]] == [":-", ":-", "-:", "-:", "-:"]
    assert rows[2] == ["model.layers.0 ... 3 (4 groups)", "yes", "512.0 MiB", "512.0 MiB", "2.0 MiB"]
    assert rows[4] == ["**total**", "**4 of 6**", "**3072.0 MiB**", "**2048.0 MiB**", "**12.0 MiB**"]
    assert report(advice=("Do `this_one` & *that*.",)).to_markdown().endswith("- Do `this_one` & \\*that\\*.")


def test_markdown_keeps_its_columns_whatever_a_module_is_called():
    held = (HeldStorage(NASTY, MIB, (attribute("x|y", NASTY),)),)
    markdown = Report((GroupReport(NASTY, bytes_saved=MIB),), held=held).to_markdown()
    lengths = {len(row) for row in rows_of_markdown(markdown)[:4]}
    assert lengths == {4}
    assert "<b>" not in markdown.replace("\\<b\\>", "")


def test_a_table_has_one_unit():
    """That of the largest number but the totals; what is too small for it is said to be there."""
    rows = (
        ("one", Bytes(3 * 2**20), Bytes(1024)),
        ("two", Bytes(2**19), "-"),
        ("total", Bytes(7 * 2**19), Bytes(1024)),
    )
    table = Table(("group", "saved", "kept"), rows, left=1, sums=True)
    assert table.texts() == [
        ["one", "3.0 MiB", "< 0.1 MiB"],
        ["two", "0.5 MiB", "-"],
        ["total", "3.5 MiB", "< 0.1 MiB"],
    ]
    small = tuple(("each", Bytes(900 * 2**10)) for _ in range(2))
    assert Table(("", ""), (*small, ("total", Bytes(1800 * 2**10))), left=1, sums=True).texts()[-1][1] == "1800.0 KiB"
    assert Table(("", ""), (("few", Bytes(7)),), left=1).texts() == [["few", "7 bytes"]]
