"""Pages of the site: the API reference, the code of pages, and the list of claims."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "recordings" not in path.parts)]

# The API reference has every public name exactly once, under the package that exports it, and no other name


API = sorted(page for page in (ROOT / "docs" / "api").glob("*.md") if page.stem != "index")
PACKAGES = (
    *("", ".schedule", ".report", ".report.plots", ".context", ".moe", ".device"),
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
    assert sorted(name for page in API for name in documented(page)) == sorted(public())


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_each_page_has_one_package_and_a_table_of_its_names(page):
    module = "actoffload" if page.stem == "actoffload" else f"actoffload.{page.stem}"
    table = re.search(r"autosummary::\n   :nosignatures:\n\n((?:   \w+\n)+)", page.read_text(encoding="utf-8"))
    assert table
    assert [f"{module}.{name}" for name in table[1].split()] == documented(page)


# Doctests lie where they are collected; imports of plain blocks, which no doctest runs, resolve


BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Return page and text of each block."""
    found = ((page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")) for page in PAGES)
    return [(name, textwrap.dedent(block)) for name, text in found for _, block in BLOCK.findall(text)]


@pytest.mark.parametrize(("page", "block"), blocks(), ids=[page for page, _ in blocks()])
def test_imports_resolve(page, block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "actoffload":
                    importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "actoffload":
            module = importlib.import_module(node.module)
            names = {name.name for name in node.names} - {*module.__all__}  # some are made when they are read
            assert [name for name in names if not hasattr(module, name)] == []


DOCTEST = re.compile(r"^```{doctest}\n.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_doctests_lie_in_their_directive(page):
    """Those elsewhere would not be run: neither pytest (conftest.py) nor Sphinx looks at other blocks."""
    assert not re.search(r"^ *>>> ", DOCTEST.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)


def test_a_device_is_taken_only_where_it_is_available():
    """``current_accelerator()`` alone returns "cuda" where PyTorch has CUDA and the machine has no GPU."""
    programs = [*PAGES, *sorted((ROOT / "examples").glob("*.py"))]
    assert len(programs) > 50
    assert [path.name for path in programs if "current_accelerator()" in path.read_text(encoding="utf-8")] == []


# Every page has claims in the list of them, and what the list names exists


LIST = ROOT / "docs" / "development" / "claims.md"
LINE = re.compile(r"^## (\S+)$|^- (.+) → (.+)$", re.MULTILINE)
WITHOUT = {
    "guide/index",
    "integrations/index",
    "migration/index",
    "guide/glossary",
    "changelog",
}  # they link and define


def claims() -> list[tuple[str, str, str]]:
    """Return page, claim and evidence of each line."""
    found, page = [], ""
    for title, claim, evidence in LINE.findall(LIST.read_text(encoding="utf-8")):
        page = title or page
        if not title:
            found.append((page, claim, evidence))
    return found


def test_every_page_is_listed():
    folders = ("", "guide/", "integrations/", "migration/")
    pages = {folder + page.stem for folder in folders for page in (ROOT / "docs" / folder).glob("*.md")}
    assert {page for page, _, _ in claims()} == pages - WITHOUT | {"README"}


@pytest.mark.parametrize(("page", "claim", "evidence"), claims())
def test_what_stands_behind_a_claim_exists(page, claim, evidence):
    named = re.findall(r"`([^`]+)`", evidence)
    has_doctest = "doctest" in re.sub(r"`[^`]+`", "", evidence)
    assert named or has_doctest
    if has_doctest:
        assert "```{doctest}" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert test in {of.name for of in tree.body if isinstance(of, ast.FunctionDef)}, name
