"""Sphinx extension: show recorded GPU runs of the gallery on a site that is built without a GPU.

sphinx-gallery executes an example only if its text differs from the ``.md5`` of an earlier execution in the gallery
folder. Before that, this extension copies the files of the recorded run into the folder (:mod:`recording_data`). An
example without a recording of its current text is executed. Every page says where its figures come from.

``recordings_mode`` is ``"auto"``, which executes everything where torch sees an accelerator and restores recordings
elsewhere; ``"live"``, which executes everything; or ``"recorded"``, which restores what can be restored.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from filecmp import cmp
from importlib import metadata
from pathlib import Path
from shutil import copyfile
from typing import Any

import recording_data as data
from gallery_hooks import describe_figures
from sphinx.application import Sphinx
from sphinx.config import ENUM
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx_gallery.utils import zip_files

from actoffload.measure import describe_device, measure_link

logger = logging.getLogger(__name__)
TOOLCHAIN = ("sphinx", "sphinx-gallery", "matplotlib", "numpy")
DIGITS = 12  # shown digits of a digest
NOT_MEASURED = "not measured (reference device)"


@dataclass(frozen=True)
class Page:
    """One gallery page: digest of the library, why the example is executed, the run shown, whether it was restored."""

    source_digest: str
    reason: str = ""
    run: data.Provenance | None = None
    restored: bool = False

    @property
    def stale(self) -> bool:
        """Whether the run used other library sources than the current ones."""
        return self.run is not None and self.run.source_digest != self.source_digest

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
            return ["Ran on the reference device", f"{text} {self.reason}", _facts(run)]
        words = [f"{'Recorded' if self.restored else 'Executed in this build'} on {run.device}", _facts(run)]
        if self.stale:
            text = f"Recorded from other library sources than the present ones (``{self.source_digest[:DIGITS]}``):"
            words.append(f"{text} output and figures may differ from what this version gives.")
        return words

    def box(self) -> str:
        """Return the box below the title of the page, as reStructuredText."""
        title, *lines = self.words()
        classes = f"recording{' recording-reference' * (not self.measured)}{' recording-stale' * self.stale}"
        return "\n\n   ".join([f".. admonition:: {title}\n   :class: {classes}", *lines])


def _facts(run: data.Provenance) -> str:
    facts = [f"driver {run.driver}"] if run.driver else []
    facts += [f"torch {run.torch}", f"Python {run.python}"]
    if run.link:
        facts.append(f"D2H {run.link['d2h'] / 1e9:.1f} GB/s, H2D {run.link['h2d'] / 1e9:.1f} GB/s")
    if run.beside:
        facts.append(f"another GPU of the host ran {run.beside}")
    facts.append(f"{run.date[:10]} {run.date[11:16]} UTC")
    return f"{' · '.join(facts)} · library sources ``{run.source_digest[:DIGITS]}``"


class GalleryRecordings:
    """The gallery pages of one build, by docname; the methods are event handlers of Sphinx."""

    def prepare(self, app: Sphinx) -> None:
        """Restore recorded runs into the gallery folder; runs before sphinx-gallery."""
        mode, conf, root = app.config.recordings_mode, app.config.sphinx_gallery_conf, Path(app.confdir)
        self.gallery, self.pages = conf["gallery_dirs"], dict[str, Page]()
        self.examples = data.find_examples((Path(app.srcdir) / conf["examples_dirs"]).resolve())
        self.here = _run_here(data.source_digest(root / data.PACKAGE))
        live = mode == "live" or (mode == "auto" and not self.here.reference)
        for name, example in self.examples.items():
            docname, folder = f"{self.gallery}/{name}", root / data.RECORDINGS / name
            note = Path(app.srcdir) / f"{docname}.executed.json"
            page = Page(self.here.source_digest, "Recorded runs are not shown in this build.")
            if not live:
                page = self._find_recording(folder, example)
            if page.run is not None:
                note.unlink(missing_ok=True)
                restore(folder, page.run, example, note.parent)
            elif not self._executed_here(note, data.example_digest(example)):
                for path in (note, note.with_name(example.name + ".md5")):
                    path.unlink(missing_ok=True)  # sphinx-gallery executes what has no .md5
            self.pages[docname] = page
        # Before the examples run, so that an error here does not discard their results.
        if not self.here.reference and not all(page.restored for page in self.pages.values()):
            link = measure_link()
            self.here = replace(self.here, link={"d2h": link.d2h, "h2d": link.h2d})

    def _find_recording(self, folder: Path, example: Path) -> Page:
        page = Page(self.here.source_digest)
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
        """Edit the text that sphinx-gallery wrote: boxes, words for the memory, and alternatives of images."""
        text = content[0]
        if docname in self.pages:
            page = self.pages[docname]
            title = re.search(r"^(\S.*)\n={3,}\n", text, flags=re.M)
            if title:  # a window title of its own: a page of the guide may have the same heading
                before, after = text[: title.end()], text[title.end() :]
                text = f".. title:: Example: {title[1]}\n\n{before}\n{page.box()}\n{after}"
            peak = r"\1" if page.measured else NOT_MEASURED
            text = re.sub(
                r"\*\*Estimated memory usage:\*\* +(.*)", rf"**Peak device memory of this process:** {peak}", text
            )
        content[0] = describe_figures(text) if docname.startswith(f"{self.gallery}/") else text


def _run_here(source_digest: str) -> data.Provenance:
    """Return the provenance of runs in this process, but for the example, its digest, the link and the time."""
    device, versions = describe_device(), {package: metadata.version(package) for package in TOOLCHAIN}
    facts = (device.name, device.reference, device.driver, device.torch, device.python)
    return data.Provenance("", "", source_digest, *facts, toolchain=versions, command="sphinx-build")


def restore(folder: Path, recorded: data.Provenance, example: Path, target: Path) -> None:
    """Copy a recording into the gallery folder `target`, and build the ``.zip`` that it does not contain."""
    sources = {target / name: folder / name for name in recorded.files} | {target / example.name: example}
    # Sphinx reads again what was modified.
    changed = [path for path, source in sources.items() if not path.is_file() or not cmp(path, source, shallow=False)]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # sphinx-gallery makes its pages read-only
        copyfile(sources[path], path)
    if changed:
        stem = target / example.stem
        zip_files([f"{stem}.py", f"{stem}.ipynb"], f"{stem}.zip", target)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    app.add_config_value("recordings_mode", "auto", "", ENUM("auto", "live", "recorded"))
    gallery = GalleryRecordings()
    app.connect("builder-inited", gallery.prepare, priority=100)  # after sphinx-gallery has completed its configuration
    app.connect("builder-inited", gallery.finish, priority=900)  # after it has executed the examples, at 500
    app.connect("env-get-outdated", gallery.outdated)
    app.connect("source-read", gallery.edit)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
