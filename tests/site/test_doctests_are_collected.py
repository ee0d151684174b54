"""Every doctest of a page or a docstring is collected by pytest."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Collected:
    """A plugin of pytest that notes what is collected."""

    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]


@pytest.fixture(scope="module")
def collected():
    """In this process: another one would import torch first."""
    plugin, options = Collected(), ["--collect-only", "-q", "-s", "-p", "no:cacheprovider"]
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*options, "src", "docs", "README.md"], plugins=[plugin])
    assert code == 0, output.getvalue()
    return plugin.names


def test_blocks_of_the_pages(collected):
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert {page.parent.name for page in pages} >= {"docs", "guide"}
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        wanted = len(re.findall(r"^>>> ", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert sum(each.startswith(f"{name}::line:") for each in collected) == wanted, name


def test_python_of_the_readme(collected):
    wanted = (ROOT / "README.md").read_text(encoding="utf-8").count("```python\n")
    assert wanted >= 1
    assert sum(name.startswith("README.md::line:") for name in collected) == wanted


def test_docstrings_of_the_library(collected):
    for path in sorted((ROOT / "src").rglob("*.py")):
        if re.search(r"^ +>>> ", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert any(name.startswith(path.relative_to(ROOT).as_posix() + "::") for name in collected), path
