"""Sphinx extension: resolve references to names of Python, PyTorch and matplotlib.

The build must pass offline, so intersphinx, which downloads inventories, is not used. Names of Python are imported,
those of PyTorch listed, so that a misspelt one stays a warning. A field of a dataclass links to its class.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from inspect import isgeneratorfunction, unwrap
from typing import Any, TypeVar

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PYTHON = "https://docs.python.org/3/library/"
TORCH = "https://docs.pytorch.org/docs/stable/"
# The manual documents these under other names than programs use.
TORCH_NAMES = {
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.Parameter": "torch.nn.parameter.Parameter",
    "torch.accelerator.max_memory_allocated": "torch.accelerator.memory.max_memory_allocated",
    "torch.accelerator.reset_peak_memory_stats": "torch.accelerator.memory.reset_peak_memory_stats",
}
_TORCH_PAGES = {
    "distributed.html": "distributed.ProcessGroup distributed.all_gather_object",
    "tensors.html": "Tensor",
    "tensor_attributes.html": "dtype device",
    "size.html": "Size",
    "autograd.html": "autograd.Function autograd.graph.saved_tensors_hooks autograd.graph.save_on_cpu",
    "checkpoint.html": "utils.checkpoint.checkpoint",
    "generated/{}.html": """
        Stream Event no_grad nn.Module nn.Linear nn.Sequential nn.parameter.Parameter cuda.Stream cuda.Event
        cuda.CUDAGraph cuda.graph cuda.make_graphed_callables cuda.set_sync_debug_mode
        accelerator.memory.max_memory_allocated accelerator.memory.reset_peak_memory_stats""",
}
TORCH_PAGES = {f"torch.{n}": page.format(f"torch.{n}") for page, names in _TORCH_PAGES.items() for n in names.split()}
PACKAGES = ("", ".planner", ".schedule", ".report", ".context", ".measure", ".moe", ".device")
PUBLIC = tuple(f"actoffload{package}" for package in PACKAGES)
# These are imported only for annotations, as matplotlib is optional: signatures have the bare names.
MATPLOTLIB = "https://matplotlib.org/stable/api/_as_gen/"
MATPLOTLIB_NAMES = {"Axes": "matplotlib.axes.Axes", "Figure": "matplotlib.figure.Figure"}
CONSTANTS = {"None", "True", "False", "Ellipsis", "NotImplemented"}
FUNCTION_PAGE = {"int", "float", "bool", "complex", "object", "type", "property", "super", "slice"}


def _find(name: str) -> Any:
    """Return the object with a dotted name, None if there is none."""
    module_name, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except (ImportError, ValueError):
        return None


def python_page(name: str) -> str | None:
    """Return the address of a builtin or a name of the standard library in the manual, None if there is none."""
    if name in CONSTANTS:
        return f"{PYTHON}constants.html#{name}"
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return f"{PYTHON}exceptions.html#{name}"
    if found is not None:
        types = isinstance(found, type) and name not in FUNCTION_PAGE
        return f"{PYTHON}{'stdtypes' if types else 'functions'}.html#{name}"
    standard = name.split(".")[0] in sys.stdlib_module_names and _find(name) is not None
    return f"{PYTHON}{name.rpartition('.')[0]}.html#{name}" if standard else None


def external_page(name: str) -> str | None:
    """Return the address of a name of PyTorch, matplotlib or Python in its manual, None if unknown."""
    documented = TORCH_NAMES.get(name, name)
    if documented in TORCH_PAGES:
        return f"{TORCH}{TORCH_PAGES[documented]}#{documented}"
    full = MATPLOTLIB_NAMES.get(name)
    return f"{MATPLOTLIB}{full}.html#{full}" if full else python_page(name)


def names_a_variable(node: pending_xref) -> bool:
    """Return whether a reference is the lower-case name of a parameter in single backticks, which gets no link."""
    target = str(node["reftarget"])
    return node.get("reftype") == "obj" and target.isidentifier() and target.islower()


def public_name(name: str) -> str | None:
    """Return the full name of a public object that is named otherwise; for a dataclass field, that of the class."""
    path, _, attribute = name.rpartition(".")
    for package in PUBLIC:
        # Imported here, since autodoc imports nothing in a build that reads no page.
        module = importlib.import_module(package)
        owner = path.removeprefix(f"{package}.")
        if owner in module.__all__:
            found = getattr(module, owner)
            if attribute in getattr(found, "__dataclass_fields__", {}):
                return f"{package}.{owner}"
            return f"{package}.{owner}.{attribute}" if hasattr(found, attribute) else None
        short = attribute if name.startswith("actoffload.") else name
        if short in module.__all__:
            return f"{package}.{short}"
    return None


def is_internal(name: str) -> bool:
    """Tell whether a name is an object of the package that the reference does not show; it stays without a link."""
    found, (module, _, attribute) = _find(name), name.rpartition(".")
    hidden = module not in PUBLIC or attribute.startswith("_") or isinstance(found, TypeVar)
    return name.startswith("actoffload.") and found is not None and hidden


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> Any:
    """Handle ``missing-reference`` for names of the Python domain."""
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    address, owner = external_page(target), public_name(target)
    if address is not None:
        return nodes.reference("", "", content, internal=False, refuri=address, reftitle=target)
    python, arguments = env.domains["py"], (env, node["refdoc"], app.builder, "obj")
    if owner is not None and (found := python.resolve_xref(*arguments, owner, node, content)) is not None:
        return found
    return content if names_a_variable(node) or is_internal(target) else None


def plain_signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, result: str) -> Any:
    """Replace ``<factory>``, which Sphinx cannot parse, and what the generator of a context manager returns."""
    if not arguments:
        return None
    if result and isgeneratorfunction(unwrap(obj)) and not isgeneratorfunction(obj):
        result = result.replace("collections.abc.Iterator", "contextlib.AbstractContextManager")
    return arguments.replace("<factory>", "..."), result


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", plain_signature)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
