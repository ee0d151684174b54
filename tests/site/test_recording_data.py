"""Digests of recordings and their archive, without Sphinx."""

from __future__ import annotations

import pytest


def test_source_digest_depends_on_names_and_contents_only(tmp_path):
    from recording_data import source_digest

    for name, text in {"a/__init__.py": "x = 1\n", "a/sub/b.py": "y = 2\n", "a/notes.txt": "no code"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    first = source_digest(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("still no code")
    (tmp_path / "a" / "sub" / "b.py").write_bytes(b"y = 2\r\n")
    assert source_digest(tmp_path / "a") == first
    (tmp_path / "a" / "sub" / "b.py").rename(tmp_path / "a" / "sub" / "c.py")
    renamed = source_digest(tmp_path / "a")
    assert renamed != first
    (tmp_path / "a" / "sub" / "c.py").write_text("y = 3\n")
    assert source_digest(tmp_path / "a") != renamed


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
