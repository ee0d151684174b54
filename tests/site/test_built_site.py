"""The built site works in a browser: `nox -s docs` names its folder in ACTOFFLOAD_SITE and runs this file.

ACTOFFLOAD_SCREENSHOTS names a folder for pictures of each page at each width, in light and in dark.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import WIDTHS, check_page, check_theme, first_result, serving
from check_site import find_pages

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("FSDP", "guide/many_gpus.html"),
        ("Trainer", "integrations/trainer.html"),
        ("Lightning", "integrations/lightning.html"),
        ("OOM", "guide/troubleshooting.html"),
        ("num_layers", "guide/whole_model.html"),
        ("pipeline", "guide/pipelines.html"),
        ("CUDA out of memory", "guide/troubleshooting.html"),
        ("slower", "guide/troubleshooting.html"),
        ("gradient accumulation", "guide/composition.html"),
        ("torch.compile", "guide/composition.html"),
        ("memory_budget", "guide/memory_budget.html"),
        ("pin memory", "guide/hardware.html"),
        ("pinned memory", "guide/hardware.html"),
        ("activation checkpointing", "migration/gradient_checkpointing.html"),
        ("FSDP2", "guide/many_gpus.html"),
        ("host memory full", "guide/troubleshooting.html"),
        ("offload activations", "guide/whole_model.html"),
        ("vram", "guide/troubleshooting.html"),
        ("nan loss", "guide/troubleshooting.html"),
        ("gradients differ", "guide/troubleshooting.html"),
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


LIGHT = ["pipelines", "moe_routing", "manual_synchronization", "basic"]  # at most half a minute each on a CPU
RUN = """
import json, sys
namespace = {"__name__": "__main__", "In": [""]}
with open(sys.argv[1], encoding="utf-8") as file:
    cells = json.load(file)["cells"]
for cell in cells:
    if cell["cell_type"] == "code":
        namespace["In"].append("".join(cell["source"]))
        exec(compile(namespace["In"][-1], sys.argv[1], "exec"), namespace)
"""


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("gallery/")])
def test_notebooks_open_and_their_code_compiles(name):
    for path in SITE.glob(f"_downloads/*/{Path(name).stem}.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert notebook["nbformat"] == 4
        cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert cells
        for cell in cells:
            compile(cell, path.name, "exec")


def test_light_notebooks_run_as_downloaded(tmp_path):
    """In folders that have nothing else, with the packages that are installed and IPython's list of cells."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg"}
    running = {}
    for name in LIGHT:
        (path,) = SITE.resolve().glob(f"_downloads/*/{name}.ipynb")
        (tmp_path / name).mkdir()
        running[name] = subprocess.Popen([sys.executable, "-c", RUN, path], cwd=tmp_path / name, env=environment)
    assert {name: process.wait() for name, process in running.items()} == dict.fromkeys(LIGHT, 0)
