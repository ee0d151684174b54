"""Sphinx extension: show recorded GPU runs of the gallery on a site that is built without a GPU.

sphinx-gallery executes an example only if its text differs from the ``.md5`` of an earlier execution in the
gallery folder. Before that, this extension copies the files of the recorded run into the folder
(:mod:`recording_data`), so that page, images, time and memory are those of the recording. An example without a
recording of its current text is executed. Every page is labelled with the origin of its figures
(:mod:`recording_labels`).

Configuration values
--------------------
recordings_dir : path of the recordings, relative to the folder of ``conf.py``.
recordings_package : path of the package of the library, relative to the same folder; a recording is current if the
    digest of this package is unchanged.
recordings_mode : ``"auto"`` executes everything where torch sees an accelerator and restores recordings
    elsewhere; ``"live"`` executes everything; ``"recorded"`` restores whatever can be restored.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import device_info
import recording_data as data
from recording_labels import Page, label_gallery_page, relabel_costs
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError
from sphinx.util import logging

logger = logging.getLogger(__name__)
MODES = ("auto", "live", "recorded")
COSTS = "sg_execution_times"


class GalleryRecordings:
    """The gallery pages of one build; the methods are event handlers of Sphinx."""

    def __init__(self) -> None:
        """Create a state without pages."""
        self.pages: dict[str, Page] = {}
        self.source_digest = ""
        self.link: dict[str, float] = {}

    def _locate(self, app: Sphinx) -> None:
        conf = app.config.sphinx_gallery_conf
        self.examples_dir = (Path(app.srcdir) / conf["examples_dirs"]).resolve()
        self.gallery_name = Path(conf["gallery_dirs"]).as_posix()
        self.gallery_dir = Path(app.srcdir) / self.gallery_name
        self.recordings = Path(app.confdir) / app.config.recordings_dir
        self.source_digest = data.source_digest(Path(app.confdir) / app.config.recordings_package)

    def _paths(self, example: Path) -> tuple[str, Path, str]:
        """Return the path of an example in its folder, the folder of its page, and the docname of the page."""
        relative = example.relative_to(self.examples_dir)
        docname = (Path(self.gallery_name) / relative.with_suffix("")).as_posix()
        return relative.as_posix(), self.gallery_dir / relative.parent, docname

    def prepare(self, app: Sphinx) -> None:
        """Restore recorded runs into the gallery folder; runs before sphinx-gallery."""
        mode = app.config.recordings_mode
        if mode not in MODES:
            raise ConfigError(f"recordings_mode is {mode!r}, expected one of {', '.join(MODES)}.")
        self._locate(app)
        self.pages.clear()
        live = mode == "live" or (mode == "auto" and device_info.has_accelerator())
        for example in data.find_examples(self.examples_dir):
            name, target, docname = self._paths(example)
            page = Page(docname=docname, source_digest=self.source_digest)
            digest = data.example_digest(example)
            if live:
                page = replace(page, reason="Every example is executed in this build.")
            else:
                recorded, reason = self._find_recording(name, digest)
                page = replace(page, reason=reason)
                if recorded is not None:
                    restore(data.recording_dir(self.recordings, name), recorded, example, target)
                    self.pages[name] = replace(page, provenance=recorded, restored=True)
                    continue
            if not self._executed_here(example, target, digest):
                forget(example, target)
            self.pages[name] = page
        # Before the examples run, so that an error here does not discard their results.
        if not all(page.restored for page in self.pages.values()) and device_info.has_accelerator():
            self.link = device_info.measure_link()

    def _find_recording(self, name: str, digest: str) -> tuple[data.Provenance | None, str]:
        folder = data.recording_dir(self.recordings, name)
        if not (folder / data.RECORDING_FILE).is_file():
            return None, "It has no recorded GPU run yet."
        try:
            recorded = data.load_recording(folder)
        except data.RecordingError as error:
            logger.warning("gallery: %s", error, type="recordings", subtype="damaged")
            return None, "Its recorded run is damaged."
        if recorded.example_digest != digest:
            return (
                None,
                f"Its text changed since it was recorded on {recorded.device} ({recorded.date[:10]}).",
            )
        return recorded, ""

    def _executed_here(self, example: Path, target: Path, digest: str) -> bool:
        """Return whether the gallery folder already has a run of this text, library and device."""
        note = executed_file(example, target)
        if not note.is_file():
            return False
        try:
            earlier = data.read_provenance(note)
        except data.RecordingError:
            return False
        same_text = (earlier.example_digest, earlier.source_digest) == (digest, self.source_digest)
        return same_text and earlier.device == device_info.device_name()

    def finish(self, app: Sphinx) -> None:
        """Record which examples were executed, and log the state of every page; runs after sphinx-gallery."""
        executed = {Path(p).resolve() for p in app.config.sphinx_gallery_conf["passing_examples"]}
        for example in data.find_examples(self.examples_dir):
            name, target, _ = self._paths(example)
            page = self.pages[name]
            note = executed_file(example, target)
            if example in executed:
                digest = data.example_digest(example)
                provenance = device_info.describe(name, digest, self.source_digest, self.link, "sphinx-build")
                data.write_provenance(note, provenance)
            if page.provenance is None and note.is_file():
                self.pages[name] = page = replace(page, provenance=data.read_provenance(note))
            logger.info("gallery: %s: %s", name, page.summary())

    def outdated(self, app: Sphinx, env: BuildEnvironment, *_: Any) -> list[str]:
        """Return the pages to read again because their label changed."""
        labels = {page.docname: repr(page) for page in self.pages.values()}
        earlier: dict[str, str] = getattr(env, "recording_labels", {})
        env.recording_labels = labels  # type: ignore[attr-defined]
        changed = {name for name, label in labels.items() if earlier.get(name) != label}
        if changed:
            changed |= {COSTS, f"{self.gallery_name}/{COSTS}"}
        return sorted(changed & env.found_docs)

    def label(self, app: Sphinx, doctree: Any) -> None:
        """Add the label to a gallery page."""
        docname = app.env.docname
        by_docname = {page.docname: page for page in self.pages.values()}
        if docname in by_docname:
            label_gallery_page(doctree, by_docname[docname])
        elif docname in (COSTS, f"{self.gallery_name}/{COSTS}"):
            relabel_costs(doctree, list(self.pages.values()))


def executed_file(example: Path, target: Path) -> Path:
    """Return the file that records that the page in `target` was executed on this machine."""
    return target / f"{example.stem}.executed.json"


def forget(example: Path, target: Path) -> None:
    """Remove the results of an earlier build from `target`, so that sphinx-gallery executes the example."""
    for path in (executed_file(example, target), target / (example.name + ".md5")):
        path.unlink(missing_ok=True)


def restore(folder: Path, recorded: data.Provenance, example: Path, target: Path) -> None:
    """Copy a recording into the gallery folder `target`, and build the ``.zip`` that it does not contain.

    Unchanged files are not written again, since Sphinx uses modification times to decide what to read.
    """
    executed_file(example, target).unlink(missing_ok=True)
    for name in recorded.files:
        _write_if_changed(target / name, (folder / name).read_bytes())
    source = target / example.name
    _write_if_changed(source, example.read_bytes())
    bundle = io.BytesIO()
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (source, source.with_suffix(".ipynb")):
            if path.is_file():
                # Without file times: an archive that differs in every build would be read again in every build.
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    _write_if_changed(target / f"{example.stem}.zip", bundle.getvalue())


def _write_if_changed(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # sphinx-gallery makes its pages read-only
    path.write_bytes(content)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    app.add_config_value("recordings_dir", "docs/recordings", "")
    app.add_config_value("recordings_package", "src/actoffload", "")
    app.add_config_value("recordings_mode", "auto", "")
    gallery = GalleryRecordings()
    # sphinx-gallery completes its configuration at priority 10 and executes at the default, 500.
    app.connect("builder-inited", gallery.prepare, priority=100)
    app.connect("builder-inited", gallery.finish, priority=900)
    app.connect("env-get-outdated", gallery.outdated)
    app.connect("doctree-read", gallery.label)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
