"""Names that exist become links to other manuals; misspelt ones stay unresolved."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("int", "functions.html#int"),
        ("list", "stdtypes.html#list"),
        ("None", "constants.html#None"),
        ("ValueError", "exceptions.html#ValueError"),
        ("collections.abc.Callable", "collections.abc.html#collections.abc.Callable"),
        ("torch.Tensor", "tensors.html#torch.Tensor"),
    ],
)
def test_known_names(name, ending):
    from links import external_page

    assert external_page(name).endswith("/" + ending)


@pytest.mark.parametrize("name", ["collections.abc.Colable", "torch.Tenser", "inte", "os.nothing", "numpy.ndarray"])
def test_misspelt_names_stay_unresolved(name):
    from links import external_page

    assert external_page(name) is None


def test_listed_names_of_torch_exist():
    import importlib

    from links import TORCH_NAMES, TORCH_PAGES

    assert set(TORCH_NAMES.values()) <= set(TORCH_PAGES)
    for name in TORCH_PAGES | TORCH_NAMES:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_public_names_lead_to_the_package_that_exports_them():
    from links import public_name

    assert public_name("Timeline") == "actoffload.schedule.Timeline"
    assert public_name("OffloadContext.record_timeline") == "actoffload.context.OffloadContext.record_timeline"
    assert public_name("Timelime") is None
    assert public_name("OffloadContext.record_timelime") is None
