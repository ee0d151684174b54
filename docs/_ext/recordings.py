"""Sphinx extension: show recorded GPU runs of the gallery on a site that is built without a GPU.

sphinx-gallery executes an example only if its text differs from the ``.md5`` of an earlier execution in the gallery
folder. Before that, this extension copies the files of the recorded run into the folder (:mod:`recording_data`). An
example without a recording of its current text is executed. Every page says where its figures come from.

``recordings_dir`` and ``recordings_package`` are the paths of the recordings and of the library, from the folder of
``conf.py``. ``recordings_mode`` is ``"auto"``, which executes everything where torch sees an accelerator and restores
recordings elsewhere; ``"live"``, which executes everything; or ``"recorded"``, which restores what can be restored.
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
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError
from sphinx.util import logging
from sphinx_gallery.utils import zip_files

from actoffload.measure import describe_device, measure_link

logger = logging.getLogger(__name__)
MODES = ("auto", "live", "recorded")
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

    def summary(self) -> str:
        """Return one line for the build log that says what the page shows."""
        if self.run is None:
            return f"not executed. {self.reason}"
        if not self.restored:
            return f"executed on {self.run.device}. {self.reason}"
        then, now = self.run.source_digest[:DIGITS], self.source_digest[:DIGITS]
        other = f", from other library sources ({then}) than the present ones ({now})" if self.stale else ""
        return f"recorded on {self.run.device}, {self.run.date[:10]}{other}."

    def box(self) -> str:
        """Return the box below the title of the page, as reStructuredText."""
        run, kind = self.run, "reference"
        if run is None:
            title, lines = "Not executed", [f"This page shows the example's text only. {self.reason}"]
        elif run.reference:
            text = "Without a GPU, this example ran on the CPU: bytes and times on this page are no GPU figures."
            title, lines = "Ran on the reference device", [f"{text} {self.reason}", _facts(run)]
        else:
            kind, how = ("restored", "Recorded") if self.restored else ("executed", "Executed in this build")
            title, lines = f"{how} on {run.device}", [_facts(run)]
        if self.stale:
            text = f"Recorded from other library sources than the present ones (``{self.source_digest[:DIGITS]}``):"
            lines.append(f"{text} output and figures may differ from what this version gives.")
        classes = f"recording recording-{kind}{' recording-stale' * self.stale}"
        return "\n\n   ".join([f".. admonition:: {title}\n   :class: {classes}", *lines])


def _facts(run: data.Provenance) -> str:
    facts = [f"driver {run.driver}"] if run.driver else []
    facts += [f"torch {run.torch}", f"Python {run.python}"]
    if run.link:
        facts.append(f"D2H {run.link['d2h'] / 1e9:.1f} GB/s, H2D {run.link['h2d'] / 1e9:.1f} GB/s")
    facts.append(f"{run.date[:10]} {run.date[11:16]} UTC")
    return f"{' · '.join(facts)} · library sources ``{run.source_digest[:DIGITS]}``"


class GalleryRecordings:
    """The gallery pages of one build, by docname; the methods are event handlers of Sphinx."""

    def prepare(self, app: Sphinx) -> None:
        """Restore recorded runs into the gallery folder; runs before sphinx-gallery."""
        mode, conf = app.config.recordings_mode, app.config.sphinx_gallery_conf
        if mode not in MODES:
            raise ConfigError(f"recordings_mode is {mode!r}, expected one of {', '.join(MODES)}.")
        gallery, recordings = Path(conf["gallery_dirs"]), Path(app.confdir) / app.config.recordings_dir
        self.index, self.pages = f"{gallery.as_posix()}/index", dict[str, Page]()
        found = data.find_examples((Path(app.srcdir) / conf["examples_dirs"]).resolve())
        self.examples = {(gallery / name).with_suffix("").as_posix(): (name, path) for name, path in found.items()}
        self.here = _run_here(data.source_digest(Path(app.confdir) / app.config.recordings_package))
        live = mode == "live" or (mode == "auto" and not self.here.reference)
        for docname, (name, example) in self.examples.items():
            note, folder = Path(app.srcdir) / f"{docname}.executed.json", recordings / name.removesuffix(".py")
            page = Page(self.here.source_digest, "Every example is executed in this build.")
            digest = data.example_digest(example)
            if not live:
                page = self._find_recording(folder, digest)
            if page.run is not None:
                note.unlink(missing_ok=True)
                restore(folder, page.run, example, note.parent)
            elif not self._executed_here(note, digest):
                for path in (note, note.with_name(example.name + ".md5")):
                    path.unlink(missing_ok=True)  # sphinx-gallery executes what has no .md5
            self.pages[docname] = page
        # Before the examples run, so that an error here does not discard their results.
        if not self.here.reference and not all(page.restored for page in self.pages.values()):
            link = measure_link()
            self.here = replace(self.here, link={"d2h": link.d2h, "h2d": link.h2d})

    def _find_recording(self, folder: Path, digest: str) -> Page:
        page = Page(self.here.source_digest, "It has no recorded GPU run yet.")
        if not (folder / data.RECORDING_FILE).is_file():
            return page
        try:
            run = data.load_recording(folder)
        except data.RecordingError as error:
            logger.warning("gallery: %s", error, type="recordings", subtype="damaged")
            return replace(page, reason="Its recorded run is damaged.")
        if run.example_digest == digest:
            return replace(page, reason="", run=run, restored=True)
        return replace(page, reason=f"Its text changed since it was recorded on {run.device} ({run.date[:10]}).")

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
        for docname, (name, example) in self.examples.items():
            page, note = self.pages[docname], Path(app.srcdir) / f"{docname}.executed.json"
            if example in executed:
                date = datetime.now(UTC).isoformat(timespec="seconds")
                replace(self.here, example=name, example_digest=data.example_digest(example), date=date).write(note)
            if page.run is None and note.is_file():
                self.pages[docname] = page = replace(page, run=data.Provenance.read(note))
            logger.info("gallery: %s: %s", name, page.summary())

    def outdated(self, app: Sphinx, env: BuildEnvironment, *_: Any) -> list[str]:
        """Return the pages to read again because what they say of their run changed."""
        boxes = {docname: page.box() for docname, page in self.pages.items()}
        earlier: dict[str, str] = getattr(env, "recording_boxes", {})
        env.recording_boxes = boxes  # type: ignore[attr-defined]
        changed = {docname for docname, box in boxes.items() if earlier.get(docname) != box}
        costs = {name for name in env.found_docs if name.endswith("sg_execution_times")}
        return sorted((changed | costs if changed else changed) & env.found_docs)

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
            text = re.sub(r"\*\*Estimated memory usage:\*\* +(.*)", rf"**Peak device memory:** {peak}", text)
            text = _alternatives(text, Path(docname).name.replace("_", " "))
        elif docname.endswith("sg_execution_times"):
            # Its scripts load from other hosts; the plain table is kept.
            text = re.sub(r"^  \.\. raw:: html\n(\n|   .*\n)+", "", text, flags=re.M)
            text = text.replace("Mem (MB)", "Peak device memory (MB)")
            for name in (name for name, page in self.pages.items() if not page.measured):
                row = rf"(:ref:`sphx_glr_{name.replace('/', '_')}\.py`.*\n.*\n +- ).*"
                text = re.sub(row, rf"\g<1>{NOT_MEASURED}", text)
        elif docname == self.index:
            text = re.sub(r":alt: *$", ":alt: Picture of the example", text, flags=re.M)
        content[0] = text


def _alternatives(text: str, stem: str) -> str:
    """Return the text of a page, with the heading above instead of the file's name as an image's alternative."""
    heading, lines = "", text.split("\n")
    for number, line in enumerate(lines):
        if number and re.fullmatch(r"([=-])\1{2,}", line):
            heading = lines[number - 1]
        elif line.strip() == f":alt: {stem}":
            lines[number] = line.replace(stem, f"Figure of the section “{heading}”")
    return "\n".join(lines)


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
    bundle, stem = target / f"{example.stem}.zip", target / example.stem
    if changed or not bundle.is_file():
        files = [stem.with_suffix(suffix) for suffix in (".py", ".ipynb")]
        zip_files([str(path) for path in files if path.is_file()], bundle, target)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    for name, default in (("dir", "docs/recordings"), ("package", "src/actoffload"), ("mode", "auto")):
        app.add_config_value(f"recordings_{name}", default, "")
    gallery = GalleryRecordings()
    app.connect("builder-inited", gallery.prepare, priority=100)  # after sphinx-gallery has completed its configuration
    app.connect("builder-inited", gallery.finish, priority=900)  # after it has executed the examples, at 500
    app.connect("env-get-outdated", gallery.outdated)
    app.connect("source-read", gallery.edit)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
