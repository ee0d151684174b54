"""What a recorded run of a gallery example is, and how it is kept on disk.

No Sphinx and no torch in here: the script that records on a GPU machine, the site's build, the
freshness check and the benchmarks all read these functions.

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
    """A recording is damaged, incomplete or of another format; the message says which file and what to do."""


@dataclass(frozen=True)
class Provenance:
    """Where the figures on one gallery page come from.

    Attributes
    ----------
    example : str
        Path of the example inside the examples folder, with forward slashes, for instance ``basic.py``.
    example_digest : str
        :func:`example_digest` of the text that was executed.
    source_digest : str
        :func:`source_digest` of the library that the example imported.
    device : str
        Name of the accelerator, or ``"reference device (CPU)"``.
    reference : bool
        True when there was no accelerator: figures are then not GPU figures.
    driver, torch, python : str
        Versions. ``driver`` is empty on the reference device.
    link : dict of str to float
        Measured bandwidth in bytes per second, keys ``d2h`` and ``h2d``; empty on the reference device.
    toolchain : dict of str to str
        Versions of the packages that wrote the page.
    command : str
        What was run to make the recording.
    date : str
        UTC, ISO 8601, to the second.
    files : dict of str to str
        sha256 of each file of the recording by its path inside the recording's folder.
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
        """Return the plain dictionary that is written to disk."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: object, where: str) -> Provenance:
        """Read what :meth:`to_json` wrote; raise `RecordingError` naming `where` if it is anything else."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RecordingError(f"{where}: expected a recording of format {FORMAT}; record the example again.")
        known = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        try:
            return cls(**known)
        except TypeError as error:
            raise RecordingError(f"{where}: {error}; record the example again.") from error


def read_provenance(path: Path) -> Provenance:
    """Read one provenance file; raise `RecordingError` when it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path.name} of {path.parent.name} cannot be read: {error}.") from error
    return Provenance.from_json(data, f"{path.parent.name}/{path.name}")


def write_provenance(path: Path, provenance: Provenance) -> None:
    """Write one provenance file, sorted and indented so that changes read well in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(provenance.to_json(), indent=1, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")


def _text(path: Path) -> bytes:
    # Universal newlines, as sphinx-gallery hashes: a checkout with CRLF is the same text.
    return path.read_text(encoding="utf-8", errors="surrogateescape").encode("utf-8", "surrogateescape")


def source_digest(package: Path) -> str:
    """Digest the library's sources.

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
    """Digest one example together with the helper modules (``_*.py``) that lie beside it."""
    digest = hashlib.sha256(_text(example))
    for helper in sorted(example.parent.glob("_*.py")):
        digest.update(helper.name.encode() + b"\0" + _text(helper) + b"\0")
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_examples(examples_dir: Path) -> list[Path]:
    """List the examples that become gallery pages: every ``*.py`` whose name starts with no underscore."""
    found = (p for p in examples_dir.rglob("*.py") if not p.name.startswith("_"))
    return sorted(p for p in found if "__pycache__" not in p.parts)


def generated_files(gallery_dir: Path, example: Path) -> Iterator[Path]:
    """Iterate over what sphinx-gallery keeps of one executed example.

    Parameters
    ----------
    gallery_dir : Path
        Folder with the generated page.
    example : Path
        The example, or only its name.

    Yields
    ------
    Path
        The page, its cache files (``.md5``, cost, names used), the notebook, images and thumbnail, as far as
        they exist. The ``.zip`` is left out: it is made of the others.
    """
    stem = example.stem
    for suffix in (".rst", ".py.md5", ".cost.json", ".codeobj.json", ".ipynb"):
        path = gallery_dir / (stem + suffix)
        if path.is_file():
            yield path
    # Not a glob: the images of "basic" must not take along those of "basic_more".
    mine = re.compile(rf"sphx_glr_{re.escape(stem)}_(\d{{3}}(_\d+_\d+x)?|thumb)\.\w+")
    for folder in (gallery_dir / "images", gallery_dir / "images" / "thumb"):
        if folder.is_dir():
            yield from sorted(p for p in folder.iterdir() if p.is_file() and mine.fullmatch(p.name))


def recording_dir(recordings: Path, example: str) -> Path:
    """Return the folder of the recording of ``example`` (``basic.py`` gives ``<recordings>/basic``)."""
    return recordings / Path(example).with_suffix("")


def store_recording(gallery_dir: Path, example: Path, provenance: Provenance, target: Path) -> Provenance:
    """Copy one executed example from the gallery into a recording's folder.

    Parameters
    ----------
    gallery_dir : Path
        Folder in which sphinx-gallery has just executed the example.
    example : Path
        The example's source file.
    provenance : Provenance
        What is known of the run; its ``files`` are filled in here.
    target : Path
        Folder of the recording; what it held before is removed.

    Returns
    -------
    Provenance
        With ``files``, as written to ``recording.json``.

    Raises
    ------
    RecordingError
        If the example left no page or no ``.md5``, that is, was not executed to its end.
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
    """Read a recording and verify every file of it; raise `RecordingError` at the first that differs."""
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
    """Return the folders that hold a recording, by the example's path as the folder spells it."""
    if not recordings.is_dir():
        return {}
    folders = sorted(p.parent for p in recordings.rglob(RECORDING_FILE))
    return {folder.relative_to(recordings).as_posix() + ".py": folder for folder in folders}
