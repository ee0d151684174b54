"""The results as files of JSON, each with the device, the versions and the sources that it was measured with."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FORMAT = 1
BESIDE = "ACTOFFLOAD_BENCHMARKS_BESIDE"
"""The variable of the environment with what runs on another GPU of the host at the same time."""


def digest() -> str:
    """Return the digest of the library's sources, as in the recordings of the gallery."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        from recording_data import source_digest
    finally:
        sys.path.pop(0)
    return str(source_digest(ROOT / "src" / "actoffload"))


def beside() -> dict[str, str]:
    """Return what runs on another GPU of the host, as an entry of a result or of a part of one; empty if nothing."""
    found = os.environ.get(BESIDE)
    return {"beside": found} if found else {}


def write(folder: Path, name: str, data: dict[str, Any], command: str) -> Path:
    """Write one result, and the command that repeats it; return the path."""
    from actoffload.measure import describe_device

    origin = {
        "format": FORMAT,
        "benchmark": name,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(describe_device()),
        "source_digest": digest(),
        **({} if "parts" in data else beside()),
    }
    taken = sorted(origin.keys() & data.keys())
    if taken:
        raise ValueError(f"{name}: the data would overwrite {', '.join(taken)} of the result's origin; rename it.")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**origin, **data}, indent=1) + "\n", encoding="utf-8")
    return path


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return one result, or None if there is none; raise `ValueError` if it is of another format."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not of format {FORMAT}; run the benchmark again.")
    return data
