"""The built site works in a browser: `nox -s docs` names its folder in ACTOFFLOAD_SITE and runs this file."""

import os
from pathlib import Path

import pytest
from browser import WIDTHS, check_page, check_theme, first_result, serving
from check_site import find_pages

SITE = Path(os.environ.get("ACTOFFLOAD_SITE", ""))
NAMES = [page.relative_to(SITE).as_posix() for page in find_pages(SITE)] if "ACTOFFLOAD_SITE" in os.environ else []
pytestmark = pytest.mark.skipif(not NAMES, reason="ACTOFFLOAD_SITE names no built site")


@pytest.fixture(scope="module")
def base():
    with serving(SITE) as address:
        yield address


@pytest.mark.parametrize("name", NAMES)
def test_page(tab, base, name):
    """Loaded in a wide window, which then gets the width of a phone."""
    assert check_page(tab, base, name, *WIDTHS.values()) == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("FSDP", "guide/many_gpus.html"),
        ("Trainer", "integrations/trainer.html"),
        ("Lightning", "integrations/lightning.html"),
        ("OOM", "guide/troubleshooting.html"),
        ("num_layers", "guide/whole_model.html"),
        ("pipeline", "guide/pipelines.html"),
        ("gradient accumulation", "guide/composition.html"),
        ("torch.compile", "guide/composition.html"),
        ("memory_budget", "guide/memory_budget.html"),
        ("pin memory", "guide/hardware.html"),
        ("activation checkpointing", "migration/gradient_checkpointing.html"),
        ("host memory full", "guide/troubleshooting.html"),
        ("nan loss", "guide/troubleshooting.html"),
        ("deepspeed", "migration/index.html"),
    ],
)
def test_the_first_result_of_a_search_is_the_page_that_a_reader_wants(tab, base, words, page):
    assert first_result(tab, base, words) == page


def test_theme_switch(tab, base):
    assert check_theme(tab, base) == []


def test_a_missing_page_leads_back(tab, base):
    tab.get(f"{base}/404.html")
    links = [link.get_attribute("href") for link in tab.find_elements("css selector", "header a")]
    assert f"{base}/index.html" in links
    links = [link.get_attribute("href") for link in tab.find_elements("css selector", "article a")]
    ways = ("get_started", "guide/index", "guide/troubleshooting", "gallery/index")
    assert [link for link in links if "#" not in link] == [f"{base}/{way}.html" for way in ways]
