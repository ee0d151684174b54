"""Equal rows and names made short."""

from __future__ import annotations

import pytest

from actoffload._folding import fold, fold_names, numberless


@pytest.mark.parametrize(
    ("rows", "folded"),
    [
        ("", []),
        ("abc", ["a", "b", "c"]),
        ("aaab", ["aaa", "b"]),
        ("ababab", ["aaa", "bbb"]),
        ("xababy", ["x", "aa", "bb", "y"]),
        ("aabaab", ["aaaa", "bb"]),
    ],
)
def test_equal_rows_are_folded_at_the_place_of_the_first(rows, folded):
    assert ["".join(part) for part in fold(rows, str)] == folded


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ([], ""),
        (["a.0"], "a.0"),
        (["a.0.b", "a.1.b", "a.2.b"], "a.0 ... 2.b"),
        (["a.9", "a.10"], "a.9 ... 10"),
        (["a.0.b", "a.2.b", "a.4.b"], "a.0, 2 ... 4.b"),
        (["a.5", "a.4", "a.3", "a.2"], "a.5, 4 ... 2"),
        (["a.0", "a.2"], "a.0, a.2"),  # not the one between them
        (["a.3", "a.0"], "a.3, a.0"),
        (["a.0.b", "a.1.b", "a.12.b"], "a.0 ... 1.b, a.12.b"),
        (["a.0", "a.1", "a.3", "a.4"], "a.0 ... 1, a.3 ... 4"),
        (["a.0.b.0", "a.1.b.7", "a.2.b.0"], "a.0.b.0, a.1.b.7, a.2.b.0"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0, a.1.b.1"),  # two numbers differ
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
        (["a", "a", "a"], "a (3 times)"),
        (["a.0", "a.0", "a.1", "a.1"], "a.0 (2 times), a.1 (2 times)"),
        (["a.0", "a.1", "a.1", "a.2"], "a.0 ... 1, a.1 ... 2"),
        (["a.1", "b", "a.1"], "a.1, b, a.1"),
        (["0", "1", "2", "3", "8"], "0 ... 3, 8"),
    ],
)
def test_several_names_become_one(names, name):
    assert fold_names(names) == name


def test_numbers_of_names_are_replaced():
    assert numberless("encoder.12.mlp3") == "encoder.#.mlp#"
