"""Numbers with units, and names made short."""

import pytest

from actoffload._text import fold_names, numberless, size, size_or_dash


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["a.0"], "a.0"),
        (["a.0.b", "a.1.b", "a.2.b"], "a.0 ... 2.b"),
        (["a.9", "a.10", "a.11"], "a.9 ... 11"),
        (["a.0.b", "a.2.b", "a.4.b"], "a.0.b, a.2.b, a.4.b"),
        (["a.0", "a.1", "a.3", "a.4"], "a.0, 1, 3 and 1 more"),
        (
            [f"base_model.model.layers.{k}" for k in range(2, 16, 2)],
            "base_model.model.layers.2, 4, 6 and 4 more",
        ),
        ([f"h.{k}" for k in (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13)], "h.0 ... 2, 4 ... 6, 8 ... 10 and 2 more"),
        (["a.0", "b.1", "b.3", "head", "b.5"], "a.0, b.1, 3 and 2 more"),
        (["a.norm1", "a.norm2", "b.norm1"], "a.norm1, a.norm2, b.norm1"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0, a.1.b.1"),  # two numbers differ
        (["a.0", "a.1", "a.1", "a.2", "a.1"], "a.0 ... 2"),
    ],
)
def test_several_names_become_one(names, name):
    assert fold_names(names) == name


def test_numbers_of_names_are_replaced():
    assert numberless("encoder.12.mlp3") == "encoder.#.mlp#"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (-3 * 2**20, "-3.0 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**29, "1.50 GiB"),
    ],
)
def test_bytes_have_the_largest_unit_that_fits(nbytes, text):
    assert size(nbytes) == text
    assert size_or_dash(nbytes) == (text if nbytes else "-")
