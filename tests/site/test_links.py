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


def test_fields_of_public_dataclasses_link_to_their_class():
    from links import public_name

    assert public_name("Saved.needed_at") == "actoffload.schedule.Saved"
    assert public_name("Saved.need_at") is None
    assert public_name("Sawed.needed_at") is None


def test_only_lower_case_names_without_a_dot_count_as_variables():
    from links import names_a_variable
    from sphinx.addnodes import pending_xref

    def reference(target, kind="obj"):
        return pending_xref("", refdomain="py", reftype=kind, reftarget=target)

    assert names_a_variable(reference("num_layers"))
    for target, kind in [("Plam", "obj"), ("plan.foo", "obj"), ("num_layers", "func"), ("a b", "obj")]:
        assert not names_a_variable(reference(target, kind))


def test_public_names_lead_to_the_package_that_exports_them():
    from links import public_name

    assert public_name("Timeline") == "actoffload.schedule.Timeline"
    assert public_name("OffloadContext.record_timeline") == "actoffload.context.OffloadContext.record_timeline"
    assert public_name("Timelime") is None
    assert public_name("OffloadContext.record_timelime") is None
