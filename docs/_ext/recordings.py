"""Sphinx extension: the pages of the gallery, with recorded GPU runs on a site that is built without a GPU.

sphinx-gallery executes an example only if its text differs from the ``.md5`` of an earlier execution in the gallery
folder. Before that, this extension writes the recorded run with the present text into the folder
(:mod:`recording_data`). An example without a recording of its current code is executed. Every page says where its
figures come from.

``recordings_mode`` is ``"auto"``, which executes everything where torch sees an accelerator and restores recordings
elsewhere; ``"live"``, which executes everything; or ``"recorded"``, which restores what can be restored.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import recording_data as data
import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import ENUM
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx_gallery.gen_rst import codestr2rst
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import split_code_and_text_blocks
from sphinx_gallery.sorting import ExplicitOrder
from sphinx_gallery.utils import zip_files

from actoffload._text import size
from actoffload.measure import describe_device, measure_link

logger = logging.getLogger(__name__)
MB = 1e6  # sphinx-gallery prints the number followed by "MB"
# Headings of the gallery; of each, the examples with the alternatives of their figures.
GROUPS = tomllib.loads((Path(__file__).parents[2] / "examples/figures.toml").read_text("utf-8"))
GUIDES = GROUPS.pop("guides")
FIGURES = {name: texts for group in GROUPS.values() for name, texts in group.items()}
TEACHING_ORDER = ExplicitOrder([*(f"{name}.py" for name in FIGURES), "*"])

# Pages and their runs


@dataclass(frozen=True)
class Page:
    """One gallery page: digest of the library, why the example is executed, the run shown, whether it was restored."""

    reason: str = ""
    run: data.Provenance | None = None
    restored: bool = False

    @property
    def measured(self) -> bool:
        """Whether the run was one on an accelerator."""
        return self.run is not None and not self.run.reference

    def words(self) -> list[str]:
        """Return the title and the sentences that say what the page shows."""
        run = self.run
        if run is None:
            return ["Not executed", f"This page shows the example's text only. {self.reason}"]
        if run.reference:
            text = "Without a GPU, this example ran on the CPU: bytes and times on this page are no GPU figures."
            return ["Ran on the reference device", f"{text} {self.reason}", facts(run)]
        return [f"{'Recorded' if self.restored else 'Executed in this build'} on {run.device}", facts(run)]

    def box(self) -> str:
        """Return the box below the title of the page, as reStructuredText."""
        title, *lines = self.words()
        classes = f"recording{' recording-reference' * (not self.measured)}"
        return "\n\n   ".join([f".. admonition:: {title}\n   :class: {classes}", *lines])


def facts(run: data.Provenance) -> str:
    """Return versions, link and date of a run in one line."""
    found = [f"driver {run.driver}"] if run.driver else []
    found += [f"torch {run.torch}", f"Python {run.python}"]
    if run.link:
        found.append(f"D2H {run.link['d2h'] / 1e9:.1f} GB/s, H2D {run.link['h2d'] / 1e9:.1f} GB/s")
    if run.beside:
        found.append("another GPU of the host was busy")
    return " · ".join([*found, run.date[:10]])


class GalleryRecordings:
    """The gallery pages of one build, by docname; the methods are event handlers of Sphinx."""

    def prepare(self, app: Sphinx) -> None:
        """Restore recorded runs into the gallery folder; runs before sphinx-gallery."""
        mode, conf, root = app.config.recordings_mode, app.config.sphinx_gallery_conf, Path(app.confdir)
        self.gallery, self.pages = conf["gallery_dirs"], dict[str, Page]()
        self.examples = data.find_examples((Path(app.srcdir) / conf["examples_dirs"]).resolve())
        self.here = _run_here(data.source_digest(root / data.PACKAGE))
        for path in (Path(app.srcdir) / self.gallery).glob("*.rst"):  # also of examples that are gone
            if path.stem not in {*self.examples, "index"}:
                path.unlink()
        live = mode == "live" or (mode == "auto" and not self.here.reference)
        for name, example in self.examples.items():
            docname, folder = f"{self.gallery}/{name}", root / data.RECORDINGS / name
            note = Path(app.srcdir) / f"{docname}.executed.json"
            page = Page("Recorded runs are not shown in this build.")
            if not live:
                page = self._find_recording(folder, example)
            if page.run is not None:
                note.unlink(missing_ok=True)
                restore(folder, page.run, example, note.parent, conf)
            elif not self._executed_here(note, data.example_digest(example)):
                for path in (note, note.with_name(example.name + ".md5")):
                    path.unlink(missing_ok=True)  # sphinx-gallery executes what has no .md5
            self.pages[docname] = page
        # Before the examples run, so that an error here does not discard their results.
        if not self.here.reference and not all(page.restored for page in self.pages.values()):
            link = measure_link()
            self.here = replace(self.here, link={"d2h": link.d2h, "h2d": link.h2d})

    def _find_recording(self, folder: Path, example: Path) -> Page:
        page = Page()
        try:
            return replace(page, run=data.recorded_run(folder, example), restored=True)
        except data.NotRecordedError as missing:
            return replace(page, reason=str(missing))
        except data.RecordingError as error:
            logger.warning("gallery: %s", error, type="recordings", subtype="damaged")
            return replace(page, reason="Its recorded run is damaged.")

    def _executed_here(self, note: Path, digest: str) -> bool:
        """Return whether the gallery folder already has a run of this text, library and device."""
        with suppress(data.RecordingError):
            run, here = data.Provenance.read(note), self.here
            found = (run.example_digest, run.source_digest, run.device)
            return found == (digest, here.source_digest, here.device)
        return False

    def finish(self, app: Sphinx) -> None:
        """Record which examples were executed, and log the state of every page; runs after sphinx-gallery."""
        executed = {Path(p).resolve() for p in app.config.sphinx_gallery_conf["passing_examples"]}
        for name, example in self.examples.items():
            docname = f"{self.gallery}/{name}"
            page, note = self.pages[docname], Path(app.srcdir) / f"{docname}.executed.json"
            if example in executed:
                digest, date = data.example_digest(example), datetime.now(UTC).isoformat(timespec="seconds")
                replace(self.here, example=example.name, example_digest=digest, date=date).write(note)
            if page.run is None and note.is_file():
                self.pages[docname] = page = replace(page, run=data.Provenance.read(note))
            logger.info("gallery: %s: %s", name, " · ".join(page.words()))

    def outdated(self, app: Sphinx, env: BuildEnvironment, *_: Any) -> list[str]:
        """Return the pages to read again because what they say of their run changed."""
        boxes = {docname: page.box() for docname, page in self.pages.items()}
        earlier: dict[str, str] = getattr(env, "recording_boxes", {})
        env.recording_boxes = boxes  # type: ignore[attr-defined]
        return [docname for docname, box in boxes.items() if earlier.get(docname) != box]

    def edit(self, app: Sphinx, docname: str, content: list[str]) -> None:
        """Edit the text that sphinx-gallery wrote: boxes, words for the memory, headings, alternatives of images."""
        text = content[0]
        if docname in self.pages:
            page = self.pages[docname]
            title = re.search(r"^(\S.*)\n={3,}\n", text, flags=re.M)
            if title:  # a window title of its own: a page of the guide may have the same heading
                before, after = text[: title.end()], text[title.end() :]
                text = f".. title:: Example: {title[1]}\n\n{before}\n{page.box()}\n{after}"
            text = add_guides(_describe_memory(text, page.measured), docname.rpartition("/")[2])
        if docname == f"{self.gallery}/index":
            text = add_headings(text)
        content[0] = describe_figures(text) if docname.startswith(f"{self.gallery}/") else text


def _run_here(source_digest: str) -> data.Provenance:
    """Return the provenance of runs in this process, but for the example, its digest, the link and the time."""
    device = describe_device()
    versions = {package: metadata.version(package) for package in ("sphinx", "sphinx-gallery", "matplotlib", "numpy")}
    found = (device.name, device.reference, device.driver, device.torch, device.python)
    return data.Provenance("", "", source_digest, *found, toolchain=versions, command="sphinx-build")


def restore(folder: Path, recorded: data.Provenance, example: Path, target: Path, settings: dict[str, Any]) -> None:
    """Write a recording with the example's present text into the gallery folder `target`, with the ``.zip``."""
    blocks = split_code_and_text_blocks(example)[1]
    files = {target / name: (folder / name).read_bytes() for name in recorded.files}
    page, text = target / f"{example.stem}.rst", example.read_text("utf-8")
    files[page] = weave(files[page].decode(), blocks).encode()
    files[page.with_suffix(".ipynb")] = json.dumps(jupyter_notebook(blocks, settings, target), indent=2).encode()
    files[target / example.name] = example.read_bytes()
    files[target / f"{example.name}.md5"] = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest().encode()
    # Sphinx reads again what was modified.
    changed = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # sphinx-gallery makes its pages read-only
        path.write_bytes(files[path])
    if changed:
        stem = target / example.stem
        zip_files([f"{stem}.py", f"{stem}.ipynb"], f"{stem}.zip", target)


# Text of the pages


def weave(page: str, blocks: Iterable[Any]) -> str:
    """Replace the blocks of an example in its recorded page; what its code printed and drew stays."""
    label = re.search(r"^\.\. _sphx_glr_(?!download).*:\n+", page, flags=re.M)
    footer = page.index(".. rst-class:: sphx-glr-timing")
    assert label is not None, "sphinx-gallery writes pages in another way"
    printed = re.findall(
        r"^\.\. GENERATED FROM .*\n\n\.\. code-block:: Python\n(?:\n|    .*\n)*((?s:.*?))(?=^\.\. GENERATED FROM |\Z)",
        page[label.end() : footer],
        flags=re.M,
    )
    outputs = iter(printed)
    parts = [
        f"{codestr2rst(block.content, lang='Python')}\n\n{next(outputs)}"
        if block.type == "code"
        else f"{block.content}\n\n"
        for block in blocks
    ]
    return "".join([page[: label.end()], *parts, page[footer:]])


def describe_figures(text: str) -> str:
    """Write the alternatives of the images of a gallery page."""

    def described(found: re.Match[str]) -> str:
        number, known = int(found["number"] or 1), FIGURES.get(found["name"], ())
        return found[0] if number > len(known) else f"{found['image']} {known[number - 1]}"

    return re.sub(r"(?P<image>sphx_glr_(?P<name>\w+?)_((?P<number>\d{3})|thumb)\.\w+\n +:alt:).*", described, text)


def describe_thumbnails(app: Sphinx, doctree: nodes.document) -> None:
    """Give the thumbnails in lists of examples, as on API pages, the alternatives of the figures."""
    for image in doctree.findall(nodes.image):
        found = re.search(r"sphx_glr_(\w+)_thumb\.", image["uri"])
        if found and found[1] in FIGURES and not image.get("alt"):
            image["alt"] = FIGURES[found[1]][0]


def add_headings(index: str) -> str:
    """Divide the cards of the gallery by the groups of figures.toml, each under a heading."""
    raw = '.. raw:: html\n\n    <div class="sphx-glr-thumbcontainer"'
    start, *cards = re.split(f"(?={re.escape(raw)})", index)
    headings = {next(iter(group)): title for title, group in GROUPS.items()}
    for k, card in enumerate(cards):
        example = re.search(r"sphx_glr_(\w+)_thumb", card)
        if example and (title := headings.get(example[1])):
            line = f"{title}\n{'-' * len(title)}"
            close, opened = "    </div>", '    <div class="sphx-glr-thumbnails">'
            cards[k] = f".. raw:: html\n\n{close}\n\n{line}\n\n.. raw:: html\n\n{opened}\n\n{card}"
    return "".join([start, *cards])


def add_guides(page: str, example: str) -> str:
    """Name the guides that a reader of an example goes on with, above its times and downloads."""
    links = ", ".join(f":doc:`/guide/{guide}`" for guide in GUIDES.get(example, ()))
    time = ".. rst-class:: sphx-glr-timing"
    return page.replace(time, f"**Further reading:** {links}\n\n{time}", 1) if links else page


def _describe_memory(text: str, measured: bool) -> str:
    """Name the peak that sphinx-gallery prints in MB, in the unit of the page's figures and tables."""

    def described(found: re.Match[str]) -> str:
        nbytes = int(found[1]) * MB
        peak = size(nbytes) if measured else "not measured (reference device)"
        return f"**Peak device memory of this process:** {peak}"

    return re.sub(r"\*\*Estimated memory usage:\*\* +(\d+) MB", described, text)


# Memory of the device


class DeviceMemory:
    """``show_memory`` of sphinx-gallery: peak memory allocated on the accelerator while a block runs, in MB.

    Without an accelerator it is 0. It is an instance because Sphinx cannot pickle functions in its configuration.
    """

    page = ModuleType("no page")  # in which the present page runs

    def __call__(self, func: Callable[[], Any]) -> tuple[float, Any]:
        """Call `func`; return the peak in MB and the result.

        sphinx-gallery begins a page with a call that does nothing, and subtracts what it returns: 0, so that a page
        shows its whole peak. The variables of the page before are deleted then, as its models take memory.
        """
        if not hasattr(func, "fake_main"):
            vars(DeviceMemory.page).clear()
            gc.collect()
            return 0.0, func()
        DeviceMemory.page = func.fake_main
        if not torch.accelerator.is_available():
            return 0.0, func()
        with _watch_peak() as peak:
            out = func()
        return peak() / MB, out

    def __repr__(self) -> str:
        """Return the same text in every build, so that Sphinx sees no changed configuration."""
        return "DeviceMemory()"


@contextmanager
def _watch_peak() -> Iterator[Callable[[], int]]:
    """Measure the peak of the allocator, including the peaks before those resets that an example makes itself."""
    seen = [0]

    def look() -> int:
        seen[0] = max(seen[0], torch.accelerator.max_memory_allocated())
        return seen[0]

    torch.accelerator.reset_peak_memory_stats()
    with ExitStack() as stack:
        for module in {torch.accelerator, torch.get_device_module()}:
            reset = module.reset_peak_memory_stats
            noting = {"reset_peak_memory_stats": lambda *a, do=reset, **k: (look(), do(*a, **k))}
            stack.enter_context(mock.patch.multiple(module, **noting))
        yield look


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    app.add_config_value("recordings_mode", "auto", "", ENUM("auto", "live", "recorded"))
    gallery = GalleryRecordings()
    app.connect("builder-inited", gallery.prepare, priority=100)  # after sphinx-gallery has completed its configuration
    app.connect("builder-inited", gallery.finish, priority=900)  # after it has executed the examples, at 500
    app.connect("env-get-outdated", gallery.outdated)
    app.connect("source-read", gallery.edit)
    app.connect("doctree-read", describe_thumbnails)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
