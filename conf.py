"""Configuration of the site: pages in docs/, examples of the gallery in examples/, our extensions in docs/_ext/."""

from __future__ import annotations

import doctest
import os
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / folder) for folder in ("docs/_ext", "docs/figures", "src")]

from links import settings  # noqa: E402 - lies in docs/_ext
from recordings import DeviceMemory  # noqa: E402 - lies in docs/_ext

with (ROOT / "pyproject.toml").open("rb") as file:
    _project = tomllib.load(file)["project"]

project = _project["name"]
version = release = _project["version"]
author = "The actoffload authors"
project_copyright = f"2026, {author}"

# Canonical and source links, where [project.urls] says the addresses.
_links = settings(_project.get("urls", {}))
globals().update(_links)

extensions = [
    _links["link_extension"],
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "numpydoc",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "sphinxext.opengraph",
    "notfound.extension",
    "recordings",
    "links",
    "schedule_figures",
    "budget_figures",
]
exclude_patterns = [
    "_*",
    "figures",
    "recordings",
    "gallery/backreferences",
    "gallery/**/*.ipynb",
    "gallery/**/*.md5",
    "README.md",
]
nitpicky = True
show_warning_types = True
# sphinx-gallery generates its pages into docs/gallery and names them relative to docs/.
root_doc = "index"

# -- Pages ----------------------------------------------------------------------------------------------
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist", "attrs_inline"]
myst_heading_anchors = 3
default_role = "py:obj"

# -- API reference --------------------------------------------------------------------------------------
python_maximum_signature_line_length = 80  # longer ones have one argument a line
autosummary_generate = False  # tables on pages that have the objects themselves
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# -- Doctests: the same names and options as in conftest.py, for pages and docstrings ---------------------
doctest_default_flags = doctest.ELLIPSIS
doctest_global_setup = (
    "import torch\nimport actoffload\n"
    "from actoffload import *\nfrom actoffload.device import *\n"
    "from actoffload.report import *\nfrom actoffload.schedule import *\n"
)

# -- Gallery --------------------------------------------------------------------------------------------
# The pages have a box instead of the warning about the reference device, which would contain a machine path.
warnings.filterwarnings("ignore", message="No accelerator found")
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # PEFT asks by an older name

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",  # every example is executed
    "ignore_pattern": r"(^|[\\/])_[^\\/]*\.py$",  # helper modules are not pages
    "within_subsection_order": "recordings.TEACHING_ORDER",
    "show_memory": DeviceMemory(),
    "image_srcset": ["2x"],
    "backreferences_dir": "gallery/backreferences",
    "doc_module": ("actoffload",),
    "download_all_examples": False,
    "write_computation_times": False,  # each page has its own, and scripts of the table load from other hosts
    "show_signature": False,
    "remove_config_comments": True,
    "plot_gallery": True,
    "abort_on_example_error": False,
}
# "auto" executes on an accelerator and shows recorded runs elsewhere: see docs/_ext/recordings.py.
recordings_mode = os.environ.get("ACTOFFLOAD_GALLERY", "auto")

# -- HTML -----------------------------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = "actoffload"
html_domain_indices = False  # the pages of the API list the modules
# Descriptions of pages are their first sentences; the pictures of cards are drawn with fonts from other hosts.
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}
ogp_site_name = "actoffload"
_ways = {
    "get_started": "Get started",
    "guide/index": "Guides",
    "guide/troubleshooting": "Troubleshooting",
    "gallery/index": "Examples",
}
_list = "".join(f'<li><a href="{_links["notfound_urls_prefix"]}{page}.html">{t}</a></li>' for page, t in _ways.items())
notfound_context = {
    "title": "Page not found",
    "body": f"<h1>Page not found</h1><p>There is no page at this address. Search for it, or go to:</p><ul>{_list}</ul>",
}
html_static_path = ["docs/_static"]
templates_path = ["docs/_templates"]
html_css_files = ["custom.css"]
html_js_files = ["fit_width.js"]
html_search_scorer = "docs/_static/search_scorer.js"
html_favicon = "docs/_static/logo.svg"
html_show_sourcelink = False
html_copy_source = False
html_context = {
    "default_mode": "auto",  # light or dark by the system of the reader
    "torch_version": metadata.version("torch"),  # doctests and simulated figures; recordings give their own
}
# Pages at the top of the navigation have no section to navigate.
_top = ("index", "get_started", "benchmarks", "changelog", "explorer", "404", "search", "genindex")
html_sidebars = {page: [] for page in _top}
html_theme_options = {
    "logo": {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo-dark.svg",
        "text": "actoffload",
        "alt_text": "Home page of",
    },
    "icon_links": _links["icon_links"],
    "show_prev_next": True,
    "navbar_align": "left",
    "header_links_before_dropdown": 7,  # the explorer, the changelog and pages for developers are below "More"
    # Gallery pages have the section list on the left; their code and tables need the space on the right.
    "secondary_sidebar_items": {
        **{
            f"{folder}*": ["page-toc"]
            for folder in ("", "api/", "guide/", "integrations/", "migration/", "development/")
        },
        "gallery/*": [],
    },
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_center": ["built-with"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
