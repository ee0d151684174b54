"""Break the tagged statements of the source one after another, and expect a test to fail each time.

Run it with ``nox -s mutation``, or ``python tests/mutation/mutate.py [--only TEXT] [--jobs N] [--tested]``.
Exits with 1 if the tests pass on a broken source.

`KILLERS` names the test that has to fail for each mutant.  ``--find tests/engine`` runs other tests instead, and writes
the first one that fails there.
"""

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant, tagged

ROOT = Path(__file__).parents[2]
COPIED = ["src", "tests", "conftest.py", "pyproject.toml"]
LIMIT = 120.0
"""Seconds after which the tests of a mutant are ended; that counts as a failure."""

KILLERS = Path(__file__).with_name("killers.json")
"""For each mutant, the test that has to fail."""

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Verdict:
    """What the tests said about one mutant."""

    red: bool  # a test failed, as it should
    test: str  # the first one that did
    seconds: float  # wall-clock time of the run


class _First:
    """Writes the name of the first test, or file, that fails into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: object) -> None:
        self._note(report)

    def pytest_collectreport(self, report: object) -> None:
        self._note(report)

    def _note(self, report: object) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid.removeprefix("tests/"), encoding="utf-8")


def snapshot(directory: Path) -> None:
    """Copy what the tests need: a source that is edited meanwhile does not mix with what is judged."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, directory)
    shutil.copy(Path(__file__).with_name("weakparts.py"), directory / "src")


def _run(directory: Path, tests: list[str], share: int) -> None:
    """Run tests in a copy of the project, in a process of its own."""
    output = os.open(directory / f"output{share}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(directory)
    import pytest

    # The copies have the compiled files of the original, also where the environment forbids to write such files.
    sys.dont_write_bytecode = False
    gc.freeze()  # what was loaded beforehand is never garbage, and pytest and the tests collect many times
    # Rewritten asserts only say more in a message that nobody reads.
    options = ["-x", "-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
    sys.exit(pytest.main([*options, *tests], plugins=[_First(directory / f"failed{share}")]))


def judge(directory: Path, tests: list[str], limit: float = LIMIT, share: int = 0) -> Verdict:
    """Run tests in a copy of the project, for at most `limit` seconds."""
    start = time.perf_counter()
    process = _processes.Process(target=_run, args=(directory, tests, share))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return Verdict(True, f"no end within {limit:.0f} s", limit)
    seconds = time.perf_counter() - start
    failed = directory / f"failed{share}"
    test = failed.read_text(encoding="utf-8") if failed.exists() else ""
    if process.exitcode and not test:
        output = directory / f"output{share}"
        tail = output.read_text(encoding="utf-8").strip().splitlines()[-1:] if output.exists() else []
        return Verdict(True, f"pytest ended with {process.exitcode}: {' '.join(tail)}", seconds)
    return Verdict(process.exitcode != 0, test, seconds)


def judge_mutant(mutant: Mutant, original: Path, tests: list[str], limit: float = LIMIT) -> Verdict:
    """Run tests after changing one file in a copy that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutant") as directory:
        copy = shutil.copytree(original, Path(directory) / "project", copy_function=os.link)
        changed = copy / "src" / mutant.path
        changed.unlink()  # the name in the copy only: the file is also the original's
        changed.write_text(mutant.text, encoding="utf-8")
        return judge(copy, tests, limit)


def _row(name: str, place: str, verdict: str, test: str, seconds: str) -> str:
    return f"| {name:<62} | {place:<32} | {verdict:<8} | {seconds:>7} | {test} |"


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the table; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="judge only mutants whose name or path contains this text")
    parser.add_argument("--tested", action="store_true", help="all tests have just passed: do not run them first")
    parser.add_argument("--find", nargs="+", default=[], metavar="TESTS", help="find a test that fails among these")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="how many at a time")
    options = parser.parse_args(None if arguments is None else list(arguments))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONPATH", None)
    _processes.set_forkserver_preload(["torch", "torch._dynamo", "pytest", "hypothesis.strategies"])
    with tempfile.TemporaryDirectory(prefix="original") as directory:
        original = Path(directory)
        snapshot(original)
        try:
            every = list(tagged(original / "src"))
        except LookupError as error:
            parser.error(str(error))
        mutants = [mutant for mutant in every if options.only in mutant.name or options.only in mutant.path]
        if not mutants:
            parser.error(f"no mutant has {options.only!r} in its name or path")
        killers: dict[str, str] = json.loads(KILLERS.read_text(encoding="utf-8"))
        if lacking := [mutant.name for mutant in mutants if mutant.name not in killers and not options.find]:
            parser.error(f"killers.json has no test for {', '.join(lacking)}: find one with --find TESTS")
        return judge_all(mutants, killers, original, options)


def judge_all(mutants: list[Mutant], killers: dict[str, str], original: Path, options: argparse.Namespace) -> int:
    """Print the table of these mutants; return 1 if one survived or the tests cannot be trusted.

    Tests that all have just been tested are only collected on the unchanged source, which also finds missing ones.
    """
    jobs = options.jobs
    chosen = {mutant.name: options.find or [f"tests/{killers[mutant.name]}"] for mutant in mutants}
    # The unchanged source must pass, and one that cannot be imported must not: else the tests see other files.
    # The first runs are in the original, so that all copies have its compiled files.
    tests = list(dict.fromkeys(test for each in chosen.values() for test in each))
    shares = [tests[k::jobs] for k in range(min(jobs, len(tests)))]
    with ThreadPoolExecutor(jobs) as pool:
        more = ["--collect-only"] if options.tested else []
        verdicts = list(pool.map(lambda k: judge(original, [*more, *shares[k]], 5 * LIMIT, k), range(len(shares))))
    sound = max(verdicts, key=lambda verdict: (verdict.red, verdict.seconds))
    if sound.red:
        print(f"The tests fail on the unchanged source ({sound.test}); repair that first.")
        return 1
    nonsense = Mutant("nonsense", "actoffload/device/__init__.py", 1, "raise ImportError('not this copy')\n")
    if not judge_mutant(nonsense, original, tests[:1]).red:
        print("The tests pass on a source that cannot be imported: they do not run on the copy.")
        return 1

    print(f"{len(mutants)} mutants; the unchanged source passes in {sound.seconds:.0f} s.\n")
    print(_row("what is broken", "where", "tests", "first test that failed", "seconds"))
    print(_row("---", "---", "---", "---", "---"))
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        limit = (5 if options.find else 1) * LIMIT
        verdicts = pool.map(lambda mutant: judge_mutant(mutant, original, chosen[mutant.name], limit), mutants)
        for mutant, verdict in zip(mutants, verdicts, strict=True):
            survivors += not verdict.red
            if "::" in verdict.test:
                killers[mutant.name] = verdict.test
            place = f"{mutant.path.removeprefix('actoffload/')}:{mutant.line}"
            said = "red" if verdict.red else "SURVIVED"
            print(_row(mutant.name, place, said, verdict.test, f"{verdict.seconds:.1f}"), flush=True)
    if options.find:
        KILLERS.write_text(json.dumps(killers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"\n{len(mutants) - survivors} of {len(mutants)} mutants made a test fail.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
