"""Sphinx extension: links to the manuals of Python, PyTorch and matplotlib, and those from ``[project.urls]``.

The build must pass offline, so intersphinx, which downloads inventories, is not used. Names of Python are imported,
those of PyTorch listed, so that a misspelt one stays a warning. A field of a dataclass links to its class.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "https://docs.python.org/3/library/"
TORCH = "https://docs.pytorch.org/docs/stable/"
# The manual documents these under other names than programs use.
TORCH_NAMES = {
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
}
_TORCH_PAGES = {
    "distributed.html": "distributed.ProcessGroup",
    "tensors.html": "Tensor",
    "tensor_attributes.html": "dtype device",
    "autograd.html": "autograd.Function",
    "generated/{}.html": "Stream nn.Module nn.Linear cuda.graph cuda.set_sync_debug_mode",
}
TORCH_PAGES = {f"torch.{n}": page.format(f"torch.{n}") for page, names in _TORCH_PAGES.items() for n in names.split()}
PACKAGES = ("", ".schedule", ".report", ".pipeline", ".context", ".measure", ".moe", ".device")
# These are imported only for annotations, as matplotlib is optional: signatures have the bare names.
MATPLOTLIB = "https://matplotlib.org/stable/api/_as_gen/"
MATPLOTLIB_NAMES = {"Axes": "matplotlib.axes.Axes", "Figure": "matplotlib.figure.Figure"}
CONSTANTS = {"None", "True", "False", "Ellipsis", "NotImplemented"}
FUNCTION_PAGE = {"int", "float", "bool", "complex", "object", "type", "property", "super", "slice"}


def settings(urls: dict[str, str]) -> dict[str, Any]:
    """Return values of conf.py that follow from ``[project.urls]``; two of them are for lists there.

    ``Documentation`` gives each page its canonical address. ``Repository`` (on GitHub) gives the link in the navigation
    bar and source links; without it, these lead to copies of the sources on the site.
    """
    base, repository = urls.get("Documentation", ""), urls.get("Repository", "")

    def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
        return source_page(repository, info["module"], info["fullname"]) if domain == "py" else None

    icon = {"name": "Source repository", "url": repository, "icon": "fa-brands fa-github"}
    addresses = {"html_baseurl": base, "ogp_site_url": base, "notfound_urls_prefix": urlsplit(base).path or "/"}
    kind = "linkcode" if repository else "viewcode"
    lists = {"link_extension": f"sphinx.ext.{kind}", "icon_links": [icon] if repository else []}
    return {**addresses, **lists, "linkcode_resolve": linkcode_resolve}


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


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except (ImportError, ValueError):
        return None


def external_page(name: str) -> str | None:
    """Return the address of a name of PyTorch, matplotlib or Python in its manual, None if unknown."""
    documented = TORCH_NAMES.get(name, name)
    if documented in TORCH_PAGES:
        return f"{TORCH}{TORCH_PAGES[documented]}#{documented}"
    if full := MATPLOTLIB_NAMES.get(name):
        return f"{MATPLOTLIB}{full}.html#{full}"
    found = getattr(builtins, name, None)
    if name in CONSTANTS:
        page = "constants"
    elif isinstance(found, type) and issubclass(found, BaseException):
        page = "exceptions"
    elif found is not None:
        page = "stdtypes" if isinstance(found, type) and name not in FUNCTION_PAGE else "functions"
    elif name.split(".")[0] in sys.stdlib_module_names and _find(name) is not None:
        page = name.rpartition(".")[0]
    else:
        return None
    return f"{PYTHON}{page}.html#{name}"


def names_a_variable(node: pending_xref) -> bool:
    """Return whether a reference is the lower-case name of a parameter in single backticks, which gets no link."""
    target = str(node["reftarget"])
    return node.get("reftype") == "obj" and target.isidentifier() and target.islower()


def public_name(name: str) -> str | None:
    """Return the full name of a public object that has only its own; for a dataclass field, that of the class."""
    owner, _, attribute = name.rpartition(".")
    for package in (f"actoffload{package}" for package in PACKAGES):
        module = importlib.import_module(package)  # here, as a build that reads no page needs no torch
        if owner in module.__all__:
            found = getattr(module, owner)
            if attribute in getattr(found, "__dataclass_fields__", {}):
                return f"{package}.{owner}"
            return f"{package}.{name}" if hasattr(found, attribute) else None
        if name in module.__all__:
            return f"{package}.{name}"
    return None


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> Any:
    """Handle ``missing-reference`` for names of the Python domain."""
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    if (address := external_page(target)) is not None:
        return nodes.reference("", "", content, internal=False, refuri=address, reftitle=target)
    python, arguments, owner = env.domains["py"], (env, node["refdoc"], app.builder, "obj"), public_name(target)
    if owner is not None and (found := python.resolve_xref(*arguments, owner, node, content)) is not None:
        return found
    # No page documents type variables.
    return content if names_a_variable(node) or isinstance(_find(target), TypeVar) else None


def plain_signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, result: str) -> Any:
    """Replace ``<factory>``, which Sphinx cannot parse, and what the generator of a context manager returns."""
    if not arguments:
        return None
    if result and inspect.isgeneratorfunction(inspect.unwrap(obj)) and not inspect.isgeneratorfunction(obj):
        result = result.replace("collections.abc.Iterator", "contextlib.AbstractContextManager")
    return arguments.replace("<factory>", "..."), result


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", plain_signature)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
