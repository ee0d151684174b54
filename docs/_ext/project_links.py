"""Settings of Sphinx that follow from the project's own addresses, ``[project.urls]`` in pyproject.toml.

``Documentation`` gives each page its canonical address. ``Repository`` (on GitHub) gives the link in the navigation
bar and the source links of the API pages; without it, these lead to copies of the sources on the site.
"""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]


def source_page(repository: str, module: str, name: str) -> str | None:
    """Return the address of the lines that define an object, None if they are not in the repository."""
    try:
        found: Any = attrgetter(name)(importlib.import_module(module))
        found = inspect.unwrap(getattr(found, "fget", None) or found)
        path = Path(inspect.getsourcefile(found) or "").relative_to(ROOT)
        lines, first = inspect.getsourcelines(found)
    except (AttributeError, TypeError, ValueError, OSError):
        return None
    return f"{repository.rstrip('/')}/blob/main/{path.as_posix()}#L{first}-L{first + len(lines) - 1}"


def settings(urls: dict[str, str]) -> dict[str, Any]:
    """Return the values of conf.py; ``link_extension`` and ``icon_links`` are for lists there."""
    base, repository = urls.get("Documentation", ""), urls.get("Repository", "")

    def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
        return source_page(repository, info["module"], info["fullname"]) if domain == "py" else None

    icon = {"name": "Source repository", "url": repository, "icon": "fa-brands fa-github"}
    addresses = {"html_baseurl": base, "ogp_site_url": base, "notfound_urls_prefix": urlsplit(base).path or "/"}
    kind = "linkcode" if repository else "viewcode"
    links = {"link_extension": f"sphinx.ext.{kind}", "icon_links": [icon] if repository else []}
    return {**addresses, **links, "linkcode_resolve": linkcode_resolve}
