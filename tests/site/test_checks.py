"""The checks of the built site find broken links and broken pages."""

from __future__ import annotations

import pytest

# With an icon: the browser requests one some time after the page, and a missing one would be reported for a later page.
HEAD = "<!doctype html><html><head><link rel='icon' href='data:,'></head>"
GOOD = HEAD + "<body><main><h1 id='one'>Title</h1><p>{0}</p>{1}</main></body></html>"
PIXEL = "<svg xmlns='http://www.w3.org/2000/svg' width='4' height='4'><rect width='4' height='4'/></svg>"


@pytest.fixture
def site(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "pixel.svg").write_text(PIXEL)
    write(tmp_path / "index.html", "<a href='sub/other.html#one'>a</a><img src='pixel.svg'>")
    write(
        tmp_path / "sub" / "other.html",
        "<a href='../index.html#one'>b</a><a href='https://example.org/x'>c</a>",
    )
    return tmp_path


def write(path, body):
    path.write_text(GOOD.format("Some text that fills the main part of this page well enough. ", body))


def test_a_site_without_broken_links_passes(site):
    from check_links import check_site

    assert check_site(site) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<a href='missing.html'>x</a>", "missing.html leads to no file."),
        ("<a href='sub/other.html#two'>x</a>", "other.html#two names an anchor that the page does not have."),
        ("<a href='#two'>x</a>", "#two names an anchor that the page does not have."),
        ("<img src='gone.png'>", "gone.png leads to no file."),
        ("<img srcset='pixel.svg 1x, gone.png 2x'>", "gone.png leads to no file."),
        ("<a href='../outside.html'>x</a>", "../outside.html leads out of the site."),
    ],
)
def test_broken_links_are_found(site, body, message):
    from check_links import check_site

    write(site / "index.html", body)
    (problem,) = check_site(site)
    assert problem.startswith("index.html:1: ")
    assert problem.endswith(message)


@pytest.mark.timeout(120)
def test_the_browser_finds_broken_pages(site):
    from cdp import browser, find_browser
    from check_browser import check_page
    from serve import serving

    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome is installed")
    write(site / "bad.html", "<img src='gone.png'><script>console.error('said'); undefinedName()</script>")
    write(site / "wide.html", "<div style='width: 3000px'>wide</div>")
    (site / "empty.html").write_text(HEAD + "<body><main></main></body></html>")
    cells = (
        "<table style='width: {}px'><tr><td>what it is</td><td style='text-align: right'>3136.0 MiB</td></tr></table>"
    )
    write(site / "whole.html", cells.format(400))
    write(site / "split.html", cells.format(10))
    write(site / "other.html", "<script src='http://127.0.0.2:9/x.js'></script>")
    with serving(site) as base, browser(path) as tab:
        assert check_page(tab, base, "index.html", 1280, 900) == []
        bad = "\n".join(check_page(tab, base, "bad.html", 1280, 900))
        assert "console error: said" in bad
        assert "undefinedName is not defined" in bad
        assert "status 404" in bad
        assert "image is not drawn" in bad
        assert check_page(tab, base, "whole.html", 1280, 900) == []
        split = check_page(tab, base, "split.html", 1280, 900)
        assert split == ["numbers are split over lines: 3136.0 MiB"]
        assert any("wider than the window" in p for p in check_page(tab, base, "wide.html", 390, 844))
        assert "the main part has no heading" in check_page(tab, base, "empty.html", 1280, 900)
        assert any("loads from another host" in p for p in check_page(tab, base, "other.html", 1280, 900))
