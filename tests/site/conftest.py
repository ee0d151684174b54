"""A small project with one gallery, laid out like this one and built in the process of the test."""

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("sphinx_gallery", reason="the site's packages are not installed")

CONF = """
from fixed_memory import FixedMemory

extensions = ["recordings", "schedule_figures"]
html_theme = "basic"
nitpicky = True
exclude_patterns = ["recordings", "gallery/**/*.ipynb"]
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\\.py$",
    "ignore_pattern": r"(^|[\\\\/])_[^\\\\/]*\\.py$",
    "image_scrapers": (),
    "reset_modules": (),
    "show_memory": FixedMemory(),
    "download_all_examples": False,
    "write_computation_times": False,
}
"""
EXAMPLE = '''"""
A first example
===============

Its text is long enough for a page.
"""

# %%
# One cell.

with open("ran.txt", "a") as file:
    file.write("x")
print("output of the run")
'''


@dataclass
class Project:
    """The small project; with `gpu`, its next build sees a fake GPU."""

    root: Path
    gpu: bool = False

    @property
    def example(self) -> Path:
        return self.root / "examples" / "first.py"

    @property
    def runs(self) -> int:
        """Number of times the example was executed."""
        path = self.root / "examples" / "ran.txt"
        return len(path.read_text()) if path.is_file() else 0

    def build(self, **config: object) -> tuple[str, str]:
        """Build to HTML with warnings as errors; return the build log and the warnings."""
        from sphinx.application import Sphinx
        from sphinx.util.docutils import docutils_namespace, patch_docutils

        status, warning = io.StringIO(), io.StringIO()
        out = self.root / "out"
        with patch_docutils(str(self.root)), docutils_namespace():
            app = Sphinx(
                srcdir=self.root / "docs",
                confdir=self.root,
                outdir=out / "html",
                doctreedir=out / "doctrees",
                buildername="html",
                confoverrides=config,
                status=status,
                warning=warning,
            )
            app.build()
        return status.getvalue(), warning.getvalue()

    def html(self, name: str) -> str:
        return (self.root / "out" / "html" / name).read_text(encoding="utf-8")


FIGURE = """
Page
====

.. schedule-figure:: stalls
   :name: the-stalls

   Three of five, with *emphasis*.

See :ref:`this figure <the-stalls>`.
"""


@contextmanager
def made_in(root: Path, pages: str = "") -> Iterator[Project]:
    """Write the files of the project, and imitate the device that its builds see."""
    import recordings

    from actoffload.measure import DeviceInfo
    from actoffload.schedule import Link

    files = {
        "conf.py": CONF,
        "docs/index.rst": f"Tiny\n====\n\n.. toctree::\n\n   gallery/index\n{pages}",
        "examples/GALLERY_HEADER.rst": "Gallery\n=======\n\nText of the gallery.\n",
        "examples/first.py": EXAMPLE,
        "src/actoffload/__init__.py": "version = 1\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = Project(root)
    gpu, cpu = DeviceInfo("Imagined GPU", False, "1.2.3"), DeviceInfo("reference device (CPU)", True, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, "describe_device", lambda: gpu if made.gpu else cpu)
        patch.setattr(recordings, "measure_link", lambda: Link(d2h=50.0e9, h2d=51.0e9))
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with made_in(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A project that was built once with a fake GPU, and the warnings; one of its pages has a figure."""
    with made_in(tmp_path_factory.mktemp("project"), "   deep/page\n") as made:
        (made.root / "docs" / "deep").mkdir()
        (made.root / "docs" / "deep" / "page.rst").write_text(FIGURE)
        made.gpu = True
        return made, made.build()[1]


@pytest.fixture
def recorded(project: Project, built: tuple[Project, str]) -> Project:
    """The project with a recording made on a fake GPU, as in a new checkout on another machine."""
    import record_gallery

    archive = project.root / "archive" / record_gallery.ARCHIVE
    assert record_gallery.pack(built[0].root, archive, ["first"]) == (["first"], [])
    assert record_gallery.unpack(archive, project.root / "docs" / "recordings") == ["first"]
    return project


@pytest.fixture(scope="session")
def tab():
    """A tab of a headless browser."""
    from browser import browser, find_browser
    from selenium.common.exceptions import NoSuchDriverException

    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome is installed (CHROME may name one)")
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(browser(path))
        except NoSuchDriverException:
            pytest.skip(f"{path} has no driver, and none can be fetched: install chromedriver")
        yield opened
