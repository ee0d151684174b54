"""Run the GPU tests and record the gallery; the jobs of the benchmarks are run by ``benchmarks/run.py``.

    python tools/gpu_run.py --out build/gpu

Needs Python 3.12, torch, pytest, pytest-timeout and matplotlib, and for the gallery the packages of the `docs` extra;
no network, no nox and no installation of the library.  Each step is a process with its own time limit, and one that
fails does not stop the others.  ``--only tests,gallery`` chooses steps. The output folder holds:

run.log                      all output of all steps
tests.xml, gpu-tests.json    the results of the tests; the latter for benchmarks/results
gallery-recording.tar.gz     for ``python tools/record_gallery.py unpack``
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LOG = "run.log"
MESSAGE = 400  # characters of a failure in the summary


@dataclass(frozen=True)
class Step:
    """One process.

    Parameters
    ----------
    name : str
        For ``--only`` and the summary.
    command : tuple of str
        Arguments of the Python interpreter, from the project's root.
    limit : float
        Seconds after which it is stopped.
    """

    name: str
    command: tuple[str, ...]
    limit: float


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    step: Step
    status: str
    seconds: float
    last_lines: tuple[str, ...]


def steps(out: Path, *, select: str) -> dict[str, Step]:
    """Return all steps by name."""
    pytest = [
        "-m",
        "pytest",
        "-m",
        "gpu or multi_gpu",
        "tests/gpu",
        "tests/integration",
        "tests/moe/test_multihot.py",
        "tests/engine",
        "tests/replay",
        "tests/model/test_offload_exceptions.py",
        "-q",
        "-ra",
        "--durations=10",
        "-p",
        "no:cacheprovider",
    ]
    pytest += [f"--junitxml={out / 'tests.xml'}", *(["-k", select] if select else [])]
    record = "tools/record_gallery.py", "record", "--out", str(out)
    return {step.name: step for step in (Step("tests", tuple(pytest), 420), Step("gallery", record, 480))}


def chosen(names: str, known: dict[str, Step]) -> list[Step]:
    """Return the named steps in that order; raise `SystemExit` with the names that are unknown."""
    wanted = list(dict.fromkeys(filter(None, names.split(","))))
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise SystemExit(f"--only: no step {', '.join(unknown)}; expected {', '.join(known)}.")
    return [known[name] for name in wanted]


def environment() -> dict[str, str]:
    """Return the environment of a step: the library from src, unbuffered output, no display."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "agg",
    }


def run(step: Step, log: Path, limit: float) -> Outcome:
    """Run one step, with its output in the log, and on the screen how it ended."""
    print(f"=== {step.name}: at most {limit:.0f} s", flush=True)
    begun = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        file.write(f"=== {step.name}: {' '.join(step.command)}\n")
        file.flush()
        start = file.tell()
        # In a session of its own, because stopping it must stop the processes that it started.
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
            status = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"stopped after {limit:.0f} s"
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    seconds = time.monotonic() - begun
    print(f"    {step.name}: {status}, {seconds:.0f} s", flush=True)
    return Outcome(step, status, seconds, tuple(lines[-12:]))


def run_steps(chosen: list[Step], log: Path, budget: float) -> list[Outcome]:
    """Run steps one after the other, for so many seconds at most."""
    log.unlink(missing_ok=True)
    end, outcomes = time.monotonic() + budget, []
    for step in chosen:
        left = end - time.monotonic()
        if left < 5:
            outcomes.append(Outcome(step, "not run: no time left", 0.0, ()))
            continue
        outcomes.append(run(step, log, min(step.limit, left)))
    return outcomes


def failures(path: Path) -> list[str]:
    """Return a line for each failed test, with the head of its message."""
    if not path.is_file():
        return []
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            message = " ".join((problem.get("message") or problem.text or "").split())
            found.append(f"{case.get('name')} ({float(case.get('time') or 0):.1f} s): {message[:MESSAGE]}")
    return found


def test_outcomes(path: Path) -> dict[str, object]:
    """Return the number of each outcome, seconds, and the outcome of each test by name."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    outcomes = {}
    for case in suite.iter("testcase"):
        kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        name = f"{(case.get('classname') or '').rsplit('.', 1)[-1]}::{case.get('name')}"
        outcomes[name] = kinds[0] if kinds else "passed"
    counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failure", "error", "skipped")}
    return {"counts": counts, "seconds": float(suite.get("time") or 0), "tests": outcomes}


def write_test_outcomes(out: Path, select: str) -> None:
    """Write the tests' outcomes, and where and when they ran."""
    sys.path.insert(0, str(ROOT / "src"))
    from actoffload.measure import describe_device

    command = "python tools/gpu_run.py --only tests" + (f" --select {shlex.quote(select)}" if select else "")
    origin = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(describe_device()),
    }
    text = json.dumps({**origin, **test_outcomes(out / "tests.xml")}, indent=1)
    (out / "gpu-tests.json").write_text(f"{text}\n", encoding="utf-8")


def summary(outcomes: list[Outcome], out: Path) -> None:
    """Print the last lines of each step, failures, and how each step ended."""
    for outcome in outcomes:
        print(f"\n--- {outcome.step.name}")
        print("\n".join(line[:200] for line in outcome.last_lines))
    if any(outcome.step.name == "tests" for outcome in outcomes):
        print("\n".join(["", "--- failed tests", *failures(out / "tests.xml")]))
    print("\n=== summary")
    for outcome in outcomes:
        print(f"{outcome.step.name:<10}{outcome.seconds:6.0f} s  {outcome.status}")
    files = sorted(path for path in out.iterdir() if path.is_file())
    print(", ".join(f"{path.name} {path.stat().st_size / 1024:.0f} KiB" for path in files))


def main() -> int:
    """Run the chosen steps; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    default = os.environ.get("OUT") or str(ROOT / "build" / "gpu")
    parser.add_argument("--out", type=Path, default=Path(default), help="folder for logs and results")
    parser.add_argument("--only", default="tests,gallery", help="steps, with commas between them")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="pytest -k for the tests")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="for all steps together")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    outcomes = run_steps(chosen(options.only, steps(out, select=options.select)), out / LOG, options.budget)
    if (out / "tests.xml").is_file() and any(outcome.step.name == "tests" for outcome in outcomes):
        write_test_outcomes(out, options.select)
    summary(outcomes, out)
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
