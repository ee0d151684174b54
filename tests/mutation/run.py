"""Breaks the engine in one place after another, and expects a test to fail each time.

Run it with ``nox -s mutation``, or ``python tests/mutation/run.py [--only TEXT] [--jobs N]``.  Exits with 1 if a
broken engine passed the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant, tagged

__all__ = ["Verdict", "main"]

ROOT = Path(__file__).parents[2]
TESTS = ["tests/engine/edges", "tests/engine/test_adversary.py"]
COPIED = ["src", "tests/adversary", "tests/conftest.py", *TESTS, "conftest.py", "pyproject.toml"]
LIMIT = 600.0


@dataclass(frozen=True)
class Verdict:
    """What the tests said about one mutant.

    Parameters
    ----------
    red : bool
        A test failed, as it should.
    test : str
        The first one that did.
    seconds : float
        Wall-clock time of the run.
    """

    red: bool
    test: str
    seconds: float


def snapshot(directory: Path) -> None:
    """Copy what the tests need; a source that is edited meanwhile does not mix with what is judged."""
    for name in COPIED:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    shutil.copy(Path(__file__).with_name("weakparts.py"), directory / "src")


def judge(mutant: Mutant | None, directory: Path) -> Verdict:
    """Run the tests in a copy of the project after changing one file, or none."""
    if mutant is not None:
        (directory / "src" / mutant.path).write_text(mutant.text, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *TESTS],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return Verdict(True, f"no end within {LIMIT:.0f} s", LIMIT)
    seconds = time.perf_counter() - start
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) and failed is None:
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return Verdict(True, f"pytest ended with {done.returncode}: {' '.join(tail)}", seconds)
    return Verdict(done.returncode != 0, failed[1] if failed else "", seconds)


def _judge_in_a_copy(mutant: Mutant | None, original: Path) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mutant") as directory:
        copy = shutil.copytree(original, Path(directory) / "project")
        return judge(mutant, copy)


def _row(name: str, place: str, verdict: str, test: str, seconds: str) -> str:
    return f"| {name:<62} | {place:<28} | {verdict:<8} | {seconds:>7} | {test} |"


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the table; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="judge only mutants whose name contains this text")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="how many at a time")
    options = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory(prefix="original") as directory:
        original = Path(directory)
        snapshot(original)
        try:
            every = list(tagged(original / "src"))
        except LookupError as error:
            parser.error(str(error))
        mutants = [mutant for mutant in every if options.only in mutant.name]
        if not mutants:
            parser.error(f"no mutant has {options.only!r} in its name")
        return judge_all(mutants, original, options.jobs)


def judge_all(mutants: list[Mutant], original: Path, jobs: int) -> int:
    """Print the table of these mutants; return 1 if one survived or the tests cannot be trusted."""
    # An untouched copy must pass, and one that cannot even be imported must not: else the tests see other files.
    sound = _judge_in_a_copy(None, original)
    if sound.red:
        print(f"The tests fail on the unchanged source ({sound.test}); repair that first.")
        return 1
    nonsense = Mutant("nonsense", "actoffload/__init__.py", 1, "raise ImportError('not this copy')\n")
    if not _judge_in_a_copy(nonsense, original).red:
        print("The tests pass on a source that cannot be imported: they do not run on the copy.")
        return 1

    print(f"{len(mutants)} mutants; the unchanged source passes in {sound.seconds:.0f} s.\n")
    print(_row("what is broken", "where", "tests", "first test that failed", "seconds"))
    print(_row("---", "---", "---", "---", "---"))
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(lambda mutant: _judge_in_a_copy(mutant, original), mutants)
        for mutant, verdict in zip(mutants, verdicts, strict=True):
            survivors += not verdict.red
            place = f"{mutant.path.removeprefix('actoffload/')}:{mutant.line}"
            said = "red" if verdict.red else "SURVIVED"
            print(_row(mutant.name, place, said, verdict.test, f"{verdict.seconds:.1f}"), flush=True)
    print(f"\n{len(mutants) - survivors} of {len(mutants)} mutants made a test fail.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
