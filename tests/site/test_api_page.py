"""The API reference has every public name exactly once, under the package that exports it, and no other name."""

import importlib
import re
from pathlib import Path

import pytest

PAGES = sorted(page for page in (Path(__file__).parents[2] / "docs" / "api").glob("*.md") if page.stem != "index")
PACKAGES = (
    *("", ".planner", ".schedule", ".report", ".report.plots", ".context", ".moe", ".device"),
    *(".measure", ".machine", ".integrations"),
)


def public() -> set[str]:
    """Return the public names; a name of two packages, such as `gather_reports`, counts for the first one."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(f"actoffload{package}")
        for name in module.__all__:
            found.setdefault(name, f"{module.__name__}.{name}")
    return set(found.values())


def documented(page: Path) -> list[str]:
    """Return the names that a page documents."""
    found, module = [], ""
    text = page.read_text(encoding="utf-8")
    for kind, name in re.findall(r"^\.\. (currentmodule|auto(?!module|summary)\w+):: ([\w.]+)", text, re.MULTILINE):
        if kind == "currentmodule":
            module = name
        else:
            found.append(f"{module}.{name}")
    return found


def test_the_pages_document_exactly_the_public_names():
    assert sorted(name for page in PAGES for name in documented(page)) == sorted(public())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_has_one_package_and_a_table_of_its_names(page):
    module = "actoffload" if page.stem == "actoffload" else f"actoffload.{page.stem}"
    table = re.search(r"autosummary::\n   :nosignatures:\n\n((?:   \w+\n)+)", page.read_text(encoding="utf-8"))
    assert table
    assert [f"{module}.{name}" for name in table[1].split()] == documented(page)
