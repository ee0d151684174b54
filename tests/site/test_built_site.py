"""The built site works in a browser: `nox -s docs` names its folder in ACTOFFLOAD_SITE and runs this file.

ACTOFFLOAD_SCREENSHOTS names a folder for pictures of each page at each width, in light and in dark.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from browser import WIDTHS, check_page, check_search, check_theme, serving
from check_site import find_pages

SITE = Path(os.environ.get("ACTOFFLOAD_SITE", ""))
SHOTS = os.environ.get("ACTOFFLOAD_SCREENSHOTS")
NAMES = [page.relative_to(SITE).as_posix() for page in find_pages(SITE)] if "ACTOFFLOAD_SITE" in os.environ else []
pytestmark = pytest.mark.skipif(not NAMES, reason="ACTOFFLOAD_SITE names no built site")


@pytest.fixture(scope="module")
def base():
    with serving(SITE) as address:
        yield address


@pytest.mark.parametrize("name", NAMES)
def test_page(tab, base, name):
    """Loaded in a wide window, which then gets the width of a phone."""
    shot = f"{SHOTS}/{name[:-5].replace('/', '-')}" if SHOTS else ""
    assert check_page(tab, base, name, *WIDTHS.values(), screenshot=shot) == []


def test_search_finds_the_words_that_readers_bring(tab, base):
    assert check_search(tab, base, ["FSDP", "Trainer", "Lightning", "OOM", "num_layers"]) == []
    assert check_search(tab, base, ["qqzzy"], seconds=3) == ["search finds nothing for 'qqzzy'"]


def test_theme_switch(tab, base):
    assert check_theme(tab, base) == []


def test_a_missing_page_leads_back(tab, base):
    tab.get(f"{base}/404.html")
    links = [link.get_attribute("href") for link in tab.find_elements("css selector", "main a, header a")]
    assert f"{base}/index.html" in links


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("gallery/")])
def test_notebooks_open_and_their_code_compiles(name):
    for path in SITE.glob(f"_downloads/*/{Path(name).stem}.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert notebook["nbformat"] == 4
        cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert cells
        for cell in cells:
            compile(cell, path.name, "exec")
