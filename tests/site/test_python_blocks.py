"""Code of pages: doctests lie where they are collected; imports of plain blocks, which no doctest runs, resolve."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "recordings" not in path.parts)]
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
