"""The API reference has every public name exactly once, under the package that exports it, and no other name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
PACKAGES = ("", ".planner", ".schedule", ".report", ".pipeline", ".context", ".moe", ".device")


def public() -> set[str]:
    """Return the public names; a name of two packages, such as `gather_reports`, counts for the first one."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(f"actoffload{package}")
        for name in module.__all__:
            found.setdefault(name, f"{module.__name__}.{name}")
    return set(found.values())


def test_the_page_documents_exactly_the_public_names():
    text = PAGE.read_text(encoding="utf-8")
    named, module = [], ""
    for kind, name in re.findall(r"^\.\. (currentmodule|auto(?!module)\w+):: ([\w.]+)", text, re.MULTILINE):
        if kind == "currentmodule":
            module = name
        else:
            named.append(f"{module}.{name}")
    assert sorted(named) == sorted(public())


def test_every_public_name_has_a_docstring():
    for name in public():
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name
