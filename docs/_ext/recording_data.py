"""Recorded runs of gallery examples on disk.

This module imports neither Sphinx nor torch: it is used by the script that records on a GPU machine, the
build of the site, the freshness check and the benchmarks.

A recording is a folder, ``docs/recordings/<example>/``, with the files that sphinx-gallery leaves after it
has executed the example, and ``recording.json``, a :class:`Provenance`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

FORMAT = 1
RECORDING_FILE = "recording.json"


class RecordingError(Exception):
    """A recording is damaged, incomplete or of another format; the message names the file and what to do."""


@dataclass(frozen=True)
class Provenance:
    """Origin of the figures on one gallery page.

    Attributes
    ----------
    example : str
        Path of the example relative to the examples folder, with forward slashes, such as ``basic.py``.
    example_digest : str
        :func:`example_digest` of the text that was executed.
    source_digest : str
        :func:`source_digest` of the library that the example imported.
    device : str
        Name of the accelerator, or ``"reference device (CPU)"``.
    reference : bool
        True if there was no accelerator: the figures are then not GPU figures.
    driver, torch, python : str
        Versions. ``driver`` is empty on the reference device.
    link : dict of str to float
        Measured bandwidth in bytes per second, keys ``d2h`` and ``h2d``; empty on the reference device.
    toolchain : dict of str to str
        Versions of the packages that wrote the page.
    command : str
        Command that made the recording.
    date : str
        Time in UTC, ISO 8601, with a resolution of 1 s.
    files : dict of str to str
        sha256 of each file, by its path relative to the folder of the recording.
    """

    example: str
    example_digest: str
    source_digest: str
    device: str
    reference: bool
    driver: str
    torch: str
    python: str
    link: dict[str, float] = field(default_factory=dict)
    toolchain: dict[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the dictionary that is written as JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: object, where: str) -> Provenance:
        """Parse the result of :meth:`to_json`; raise `RecordingError` with `where` if it is invalid."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RecordingError(f"{where}: expected a recording of format {FORMAT}; record the example again.")
        known = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        try:
            return cls(**known)
        except TypeError as error:
            raise RecordingError(f"{where}: {error}; record the example again.") from error


def read_provenance(path: Path) -> Provenance:
    """Read one provenance file; raise `RecordingError` if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path.name} of {path.parent.name} cannot be read: {error}.") from error
    return Provenance.from_json(data, f"{path.parent.name}/{path.name}")


def write_provenance(path: Path, provenance: Provenance) -> None:
    """Write one provenance file, sorted and indented for readable diffs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(provenance.to_json(), indent=1, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")


def _text(path: Path) -> bytes:
    # Universal newlines, as in the hashes of sphinx-gallery: a checkout with CRLF has the same digest.
    return path.read_text(encoding="utf-8", errors="surrogateescape").encode("utf-8", "surrogateescape")


def source_digest(package: Path) -> str:
    """Return the digest of the sources of the library.

    Parameters
    ----------
    package : Path
        The package folder, ``src/actoffload``.

    Returns
    -------
    str
        sha256, as hexadecimal digits, over the sorted relative paths and the contents of all ``*.py`` files.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda p: p.relative_to(package).as_posix()):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + _text(path) + b"\0")
    return digest.hexdigest()


def example_digest(example: Path) -> str:
    """Return the digest of an example together with the helper modules (``_*.py``) in its folder."""
    digest = hashlib.sha256(_text(example))
    for helper in sorted(example.parent.glob("_*.py")):
        digest.update(helper.name.encode() + b"\0" + _text(helper) + b"\0")
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_examples(examples_dir: Path) -> list[Path]:
    """List the examples that become gallery pages: every ``*.py`` whose name does not start with an underscore."""
    found = (p for p in examples_dir.rglob("*.py") if not p.name.startswith("_"))
    return sorted(p for p in found if "__pycache__" not in p.parts)


def generated_files(gallery_dir: Path, example: Path) -> Iterator[Path]:
    """Yield the files that sphinx-gallery keeps of one executed example.

    Parameters
    ----------
    gallery_dir : Path
        Folder with the generated page.
    example : Path
        The example, or only its name.

    Yields
    ------
    Path
        The page, its cache files (``.md5``, cost, names used), the notebook, images and thumbnail, if they
        exist. The ``.zip`` is excluded, since it can be built from the others.
    """
    stem = example.stem
    for suffix in (".rst", ".py.md5", ".cost.json", ".codeobj.json", ".ipynb"):
        path = gallery_dir / (stem + suffix)
        if path.is_file():
            yield path
    # Not a glob, which would match the images of "basic_more" for "basic".
    mine = re.compile(rf"sphx_glr_{re.escape(stem)}_(\d{{3}}(_\d+_\d+x)?|thumb)\.\w+")
    for folder in (gallery_dir / "images", gallery_dir / "images" / "thumb"):
        if folder.is_dir():
            yield from sorted(p for p in folder.iterdir() if p.is_file() and mine.fullmatch(p.name))


def recording_dir(recordings: Path, example: str) -> Path:
    """Return the folder of the recording of ``example`` (``basic.py`` gives ``<recordings>/basic``)."""
    return recordings / Path(example).with_suffix("")


def store_recording(gallery_dir: Path, example: Path, provenance: Provenance, target: Path) -> Provenance:
    """Copy one executed example from the gallery into the folder of its recording.

    Parameters
    ----------
    gallery_dir : Path
        Folder in which sphinx-gallery executed the example.
    example : Path
        The example's source file.
    provenance : Provenance
        Provenance of the run; its ``files`` are set here.
    target : Path
        Folder of the recording; its previous files are removed.

    Returns
    -------
    Provenance
        With ``files``, as written to ``recording.json``.

    Raises
    ------
    RecordingError
        If the example has no page or no ``.md5``, that is, was not executed to its end.
    """
    sources = list(generated_files(gallery_dir, example))
    names = {p.name for p in sources}
    for needed in (example.stem + ".rst", example.name + ".md5"):
        if needed not in names:
            raise RecordingError(f"{example.name} left no {needed}: it did not run to its end.")
    if target.is_dir():
        for old in sorted(target.rglob("*"), reverse=True):
            old.rmdir() if old.is_dir() else old.unlink()
    digests = {}
    for path in sources:
        name = path.relative_to(gallery_dir).as_posix()
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        digests[name] = file_digest(copy)
    complete = replace(provenance, files=digests)
    write_provenance(target / RECORDING_FILE, complete)
    return complete


def load_recording(folder: Path) -> Provenance:
    """Read a recording and verify its files; raise `RecordingError` for the first that differs."""
    provenance = read_provenance(folder / RECORDING_FILE)
    for name, digest in provenance.files.items():
        path = folder / name
        if not path.is_file():
            raise RecordingError(f"The recording of {provenance.example} lacks {name}; record it again.")
        if file_digest(path) != digest:
            raise RecordingError(
                f"{name} in the recording of {provenance.example} is not the file that was recorded; "
                "restore it or record the example again."
            )
    return provenance


def find_recordings(recordings: Path) -> dict[str, Path]:
    """Return the folders with a recording, by the path of the example that the folder name gives."""
    if not recordings.is_dir():
        return {}
    folders = sorted(p.parent for p in recordings.rglob(RECORDING_FILE))
    return {folder.relative_to(recordings).as_posix() + ".py": folder for folder in folders}
