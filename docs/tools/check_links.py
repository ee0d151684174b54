"""Find broken links inside the built site, without network access.

Usage: python docs/tools/check_links.py build/docs/html

The checks cover ``href``, ``src``, ``srcset`` and ``poster`` of every page, their anchors, and ``url()`` in our
style sheets. Links to other hosts are ignored.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ATTRIBUTES = {"href", "src", "poster"}
# Created by the search and navigation scripts of the theme.
IGNORED_ANCHORS = {"", "top"}


@dataclass
class Page:
    """Anchors of a page, and its links with their line numbers."""

    anchors: set[str] = field(default_factory=set)
    links: list[tuple[int, str]] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        line = self.getpos()[0]
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.page.anchors.add(value)
            elif name in ATTRIBUTES:
                self.page.links.append((line, value))
            elif name == "srcset":
                self.page.links += [(line, part.split()[0]) for part in value.split(",") if part.strip()]


def read_page(path: Path) -> Page:
    """Parse one HTML file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.page


def read_style_sheet(path: Path) -> Page:
    """Find the links in a style sheet."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.finditer(r"url\(\s*['\"]?([^'\")]+)['\"]?\s*\)", text)
    return Page(links=[(text.count("\n", 0, match.start()) + 1, match[1]) for match in found])


def find_pages(site: Path) -> list[Path]:
    """List the pages of a site, without the templates of the theme under _static."""
    return sorted(p for p in site.rglob("*.html") if not p.relative_to(site).parts[0].startswith("_"))


def check_site(site: Path) -> list[str]:
    """Check a built site.

    Parameters
    ----------
    site : Path
        Folder with ``index.html``.

    Returns
    -------
    list of str
        One sentence for each broken link; empty if there is none.
    """
    site = site.resolve()
    pages = {path: read_page(path) for path in find_pages(site)}
    sheets = {path: read_style_sheet(path) for path in sorted(site.glob("_static/*.css"))}
    problems = []
    for path, page in (pages | sheets).items():
        for line, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else _target(site, path, unquote(parts.path))
            where = f"{path.relative_to(site)}:{line}: {link}"
            if not target.is_relative_to(site):
                problems.append(f"{where} leads out of the site.")
            elif not target.is_file():
                problems.append(f"{where} leads to no file.")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors | IGNORED_ANCHORS:
                problems.append(f"{where} names an anchor that the page does not have.")
    return problems


def _target(site: Path, page: Path, path: str) -> Path:
    start = site if path.startswith("/") else page.parent
    target = (start / path.lstrip("/")).resolve()
    return target / "index.html" if target.is_dir() else target


def main(arguments: list[str]) -> int:
    """Check the site named on the command line; return 1 if a link is broken."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "index.html").is_file():
        print("Expected the folder of a built site (with index.html); run `nox -s docs` to build it.")
        return 2
    site = Path(arguments[0])
    problems = check_site(site)
    print("\n".join(problems))
    count = len(find_pages(site))
    print(f"links: {count} pages, {len(problems)} broken links.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
