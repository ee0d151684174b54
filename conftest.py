"""Configuration of pytest for the whole tree: doctests of the pages, names in doctests, and skips of GPU tests."""

from __future__ import annotations

from doctest import ELLIPSIS
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore = ["conf.py", "noxfile.py"]

if find_spec("sybil") is None:  # a machine that runs only the GPU tests; `nox -s tests` always installs it
    collect_ignore_glob = ["docs/*.md", "README.md"]
else:
    from sybil import Sybil
    from sybil.parsers.myst import DocTestDirectiveParser, PythonCodeBlockParser

    FLAGS = ELLIPSIS

    def _names(namespace: dict[str, Any]) -> None:
        namespace.update(doctest_names())

    # On the pages, only {doctest} blocks are run (sphinx.ext.doctest runs them too): a plain Python block there may
    # be a fragment. In the README, the Python blocks are complete programs.
    pages = Sybil(
        parsers=[DocTestDirectiveParser(optionflags=FLAGS)],
        patterns=["docs/*.md", "docs/*/*.md"],
        setup=_names,
    )
    readme = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=FLAGS)], patterns=["README.md"])
    pytest_collect_file = (pages + readme).pytest()


def doctest_names() -> dict[str, Any]:
    """Return the names that every doctest may use without an import, as in `doctest_global_setup` of conf.py."""
    import torch

    import actoffload

    modules = (actoffload.schedule, actoffload.report, actoffload)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {"torch": torch, "actoffload": actoffload, **public}


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("doctest_namespace").update(doctest_names())


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Run in one process where there is an accelerator: several would count each other's memory."""
    import torch

    return 0 if torch.accelerator.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
    if not marked:
        return
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for item in marked:
        several = item.get_closest_marker("multi_gpu")
        needed = max(several.args, default=2) if several else 1
        if count < needed:
            reason = f"needs {needed} accelerator{'s' if needed > 1 else ''}, torch sees {count}"
            item.add_marker(pytest.mark.skip(reason=reason))
