"""Record the gallery on a machine with an accelerator, and put recordings into the repository.

``PYTHONPATH=src python tools/record_gallery.py record --out DIR`` executes every example on the machine with the
accelerator (needs torch, matplotlib, sphinx-gallery and myst-parser) and packs them into DIR/gallery-recording.tar.gz;
with ``--only basic,pipelines``, only these. In the repository, ``unpack ARCHIVE`` replaces the recordings that are in
the archive; it rejects that of ``record --rehearse``, which needs no accelerator. ``check`` prints whether each
recording is current: a damaged one and one of a removed example are errors, an outdated or missing one only with
``--strict``, since it needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_ext")]

import recording_data as data  # noqa: E402 - lies in docs/_ext

ARCHIVE = "gallery-recording.tar.gz"
GPUS = {"pipelines": 2}  # that an example needs; with fewer it runs on the CPU
EXTENSIONS = "myst_parser,sphinx_gallery.gen_gallery,recordings"  # a GPU machine needs no others of the site


def execute_gallery(root: Path, names: Iterable[str]) -> int:
    """Execute the named examples with Sphinx, whose dummy builder writes no pages; return its exit status."""
    shutil.rmtree(root / "docs" / "gallery", ignore_errors=True)
    pattern = rf"[\\/]({'|'.join(names)})\.py$"
    with tempfile.TemporaryDirectory() as out:
        options = ["-b", "dummy", "-c", str(root), "-d", f"{out}/doctrees", "-D", f"extensions={EXTENSIONS}"]
        options += ["-D", f"sphinx_gallery_conf.filename_pattern={pattern}"]
        command = [sys.executable, "-m", "sphinx", *options, str(root / "docs"), f"{out}/dummy"]
        return subprocess.run(
            command, cwd=root, env={**os.environ, "ACTOFFLOAD_GALLERY": "live"}, check=False
        ).returncode


def machine_paths(folder: Path, root: Path) -> list[str]:
    """List the text files of a recording that contain a path of this machine, for example in a warning."""
    paths = {str(root), sys.prefix, sys.base_prefix, str(Path.home())} - {"/", "/usr"}
    texts = {p: p.read_text("utf-8") for p in sorted(folder.rglob("*")) if p.suffix in (".rst", ".json", ".ipynb")}
    return [f"{p.relative_to(folder)}: {name}" for p, t in texts.items() for name in sorted(paths) if name + "/" in t]


def pack(root: Path, archive: Path, names: Iterable[str], *, rehearse: bool = False) -> tuple[list[str], list[str]]:
    """Pack the named examples as docs/gallery holds them executed; with `rehearse`, also runs of the reference device.

    Returns the names of the packed examples, and a sentence for each example that is missing or must not be committed.
    """
    packed, problems = [], []
    gallery, examples = root / "docs" / "gallery", data.find_examples(root / "examples")
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            target = Path(temporary) / name
            try:
                run = data.Provenance.read(gallery / f"{name}.executed.json")
                if run.reference and not rehearse:
                    raise data.RecordingError("it ran on the reference device; record where torch sees a GPU.")
                run = replace(run, command="tools/record_gallery.py record")
                data.store_recording(gallery, examples[name], run, target)
            except data.RecordingError as error:
                problems.append(f"{name}: not recorded: {error}")
                continue
            problems += [f"{name}: a path of this machine stands in {p}" for p in machine_paths(target, root)]
            packed.append(name)
        archive.parent.mkdir(parents=True, exist_ok=True)
        shutil.make_archive(str(archive).removesuffix(".tar.gz"), "gztar", temporary)
    return packed, problems


def unpack(archive: Path, recordings: Path) -> list[str]:
    """Replace the recordings that an archive has, and return their names; replace nothing if one is damaged."""
    with tempfile.TemporaryDirectory() as temporary:
        shutil.unpack_archive(archive, temporary, filter="data")
        found = data.find_recordings(Path(temporary))
        if not found:
            raise data.RecordingError(f"{archive.name} holds no recording; expected one written by `record`.")
        for folder in found.values():
            data.load_recording(folder)
        for name, folder in found.items():
            shutil.rmtree(recordings / name, ignore_errors=True)
            shutil.copytree(folder, recordings / name)
    return list(found)


def check(root: Path) -> tuple[list[str], list[str]]:
    """Compare recordings with examples and sources; return a sentence for each error, and for each outdated one."""
    sources, recordings = data.source_digest(root / data.PACKAGE), root / data.RECORDINGS
    examples = data.find_examples(root / "examples")
    gone = sorted(data.find_recordings(recordings).keys() - examples)
    errors = [f"{name}: has a recording but no example; remove {data.RECORDINGS}/{name}." for name in gone]
    reports = []
    for name, example in examples.items():
        try:
            run = data.recorded_run(recordings / name, example)
        except data.NotRecordedError as missing:
            reports.append(f"{name}: {missing}")
        except data.RecordingError as error:
            errors.append(f"{name}: {error}")
        else:
            if run.source_digest == sources:
                print(f"gallery: {name}: current, recorded on {run.device}, {run.date[:10]}.")
            else:
                reports.append(f"{name}: recorded on {run.date[:10]} from other library sources than the present.")
    return errors, reports


def main(arguments: list[str]) -> int:
    """Run the command; return 1 if a recording is missing, rejected or, with ``check``, in error."""
    examples = list(data.find_examples(ROOT / "examples"))
    parser = argparse.ArgumentParser(description="Record gallery examples, unpack or check recordings.")
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="execute the gallery and pack it")
    record.add_argument("--out", type=Path, required=True, help=f"folder for {ARCHIVE}")
    record.add_argument("--only", default=",".join(examples), metavar="NAME[,NAME]", help="default: every example")
    record.add_argument("--rehearse", action="store_true", help="pack runs of the reference device too")
    commands.add_parser("unpack", help="put an archive into docs/recordings").add_argument("archive", type=Path)
    checking = commands.add_parser("check", help="compare recordings with examples and sources")
    checking.add_argument("--strict", action="store_true", help="fail if a recording is missing or outdated")
    options = parser.parse_args(arguments)
    if options.command == "check":
        errors, reports = check(ROOT)
        print("\n".join(f"gallery: {line}" for line in errors + reports))
        return 1 if errors or (options.strict and reports) else 0
    if options.command == "unpack":
        try:
            print("\n".join(f"unpacked {name}" for name in unpack(options.archive, ROOT / data.RECORDINGS)))
        except data.RecordingError as error:
            sys.exit(str(error))
        return 0
    names, archive = options.only.split(","), options.out / ARCHIVE
    if unknown := sorted(set(names) - set(examples)):
        parser.error(f"--only: no example {', '.join(unknown)}; expected {', '.join(examples)}.")
    found = torch.accelerator.device_count()
    for name in [name for name in names if found < GPUS.get(name, 0) and not options.rehearse]:
        names.remove(name)
        print(f"{name}: left out, as it needs {GPUS[name]} GPUs, and torch sees {found}.")
    status = execute_gallery(ROOT, names)
    packed, problems = pack(ROOT, archive, names, rehearse=options.rehearse)
    size = f"{archive.stat().st_size / 2**20:.2f} MiB"
    print("\n".join([*problems, f"{ARCHIVE}: {len(packed)} examples, {size}: {', '.join(packed)}"]))
    return 1 if problems or not packed or status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
