"""Sphinx extension: resolve references to names of Python, PyTorch and matplotlib.

The build is nitpicky and must pass offline, so intersphinx, which downloads inventories, is not used. Names
of Python are imported, so that a misspelt one stays a warning. Names of PyTorch are listed, since its pages
follow no single rule. A field of a documented dataclass links to its class, which describes the fields.
"""

from __future__ import annotations

import builtins
import importlib
import sys
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
TORCH_PAGES = {
    "torch.distributed.ProcessGroup": "distributed.html",
    "torch.distributed.all_gather_object": "distributed.html",
    "torch.Tensor": "tensors.html",
    "torch.dtype": "tensor_attributes.html",
    "torch.device": "tensor_attributes.html",
    "torch.Size": "size.html",
    "torch.autograd.Function": "autograd.html",
    "torch.autograd.graph.saved_tensors_hooks": "autograd.html",
    "torch.autograd.graph.save_on_cpu": "autograd.html",
    "torch.utils.checkpoint.checkpoint": "checkpoint.html",
    **{
        name: f"generated/{name}.html"
        for name in (
            "torch.Stream",
            "torch.Event",
            "torch.no_grad",
            "torch.nn.Module",
            "torch.nn.Linear",
            "torch.nn.Sequential",
            "torch.nn.parameter.Parameter",
            "torch.cuda.Stream",
            "torch.cuda.Event",
            "torch.cuda.CUDAGraph",
            "torch.cuda.graph",
            "torch.cuda.make_graphed_callables",
            "torch.cuda.set_sync_debug_mode",
            "torch.accelerator.memory.max_memory_allocated",
            "torch.accelerator.memory.reset_peak_memory_stats",
        )
    },
}
PUBLIC = tuple(
    f"actoffload{package}" for package in ("", ".schedule", ".report", ".context", ".measure", ".moe", ".device")
)
MATPLOTLIB = "https://matplotlib.org/stable/api/"
# These are imported only for annotations, as matplotlib is optional: signatures have the bare names.
MATPLOTLIB_PAGES = {
    "Axes": ("_as_gen/matplotlib.axes.Axes.html", "matplotlib.axes.Axes"),
    "Figure": ("_as_gen/matplotlib.figure.Figure.html", "matplotlib.figure.Figure"),
}
CONSTANTS = {"None", "True", "False", "Ellipsis", "NotImplemented"}
FUNCTION_PAGE = {"int", "float", "bool", "complex", "object", "type", "property", "super", "slice"}


def python_page(name: str) -> str | None:
    """Return the address of a builtin or a name of the standard library in the manual, None if there is none."""
    if name in CONSTANTS:
        return f"{PYTHON}constants.html#{name}"
    found = getattr(builtins, name, None)
    if found is not None:
        if isinstance(found, type) and issubclass(found, BaseException):
            return f"{PYTHON}exceptions.html#{name}"
        in_functions = not isinstance(found, type) or name in FUNCTION_PAGE
        return f"{PYTHON}{'functions' if in_functions else 'stdtypes'}.html#{name}"
    module_name, _, attribute = name.rpartition(".")
    if module_name.split(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    return f"{PYTHON}{module_name}.html#{name}" if hasattr(module, attribute) else None


def external_page(name: str) -> str | None:
    """Return the address of a name of PyTorch, matplotlib or Python in its manual, None if unknown."""
    documented = TORCH_NAMES.get(name, name)
    if documented in TORCH_PAGES:
        return f"{TORCH}{TORCH_PAGES[documented]}#{documented}"
    if name in MATPLOTLIB_PAGES:
        page, anchor = MATPLOTLIB_PAGES[name]
        return f"{MATPLOTLIB}{page}#{anchor}"
    return python_page(name)


def names_a_variable(node: pending_xref) -> bool:
    """Return whether a reference is the name of a parameter in single backticks, which gets no link.

    Only lower-case names without a dot count, so that a misspelt class or ``module.function`` stays a warning.
    """
    target = str(node["reftarget"])
    return node.get("reftype") == "obj" and target.isidentifier() and target.islower()


def is_type_variable(name: str) -> bool:
    """Return whether a dotted name is a `typing.TypeVar`, which occurs in signatures and has no page."""
    module_name, _, attribute = name.rpartition(".")
    if not name.startswith("actoffload."):
        return False
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return False
    return isinstance(getattr(module, attribute, None), TypeVar)


def class_of_field(name: str) -> str | None:
    """Return the full name of the public dataclass of ``Class.field``, None if there is no such field."""
    path, _, attribute = name.rpartition(".")
    module, _, class_name = path.rpartition(".")
    for package in [module] if module else PUBLIC:
        # Imported here, since autodoc imports nothing in a build that reads no page.
        found = getattr(importlib.import_module(package), class_name, None)
        if attribute in getattr(found, "__dataclass_fields__", {}):
            return f"{package}.{class_name}"
    return None


def public_name(name: str) -> str | None:
    """Return the full name of a public object, or of an attribute of one, that is named without its package."""
    if name.startswith("actoffload."):  # the module of a definition, as in signatures
        name = name.rpartition(".")[2]
    first = name.partition(".")[0]
    for package in PUBLIC:
        if first in importlib.import_module(package).__all__:
            return f"{package}.{name}"
    return None


def is_internal(name: str) -> bool:
    """Tell whether a name is an object of the package that the reference does not show; it stays without a link."""
    module_name, _, attribute = name.rpartition(".")
    if not name.startswith("actoffload."):
        return False
    try:
        found = importlib.import_module(module_name)
    except ImportError:
        return False
    return hasattr(found, attribute) and (module_name not in PUBLIC or attribute.startswith("_"))


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> Any:
    """Handle ``missing-reference`` for names of the Python domain."""
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    address = external_page(target)
    if address is not None:
        return nodes.reference("", "", content, internal=False, refuri=address, reftitle=target)
    owner = class_of_field(target) or public_name(target)
    if owner is not None:
        python = env.domains["py"]
        found = python.resolve_xref(env, node["refdoc"], app.builder, "obj", owner, node, content)
        if found is not None:
            return found
    unlinked = names_a_variable(node) or is_type_variable(target) or is_internal(target)
    return content if unlinked else None


def plain_signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, result: str) -> Any:
    """Handle ``autodoc-process-signature``: replace ``<factory>`` of a dataclass, which Sphinx cannot parse."""
    return (arguments.replace("<factory>", "..."), result) if arguments and "<factory>" in arguments else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", plain_signature)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
