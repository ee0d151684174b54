"""Print for each gallery example whether its recorded run is current.

Usage: python docs/tools/check_gallery.py [--strict]

A damaged recording and a recording of a removed example are errors. A missing recording, one of another text, and
one of other library sources are only reported, since a GPU is needed to record them; with --strict, for releases,
they are errors too.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import recording_data as data  # noqa: E402 - lies in docs/_ext


def check_gallery(root: Path) -> tuple[list[str], list[str]]:
    """Compare recordings with examples and sources.

    Parameters
    ----------
    root : Path
        The project's root.

    Returns
    -------
    errors, reports : list of str
        One sentence for each error, and for each outdated or missing recording.
    """
    examples_dir, recordings = root / "examples", root / "docs" / "recordings"
    sources = data.source_digest(root / "src" / "actoffload")
    found = data.find_recordings(recordings)
    examples = {p.relative_to(examples_dir).as_posix(): p for p in data.find_examples(examples_dir)}
    errors, reports = [], []
    for name, folder in found.items():
        if name not in examples:
            errors.append(f"{name}: has a recording but no example; remove {folder.relative_to(root)}.")
    for name, example in examples.items():
        if name not in found:
            reports.append(f"{name}: has no recording; its page is built on the reference device.")
            continue
        try:
            recorded = data.load_recording(found[name])
        except data.RecordingError as error:
            errors.append(f"{name}: {error}")
            continue
        if recorded.example_digest != data.example_digest(example):
            reports.append(f"{name}: its text changed since its recording of {recorded.date[:10]}.")
        elif recorded.reference:
            errors.append(f"{name}: its recording was made on the reference device, not on an accelerator.")
        elif recorded.source_digest != sources:
            reports.append(f"{name}: recorded on {recorded.date[:10]} from other library sources than the present.")
        else:
            print(f"gallery: {name}: current, recorded on {recorded.device}, {recorded.date[:10]}.")
    return errors, reports


def main(arguments: list[str]) -> int:
    """Print the state of every example; return 1 on errors."""
    errors, reports = check_gallery(ROOT)
    for line in errors + reports:
        print(f"gallery: {line}")
    return 1 if errors or ("--strict" in arguments and reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
