"""Links of names to other manuals, and the checks of the built site."""

import pytest


def test_listed_names_of_torch_exist():
    import importlib

    from links import TORCH_NAMES, TORCH_PAGES

    assert set(TORCH_NAMES.values()) <= set(TORCH_PAGES)
    for name in TORCH_PAGES | TORCH_NAMES:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


# With an icon: the browser requests one some time after the page, and a missing one would be reported for a later page.
HEAD = "<!doctype html><html><head><link rel='icon' href='data:,'><title>{0}</title>{1}</head>"
DESCRIPTION = "<meta name='description' content='What {0} is about.'>"
GOOD = (
    "<body><main><h1 id='one'>Title</h1><p>Some text that fills the main part of this page well enough.</p>{0}</main>"
)
PIXEL = "<svg xmlns='http://www.w3.org/2000/svg' width='4' height='4'><rect width='4' height='4'/></svg>"


@pytest.fixture
def site(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "pixel.svg").write_text(PIXEL)
    write(tmp_path / "index.html", "<a href='sub/other.html#one'>a</a><img src='pixel.svg' alt='A black square'>")
    write(
        tmp_path / "sub" / "other.html",
        "<a href='../index.html#one'>b</a><a href='https://example.org/x#y'>c</a>",
    )
    return tmp_path


def write(path, body, description=DESCRIPTION):
    path.write_text(HEAD.format(path.stem, description.format(path.stem)) + GOOD.format(body))


def check_site(folder):
    from check_site import check_links, check_words, find_pages, read_page

    pages = {path: read_page(path) for path in find_pages(folder)}
    return check_links(folder, pages) + check_words(folder, pages)


def test_a_site_without_broken_links_passes(site):
    assert check_site(site) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<a href='missing.html'>x</a>", "missing.html leads to no file."),
        ("<a href='sub/other.html#two'>x</a>", "other.html#two names an anchor that the page does not have."),
        ("<a href='#two'>x</a>", "#two names an anchor that the page does not have."),
        ("<video poster='gone.png'></video>", "gone.png leads to no file."),
        ("<img src='gone.png' alt='In words'>", "gone.png leads to no file."),
        ("<img srcset='pixel.svg 1x, gone.png 2x' alt='In words'>", "gone.png leads to no file."),
        ("<a href='../outside.html'>x</a>", "../outside.html leads out of the site."),
        ("<img src='pixel.svg'>", "pixel.svg has no alternative in words, but ''."),
        ("<img src='pixel.svg' alt=' '>", "pixel.svg has no alternative in words, but ''."),
        ("<img src='pixel.svg' alt='pixel.svg'>", "pixel.svg has no alternative in words, but 'pixel.svg'."),
        ("<img src='pixel.svg?a_b' alt='a b'>", "pixel.svg?a_b has no alternative in words, but 'a b'."),
        ("<img src='pixel.svg' alt='plot'>", "pixel.svg has no alternative in words, but 'plot'."),
    ],
)
def test_broken_links_and_images_without_words_are_found(site, body, message):
    write(site / "index.html", body)
    (problem,) = check_site(site)
    assert problem.startswith("index.html:1: ")
    assert problem.endswith(message)


def test_each_page_has_a_title_and_a_description_of_its_own(site):
    write(site / "missing.html", "", description="")
    write(site / "sub" / "index.html", "")
    (site / "nothing.html").write_text("<main>")
    assert check_site(site) == [
        "missing.html: the page has no description.",
        "nothing.html: the page has no title.",
        "nothing.html: the page has no description.",
        "sub/index.html: the page has the title of index.html: 'index'.",
        "sub/index.html: the page has the description of index.html: 'What index is about.'.",
    ]
