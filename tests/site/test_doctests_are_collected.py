"""Every doctest of a page or a docstring is collected by pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def collected():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "src", "docs", "README.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_blocks_of_the_pages(collected):
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert {page.parent.name for page in pages} >= {"docs", "guide"}
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        wanted = len(re.findall(r"^>>> ", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert len(re.findall(rf"^{re.escape(name)}::line:", collected, re.MULTILINE)) == wanted, name


def test_python_of_the_readme(collected):
    wanted = (ROOT / "README.md").read_text(encoding="utf-8").count("```python\n")
    assert wanted >= 1
    assert collected.count("README.md::line:") == wanted


def test_docstrings_of_the_library(collected):
    for path in sorted((ROOT / "src").rglob("*.py")):
        if re.search(r"^ +>>> ", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert path.relative_to(ROOT).as_posix() + "::" in collected, path
