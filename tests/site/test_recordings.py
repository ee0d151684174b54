"""Pages as they are built: recorded runs, examples that changed since and are executed, and a figure."""

import re
from xml.etree import ElementTree

import pytest

PAGE = "gallery/first.html"


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html))


def log_of_build(project) -> str:
    """Build without a warning; return the log."""
    log, warnings = project.build()
    assert warnings == ""
    return log


def test_recorded_page_is_restored_and_not_executed(recorded):
    log = log_of_build(recorded)
    assert recorded.runs == 0
    html = recorded.html(PAGE)
    text = text_of(html)
    assert "Recorded on Imagined GPU" in text
    assert "driver 1.2.3" in text
    assert "D2H 50.0 GB/s, H2D 51.0 GB/s" in text
    assert "output of the run" in text
    assert "recording-reference" not in html
    assert "gallery: first: Recorded on Imagined GPU" in log


def test_changed_text_is_shown_with_the_recorded_output(recorded):
    text = recorded.example.read_text().replace("Its text is long enough", "Its other text is long enough")
    text = text.replace("# One cell.", "# Another heading.").replace('print("output', '# Why.\nprint("output')
    recorded.example.write_text(text + "\n# %%\n# A conclusion.\n")
    log_of_build(recorded)
    assert recorded.runs == 0
    page = text_of(recorded.html(PAGE))
    assert "Recorded on Imagined GPU" in page
    order = ["Its other text", "Another heading.", "# Why.", "output of the run", "A conclusion.", "Peak device memory"]
    assert [page.index(words) for words in order] == sorted(page.index(words) for words in order)
    assert "One cell." not in page
    assert "A conclusion." in (recorded.root / "docs" / "gallery" / "first.ipynb").read_text()


def test_changed_code_is_executed_on_the_reference_device_and_labelled(recorded):
    recorded.example.write_text(recorded.example.read_text() + "print('a new line')\n")
    log = log_of_build(recorded)
    assert recorded.runs == 1
    text = text_of(recorded.html(PAGE))
    assert "Ran on the reference device" in text
    assert "Its code changed since it was recorded on Imagined GPU" in text
    assert "a new line" in text
    assert "Peak device memory of this process: not measured (reference device)" in text
    assert "1234" not in text
    assert "GiB" not in text
    assert "recording-reference" in recorded.html(PAGE)
    assert "gallery: first: Ran on the reference device · Without a GPU" in log
    assert "Its code changed since it was recorded on Imagined GPU" in log


def test_without_recording_the_page_says_so_and_is_executed_once(project):
    project.build()
    assert "It has no recorded GPU run yet." in project.html(PAGE)
    project.build()
    assert project.runs == 1
    (project.root / "src" / "actoffload" / "__init__.py").write_text("version = 2\n")
    project.build()
    assert project.runs == 2  # the library changed: the earlier local run is outdated


def test_a_figure_has_a_light_and_a_dark_image_an_alt_text_and_a_caption(built) -> None:
    project, warnings = built
    html = project.html("deep/page.html")
    assert warnings == ""
    images = re.findall(r'<img alt="([^"]*)" class="([^"]*)" src="([^"]*)"', html)
    assert [css for _, css, _ in images] == ["only-light", "only-dark"]
    for alt, _, source in images:
        assert "Layers 0, 1 and 2 of 5 are offloaded; compute waits 16.8 ms for copies" in alt
        file = project.root / "out" / "html" / "deep" / source
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert "Three of five, with <em>emphasis</em>." in html
    assert 'href="#the-stalls"' in html
    # The theme hides siblings that follow an image of the other colour scheme, so the caption must not be one.
    figure = re.search(r"<figure.*?</figure>", html, flags=re.DOTALL)
    assert figure is not None
    assert re.search(r"</div>\s*<figcaption>", figure.group())


def test_runs_of_the_reference_device_are_not_recorded(project):
    import record_gallery
    from recording_data import RecordingError

    project.build()
    archive = project.root / "archive" / "reference.tar.gz"
    packed, problems = record_gallery.pack(project.root, archive, ["first"])
    assert packed == []
    assert problems == ["first: not recorded: it ran on the reference device; record where torch sees a GPU."]
    assert record_gallery.pack(project.root, archive, ["first"], rehearse=True) == (["first"], [])
    with pytest.raises(RecordingError, match=r"first\.py was recorded on the reference device"):
        record_gallery.unpack(archive, project.root / "docs" / "recordings")
    assert not (project.root / "docs" / "recordings").exists()
