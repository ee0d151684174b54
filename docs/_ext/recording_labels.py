"""Labels of gallery pages with the origin of their figures, as docutils nodes."""

from __future__ import annotations

from dataclasses import dataclass

from docutils import nodes
from recording_data import Provenance

DIGITS = 12  # shown digits of a digest
NOT_MEASURED = "not measured (reference device)"
SPHINX_GALLERY_MEMORY = "Estimated memory usage:"
MEMORY = "Peak device memory"


@dataclass(frozen=True)
class Page:
    """One gallery page and the origin of its contents.

    Attributes
    ----------
    docname : str
        Name of the page in Sphinx.
    source_digest : str
        Digest of the current sources of the library.
    reason : str
        Reason why the example was executed in this build; empty if it was not.
    provenance : Provenance or None
        Provenance of the run that the page shows; None if the example was never executed.
    restored : bool
        True if the page shows a recorded run.
    """

    docname: str
    source_digest: str
    reason: str = ""
    provenance: Provenance | None = None
    restored: bool = False

    @property
    def stale(self) -> bool:
        """Whether the run used other library sources than the current ones."""
        return self.provenance is not None and self.provenance.source_digest != self.source_digest

    def summary(self) -> str:
        """Return one line for the build log that says what the page shows."""
        run = self.provenance
        if run is None:
            return f"not executed. {self.reason}"
        if not self.restored:
            return f"executed on {run.device}. {self.reason}"
        text = f"recorded on {run.device}, {run.date[:10]}"
        if self.stale:
            mine, now = run.source_digest[:DIGITS], self.source_digest[:DIGITS]
            text += f", from other library sources ({mine}) than the present ones ({now})"
        return text + "."


def _facts(run: Provenance) -> nodes.paragraph:
    """Return a line that identifies a run."""
    facts: list[list[nodes.Node]] = []
    if run.driver:
        facts.append([nodes.Text(f"driver {run.driver}")])
    facts += [[nodes.Text(f"torch {run.torch}")], [nodes.Text(f"Python {run.python}")]]
    if run.link:
        d2h, h2d = run.link["d2h"] / 1e9, run.link["h2d"] / 1e9
        facts.append([nodes.Text(f"D2H {d2h:.1f} GB/s, H2D {h2d:.1f} GB/s")])
    facts.append([nodes.Text(f"{run.date[:10]} {run.date[11:16]} UTC")])
    digest = run.source_digest[:DIGITS]
    facts.append([nodes.Text("library sources "), nodes.literal(digest, digest)])
    line = nodes.paragraph(classes=["recording-facts"])
    for fact in facts:
        line += nodes.inline("", "", *fact)
        line += nodes.Text(" ")
    return line


def page_box(page: Page) -> nodes.admonition:
    """Build the box below the title of a gallery page.

    Its CSS class is ``recording-restored``, ``recording-executed`` or ``recording-reference``, and also
    ``recording-stale`` if the run used other sources than the current ones.
    """
    run = page.provenance
    body: list[nodes.Node] = []
    if run is None:
        kind, title = "reference", "Not executed"
        body.append(nodes.paragraph("", f"This page shows the example's text only. {page.reason}"))
    elif run.reference:
        kind, title = "reference", "Ran on the reference device"
        text = "Without a GPU, this example ran on the CPU: bytes and times on this page are no GPU figures."
        body += [nodes.paragraph("", f"{text} {page.reason}".strip()), _facts(run)]
    else:
        kind = "restored" if page.restored else "executed"
        title = f"{'Recorded' if page.restored else 'Executed in this build'} on {run.device}"
        body.append(_facts(run))
    classes = ["recording", f"recording-{kind}"]
    if page.stale and run is not None:
        classes.append("recording-stale")
        now = page.source_digest[:DIGITS]
        text = "Recorded from other library sources than the present ones ("
        note = nodes.paragraph("", text, nodes.literal(now, now))
        note += nodes.Text("): output and figures may differ from what this version gives.")
        body.append(note)
    return nodes.admonition("", nodes.title("", title), *body, classes=classes)


def label_gallery_page(doctree: nodes.document, page: Page) -> None:
    """Insert the box below the title, and rename the memory figure of sphinx-gallery to `MEMORY`."""
    section = next(iter(doctree.findall(nodes.section)))
    section.insert(section.first_child_matching_class(nodes.title) + 1, page_box(page))
    for strong in list(doctree.findall(nodes.strong)):
        if strong.astext() != SPHINX_GALLERY_MEMORY:
            continue
        strong.children = [nodes.Text(MEMORY + ":")]
        if not _measured(page) and strong.parent is not None:
            strong.parent.children = [strong, nodes.Text(" " + NOT_MEASURED)]


def _measured(page: Page) -> bool:
    return page.provenance is not None and not page.provenance.reference


def relabel_costs(doctree: nodes.document, pages: list[Page]) -> None:
    """Edit the page of computation times of sphinx-gallery.

    Its scripts are removed, as they load from other hosts; the plain table is kept. The memory column gets its
    correct name, and runs of the reference device have no figure in it.
    """
    for raw in list(doctree.findall(nodes.raw)):
        raw.parent.remove(raw)
    unmeasured = {f"sphx_glr_{p.docname.replace('/', '_')}.py" for p in pages if not _measured(p)}
    for row in doctree.findall(nodes.row):
        last = row.children[-1]
        text = next(iter(last.findall(nodes.Text)), None)
        if text is None:
            continue
        if text.astext() == "Mem (MB)":
            text.parent.replace(text, nodes.Text(f"{MEMORY} (MB)"))
        elif any(ref.get("reftarget") in unmeasured for ref in row.findall() if isinstance(ref, nodes.Element)):
            text.parent.replace(text, nodes.Text(NOT_MEASURED))
