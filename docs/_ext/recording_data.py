"""Recorded runs of gallery examples on disk; imports neither Sphinx nor torch.

A recording is a folder, ``docs/recordings/<example>/``, with the files that sphinx-gallery writes when it executes an
example, and ``recording.json``, a :class:`Provenance`.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import shutil
import tokenize
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

FORMAT = 1
# Folders of the project: the recordings, and the library whose sources the digest is of.
RECORDINGS = "docs/recordings"
PACKAGE = "src/actoffload"
RECORDING_FILE = "recording.json"


class RecordingError(Exception):
    """A recording is damaged, incomplete or not of a GPU; the message names the file and what to do."""


class NotRecordedError(Exception):
    """No recorded run has the present code of an example; the message is the reason."""


@dataclass(frozen=True)
class Provenance:
    """Origin of the figures of a gallery page.

    The example is the name of its file. A run without an accelerator has ``reference`` set and no driver. The link is
    in bytes per second, with the keys ``d2h`` and ``h2d``. What ran on another GPU of the host is ``beside``. The files
    are sha256 digests by path.
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
    beside: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Provenance:
        """Read a provenance file; raise `RecordingError` if it is missing, damaged or of another format."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format", None) != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            return cls(**data)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            where = f"{path.parent.name}/{path.name}"
            raise RecordingError(f"{where} cannot be read: {error}; record the example again.") from error

    def write(self, path: Path) -> None:
        """Write a provenance file, sorted and indented for readable diffs."""
        path.write_text(
            json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )


def _text(path: Path) -> bytes:
    # Universal newlines, as in the hashes of sphinx-gallery: a checkout with CRLF has the same digest.
    return path.read_text(encoding="utf-8", errors="surrogateescape").encode("utf-8", "surrogateescape")


def _digest(paths: list[Path], base: Path, start: bytes = b"") -> str:
    parts = (path.relative_to(base).as_posix().encode() + b"\0" + _text(path) + b"\0" for path in paths)
    return hashlib.sha256(start + b"".join(parts)).hexdigest()


def source_digest(package: Path) -> str:
    """Return the sha256 of the relative paths and the contents of all ``*.py`` files of a package folder."""
    return _digest(sorted(package.rglob("*.py"), key=lambda p: p.relative_to(package).as_posix()), package)


def _code(example: Path) -> bytes:
    """Return the cells of code of an example, without its docstring, its texts, comments and empty lines."""
    text = _text(example).decode("utf-8", "surrogateescape")
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# %%"):
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    tree = ast.parse(text)
    if ast.get_docstring(tree) is not None:
        lines[: tree.body[0].end_lineno] = []
    cells = [cell.splitlines() for cell in re.split("^# %%.*$", "\n".join(lines), flags=re.MULTILINE)]
    written = ("\n".join(line.rstrip() for line in cell if line.strip()) for cell in cells)
    return "\n# %%\n".join(cell for cell in written if cell).encode("utf-8", "surrogateescape")


def example_digest(example: Path) -> str:
    """Return the sha256 of an example's code and of the helper modules (``_*.py``) in its folder.

    A recorded run is shown with the present text: see ``recordings.weave``.
    """
    return _digest(sorted(example.parent.glob("_*.py")), example.parent, _code(example))


def find_examples(folder: Path) -> dict[str, Path]:
    """Return the examples that become gallery pages, ``*.py`` without an underscore in front, by name."""
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}


def find_recordings(folder: Path) -> dict[str, Path]:
    """Return the folders with a recording, by the name of the example."""
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{RECORDING_FILE}"))}


def generated_files(gallery_dir: Path, example: Path) -> list[Path]:
    """List the files that sphinx-gallery keeps of an executed example, but for the ``.zip``, which can be made."""
    # Not a glob, which would match the images of "basic_more" for "basic".
    image = re.compile(rf"sphx_glr_{re.escape(example.stem)}_(\d{{3}}(_\d+_\d+x)?|thumb)\.\w+")
    suffixes = (".rst", ".py.md5", ".cost.json", ".codeobj.json", ".ipynb")
    found = [p for p in sorted(gallery_dir.glob("images/**/*")) if image.fullmatch(p.name)]
    return [p for p in [*(gallery_dir / (example.stem + suffix) for suffix in suffixes), *found] if p.is_file()]


def store_recording(gallery_dir: Path, example: Path, provenance: Provenance, target: Path) -> None:
    """Copy an executed example from the gallery folder into the folder of its recording, whose old files are removed.

    Raises `RecordingError` if the example has no page or no ``.md5``, that is, was not executed to its end.
    """
    sources = {path.relative_to(gallery_dir).as_posix(): path for path in generated_files(gallery_dir, example)}
    for needed in (example.stem + ".rst", example.name + ".md5"):
        if needed not in sources:
            raise RecordingError(f"{example.name} left no {needed}: it did not run to its end.")
    shutil.rmtree(target, ignore_errors=True)
    for name, path in sources.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sources.items()}
    replace(provenance, files=digests).write(target / RECORDING_FILE)


def load_recording(folder: Path) -> Provenance:
    """Read a recording and verify its device and files; raise `RecordingError` for the first that differs."""
    run = Provenance.read(folder / RECORDING_FILE)
    if run.reference:
        raise RecordingError(f"{run.example} was recorded on the reference device; record it where torch sees a GPU.")
    for name, digest in run.files.items():
        if not (folder / name).is_file():
            raise RecordingError(f"The recording of {run.example} lacks {name}; record it again.")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            other = f"{name} in the recording of {run.example} is not the file that was recorded"
            raise RecordingError(f"{other}; restore it or record the example again.")
    return run


def recorded_run(folder: Path, example: Path) -> Provenance:
    """Return the verified recording of an example's present code; raise `NotRecordedError` if there is none."""
    if not (folder / RECORDING_FILE).is_file():
        raise NotRecordedError("It has no recorded GPU run yet.")
    run = load_recording(folder)
    if run.example_digest != example_digest(example):
        raise NotRecordedError(f"Its code changed since it was recorded on {run.device} ({run.date[:10]}).")
    return run
