"""Canonical addresses, the repository's link and source links follow from [project.urls]; made-up ones here."""

from __future__ import annotations

import re
from pathlib import Path

URLS = {"Documentation": "https://docs.example.org/actoffload/", "Repository": "https://github.com/example/made-up/"}
PAGE = """
A page
======

Some text.

.. autofunction:: actoffload.offload
"""


def build(root: Path, urls: dict[str, str]) -> dict[str, str]:
    """Build a page with the settings for some addresses; return the pages."""
    from links import settings
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    (root / "docs").mkdir()
    (root / "docs" / "index.rst").write_text(PAGE)
    found = settings(urls)
    extensions = ["sphinx.ext.autodoc", "sphinxext.opengraph", "notfound.extension", found.pop("link_extension")]
    theme = {"icon_links": found.pop("icon_links")}
    config = {**found, "extensions": extensions, "html_theme": "pydata_sphinx_theme", "html_theme_options": theme}
    config |= {"ogp_enable_meta_description": True, "ogp_social_cards": {"enable": False}}
    with patch_docutils(str(root)), docutils_namespace():
        out = root / "out"
        args = (root / "docs", None, out, root / "trees", "html")
        Sphinx(*args, confoverrides=config, status=None, warning=None).build()
    return {path.relative_to(out).as_posix(): path.read_text(encoding="utf-8") for path in out.rglob("*.html")}


def test_addresses_give_canonical_repository_and_source_links(tmp_path):
    pages = build(tmp_path, URLS)
    assert '<link rel="canonical" href="https://docs.example.org/actoffload/index.html" />' in pages["index.html"]
    assert '<meta property="og:url" content="https://docs.example.org/actoffload/index.html"' in pages["index.html"]
    assert 'href="https://github.com/example/made-up/"' in pages["index.html"]
    assert 'href="/actoffload/_static' in pages["404.html"]
    assert not any(name.startswith("_modules") for name in pages)
    pattern = r'href="https://github.com/example/made-up/blob/main/src/actoffload/pipeline/offload.py#L(\d+)-L(\d+)"'
    found = re.search(pattern, pages["index.html"])
    assert found
    source = (Path(__file__).parents[2] / "src" / "actoffload" / "pipeline" / "offload.py").read_text().splitlines()
    assert source[int(found[1]) - 1].startswith("def offload(")
