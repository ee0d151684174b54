"""Equal rows and names made short."""

from __future__ import annotations

import pytest

from actoffload.report.folding import fold, name_of_all, numberless


@pytest.mark.parametrize(
    ("rows", "folded"),
    [
        ("", []),
        ("abc", ["a", "b", "c"]),
        ("aaab", ["aaa", "b"]),
        ("ababab", ["aaa", "bbb"]),
        ("xababy", ["x", "aa", "bb", "y"]),
        ("aabb", ["aa", "bb"]),
        ("aabaab", ["aa", "aa", "bb"]),
        ("abcabcd", ["aa", "bb", "cc", "d"]),
    ],
)
def test_rows_and_patterns_of_rows_are_folded(rows, folded):
    assert ["".join(part) for part in fold(rows, str)] == folded
    assert sorted("".join(folded)) == sorted(rows)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["a.0"], "a.0"),
        (["a.0.b", "a.1.b", "a.2.b"], "a.0 … 2.b"),
        (["a.9", "a.10"], "a.9 … 10"),
        (["a.0.b", "a.2.b", "a.4.b"], "a.0, 2 … 4.b"),
        (["a.5", "a.4", "a.3", "a.2"], "a.5, 4 … 2"),
        (["a.0", "a.2"], "a.0, a.2"),  # not the one between them
        (["a.3", "a.0"], "a.3, a.0"),
        (["a.0.b", "a.1.b", "a.12.b"], "a.0.b, a.1.b, a.12.b"),
        (["a.0", "a.1", "a.3", "a.4"], "a.0, a.1 and 2 more"),
        (["a.0.b.0", "a.1.b.7", "a.2.b.0"], "a.0.b.0, a.1.b.7, a.2.b.0"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0, a.1.b.1"),  # two numbers differ
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d"], "a, b and 2 more"),
        (["a.0", "a.0"], "a.0, a.0"),
    ],
)
def test_several_names_become_one(names, name):
    assert name_of_all(names) == name


def test_names_without_numbers():
    assert numberless("encoder.12.mlp3") == "encoder.#.mlp#"
