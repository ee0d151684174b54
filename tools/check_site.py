"""Check the pages of the built site, without network access.

Usage: python tools/check_site.py build/docs/html [--external FILE]

Links inside the site (``href``, ``src``, ``srcset``, ``poster``, their anchors) lead to something. Each page has a
title and a description of its own, each image an alternative in words. Links to other hosts are not followed;
``--external`` lists them, each with the pages that have it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag

IGNORED_ANCHORS = {"", "top"}  # created by the search and navigation scripts of the theme
GENERATED = {"genindex.html", "search.html", "404.html"}  # written by Sphinx without a description
FILE_NAME = re.compile(r"\w+([_.-]\w+)*\.\w{2,4}|\w*[_-]\w*|\w+")  # also a single word, which describes no picture


@dataclass
class Page:
    """Anchors of a page, its links with their line numbers, its title, description and images."""

    anchors: set[str] = field(default_factory=set)
    links: list[tuple[int, str]] = field(default_factory=list)
    title: str = ""
    description: str = ""
    images: list[tuple[int, str, str]] = field(default_factory=list)


def read_page(path: Path) -> Page:
    """Parse one HTML file."""
    soup, page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser"), Page()
    page.title = soup.title.get_text(strip=True) if soup.title else ""
    described = soup.find("meta", attrs={"name": "description"})
    page.description = str(described["content"]).strip() if isinstance(described, Tag) else ""
    for tag in soup.find_all(True):
        line, values = tag.sourceline or 0, {name: str(tag.get(name, "")) for name in tag.attrs}
        page.anchors |= {values.get("id", ""), values.get("name", "") if tag.name == "a" else ""}
        page.links += [(line, values[name]) for name in ("href", "src", "poster") if name in values]
        page.links += [(line, part.split()[0]) for part in values.get("srcset", "").split(",") if part.strip()]
        if tag.name == "img":
            page.images.append((line, values.get("src", ""), values.get("alt", "").strip()))
    return page


def find_pages(site: Path) -> list[Path]:
    """List the pages of a site, without the sources under _modules and the templates of the theme under _static."""
    return sorted(p for p in site.rglob("*.html") if not p.relative_to(site).parts[0].startswith("_"))


def check_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return a sentence for each broken link inside the site."""
    problems = []
    links = ((path, line, link) for path, page in pages.items() for line, link in page.links)
    for path, line, link in links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        start = site if parts.path.startswith("/") else path.parent
        target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        where = f"{path.relative_to(site)}:{line}: {link}"
        if not target.is_relative_to(site):
            problems.append(f"{where} leads out of the site.")
        elif not target.is_file():
            problems.append(f"{where} leads to no file.")
        elif target in pages and unquote(parts.fragment) not in pages[target].anchors | IGNORED_ANCHORS:
            problems.append(f"{where} names an anchor that the page does not have.")
    return problems


def check_words(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return a sentence for each image without words, and for each missing or repeated title or description."""
    problems, seen = [], dict[str, str]()
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for line, source, words in page.images:
            if not words or FILE_NAME.fullmatch(words) or words.replace(" ", "_") in source:
                problems.append(f"{name}:{line}: {source} has no alternative in words, but {words!r}.")
        for kind, text in (("title", page.title), ("description", page.description)):
            if not text and not (name in GENERATED and kind == "description"):
                problems.append(f"{name}: the page has no {kind}.")
            elif text and text in seen:
                problems.append(f"{name}: the page has the {kind} of {seen[text]}: {text!r}.")
            seen.setdefault(text, name)
    return problems


def external_links(site: Path, pages: dict[Path, Page]) -> dict[str, list[str]]:
    """Return the pages that link to other hosts, by address without anchor."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, link in ((path, link) for path, page in pages.items() for _, link in page.links):
        if urlsplit(link).netloc:
            found[link.partition("#")[0]].add(path.relative_to(site).as_posix())
    return {link: sorted(names) for link, names in sorted(found.items())}


def main(arguments: list[str]) -> int:
    """Check the site named on the command line; return 1 if it has a problem."""
    parser = argparse.ArgumentParser(description="Check the pages of a built site.")
    parser.add_argument("site", type=Path)
    parser.add_argument("--external", type=Path, help="write the links to other hosts into this file")
    options = parser.parse_args(arguments)
    site = options.site.resolve()
    if not (site / "index.html").is_file():
        parser.error("expected the folder of a built site (with index.html); run `nox -s docs` to build it.")
    pages = {path: read_page(path) for path in find_pages(site)}
    problems, found = check_links(site, pages) + check_words(site, pages), external_links(site, pages)
    if options.external:
        lines = [f"{link}  ({', '.join(names)})\n" for link, names in found.items()]
        options.external.write_text("".join(lines), encoding="utf-8")
    print("\n".join([*problems, f"site: {len(pages)} files, {len(problems)} problems, {len(found)} external links."]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
