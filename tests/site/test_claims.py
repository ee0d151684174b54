"""Every page has claims in the list of them, and what the list names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
