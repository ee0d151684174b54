"""Break the tagged statements of the source one after another, and expect a test to fail each time.

Run it with ``nox -s mutation``, or ``python tests/mutation/mutate.py [--only TEXT] [--jobs N] [--tested] [--record]``.
Exits with 1 if the tests pass on a broken source.

`KILLERS` lists the test that failed for each mutant when ``--record`` last ran. That test runs first, alone: one that
fails is enough. Where it passes, or no longer exists, all tests of the file run. So an old list costs time only.
"""

from __future__ import annotations

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

__all__ = ["TESTS", "Verdict", "main"]

ROOT = Path(__file__).parents[2]
COPIED = ["src", "tests", "conftest.py", "pyproject.toml"]
LIMIT = 120.0
"""Seconds after which the tests of a mutant are ended; that counts as a failure."""

INTERRUPTED_END = "test_an_interrupt_at_every_bytecode_of_the_end_of_a_failed_forward"
COMPILED = "test_compiled_groups_are_recomputed_as_they_were_compiled[cpu-whole-compiled-True]"
CAPTURED = "test_copies_of_a_captured_forward_have_ended_with_it"
STREAMS = ["tests/engine/edges", "tests/engine/test_adversary.py"]
REPLAY = [
    f"tests/replay/test_{name}.py"
    for name in ("programs", "kept", "edits", "functions", "replay_lifetime", "values", "state", "keys")
]

TESTS: dict[str, list[str]] = {
    "context/": STREAMS,
    "context/context.py": ["tests/context/test_context_report.py", *STREAMS],
    "device/": ["tests/device"],
    "engine/": [*STREAMS, "tests/engine/test_limits.py"],
    "engine/host_pool.py": ["tests/engine/test_host_pool.py", *STREAMS],
    "engine/layout.py": ["tests/engine/test_storages.py", *STREAMS],
    "engine/passes.py": [
        "tests/engine/test_backwards.py",
        "tests/report/test_several_passes.py",
        *STREAMS,
        "tests/integration/test_compose_checkpoint.py",
        "tests/model/test_offload_order.py::" + CAPTURED,
    ],
    "engine/statistics.py": ["tests/report/test_several_passes.py", *STREAMS, "tests/engine/test_limits.py"],
    "engine/storage.py": [
        "tests/engine/test_weights_stay.py",
        "tests/engine/test_saved_again.py",
        *STREAMS,
        "tests/engine/test_limits.py",
    ],
    "engine/hooks.py": ["tests/engine/test_saved_again.py", "tests/engine/test_written_after_saving.py", *STREAMS],
    "engine/eligibility.py": [
        "tests/engine/test_tables_of_models.py",
        "tests/engine/test_limits.py",
        "tests/engine/test_weights_stay.py",
        *STREAMS,
    ],
    "measure.py": ["tests/test_measure.py"],
    "_torch/": ["tests/engine/test_compound_kept.py", "tests/test_torch_names.py"],
    "model/": ["tests/model/test_follow.py", "tests/model/test_tuning_lifetime.py"],
    "model/follow.py": [
        "tests/model/test_follow.py",
        "tests/model/test_following.py",
        "tests/model/test_offload_copies.py::test_replicas_in_threads_as_data_parallel_makes_them",
        "tests/model/test_offload_interrupts.py::" + INTERRUPTED_END,
        "tests/model/test_offload_exceptions.py::test_an_exception_in_forward",
        "tests/integration/test_compose_compile.py::" + COMPILED,
    ],
    "model/discovery.py": ["tests/model/test_discovery.py"],
    "model/tuning/steering.py": [
        "tests/model/test_offload_handle_lost.py",
        "tests/model/test_follow.py",
        "tests/model/test_tuning_lifetime.py",
    ],
    "model/tracker.py": [
        "tests/model/test_offload_handle_lost.py::test_a_part_of_a_model_that_nothing_refers_to",
        "tests/model/test_follow.py",
        "tests/model/test_offload_interrupts.py::" + INTERRUPTED_END,
        "tests/model/test_offload_loops.py::test_a_loop_in_another_order_than_registered",
        "tests/model/test_offload_nesting.py::test_parts_of_a_group_have_names_and_kinds_of_their_own",
        "tests/model/test_offload_exceptions.py::test_an_exception_in_forward",
        "tests/model/test_tuning_lifetime.py",
        "tests/replay/test_replay_lifetime.py",
        "tests/integration/test_compose_tracing.py",
    ],
    "model/tuning/script.py": [
        "tests/model/test_short_host_memory.py",
        "tests/model/test_tuning.py",
        "tests/model/test_tuning_memory.py",
        "tests/model/test_tuning_changes.py",
        "tests/model/test_memory_budget.py",
        "tests/model/test_budget_changes.py",
    ],
    "model/tuning/findings.py": [
        "tests/model/test_budget_changes.py",
        "tests/model/test_lockstep.py",
        "tests/model/test_fits.py",
    ],
    "model/tuning/metering.py": [
        "tests/model/test_budget_changes.py",
        "tests/model/test_tuning_values.py::test_values_in_each_stage",
    ],
    "model/tuning/group_costs.py": ["tests/model/test_budget_changes.py"],
    "model/tuning/tuner.py": [
        "tests/model/test_tuning_lifetime.py",
        "tests/model/test_tuning_programs.py",
        "tests/model/test_tuning_changes.py",
        "tests/model/test_budget_changes.py",
    ],
    "model/replays.py": [
        *(f"tests/replay/test_{name}.py" for name in ("keys", "state", "kept", "programs", "replay_lifetime")),
        "tests/model/test_offload_nesting.py",
        "tests/integration/test_compose_checkpoint.py",
    ],
    "model/module_tree.py": ["tests/model/test_stacks.py", "tests/model/test_select.py"],
    "model/select.py": ["tests/model/test_select.py", "tests/model/test_select_wrappers.py"],
    "replay/": REPLAY,
    "replay/policy.py": [f"tests/replay/test_{name}.py" for name in ("kept", "state", "functions", "programs")],
    "replay/proof.py": [f"tests/replay/test_{name}.py" for name in ("edits", "functions", "kept", "replay_lifetime")],
    "replay/tracer.py": [
        f"tests/replay/test_{name}.py" for name in ("kept", "functions", "replay_lifetime", "state", "keys")
    ],
    "report/": ["tests/model/test_offload_memory.py", "tests/model/test_offload_report.py"],
    "planner/": ["tests/planner"],
    "schedule/": ["tests/schedule"],
}
"""The tests that have to fail, by the longest matching beginning of the path in the package; likely ones first."""

KILLERS = Path(__file__).with_name("killers.json")
"""For each mutant, the test that failed when it was recorded."""

_processes = multiprocessing.get_context("forkserver")


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


def tests_of(path: str) -> list[str]:
    """Return the tests for a file, given relative to `src`."""
    inside = path.removeprefix("actoffload/")
    return TESTS[max((start for start in TESTS if inside.startswith(start)), key=len)]


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


def judge_mutant(mutant: Mutant, original: Path, killer: str = "") -> Verdict:
    """Run the killer, then the tests of one file, after changing it in a copy that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutant") as directory:
        copy = shutil.copytree(original, Path(directory) / "project", copy_function=os.link)
        changed = copy / "src" / mutant.path
        changed.unlink()  # the name in the copy only: the file is also the original's
        changed.write_text(mutant.text, encoding="utf-8")
        if killer:
            verdict = judge(copy, [f"tests/{killer}"], share=1)
            if verdict.red and verdict.test == killer:
                return verdict
        return judge(copy, tests_of(mutant.path))


def _row(name: str, place: str, verdict: str, test: str, seconds: str) -> str:
    return f"| {name:<62} | {place:<32} | {verdict:<8} | {seconds:>7} | {test} |"


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the table; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="judge only mutants whose name or path contains this text")
    parser.add_argument("--tested", action="store_true", help="all tests have just passed: do not run them first")
    parser.add_argument("--record", action="store_true", help="write the tests that failed to killers.json")
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
        return judge_all(mutants, original, options.jobs, tested=options.tested, record=options.record)


def judge_all(mutants: list[Mutant], original: Path, jobs: int, *, tested: bool, record: bool) -> int:
    """Print the table of these mutants; return 1 if one survived or the tests cannot be trusted.

    Tests that all have just been `tested` are only collected on the unchanged source. To `record` is to run all tests
    of each file, and to write the first that failed.
    """
    killers: dict[str, str] = json.loads(KILLERS.read_text(encoding="utf-8"))
    # The unchanged source must pass, and one that cannot be imported must not: else the tests see other files.
    # The first runs are in the original, so that all copies have its compiled files.
    tests = list(dict.fromkeys(test for mutant in mutants for test in tests_of(mutant.path)))
    shares = [tests[k::jobs] for k in range(min(jobs, len(tests)))]
    with ThreadPoolExecutor(jobs) as pool:
        more = ["--collect-only"] if tested else []
        verdicts = list(pool.map(lambda k: judge(original, [*more, *shares[k]], 5 * LIMIT, k), range(len(shares))))
    sound = max(verdicts, key=lambda verdict: (verdict.red, verdict.seconds))
    if sound.red:
        print(f"The tests fail on the unchanged source ({sound.test}); repair that first.")
        return 1
    nonsense = Mutant("nonsense", "actoffload/device/__init__.py", 1, "raise ImportError('not this copy')\n")
    if not judge_mutant(nonsense, original).red:
        print("The tests pass on a source that cannot be imported: they do not run on the copy.")
        return 1

    print(f"{len(mutants)} mutants; the unchanged source passes in {sound.seconds:.0f} s.\n")
    print(_row("what is broken", "where", "tests", "first test that failed", "seconds"))
    print(_row("---", "---", "---", "---", "---"))
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        known = {} if record else killers
        verdicts = pool.map(lambda mutant: judge_mutant(mutant, original, known.get(mutant.name, "")), mutants)
        for mutant, verdict in zip(mutants, verdicts, strict=True):
            survivors += not verdict.red
            if "::" in verdict.test:
                killers[mutant.name] = verdict.test
            place = f"{mutant.path.removeprefix('actoffload/')}:{mutant.line}"
            said = "red" if verdict.red else "SURVIVED"
            print(_row(mutant.name, place, said, verdict.test, f"{verdict.seconds:.1f}"), flush=True)
    if record:
        KILLERS.write_text(json.dumps(killers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"\n{len(mutants) - survivors} of {len(mutants)} mutants made a test fail.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
