"""Run everything that needs a GPU: tests, recorded gallery, benchmarks.

    python tools/gpu_run.py --out build/gpu

Needs Python 3.12, torch, pytest, pytest-timeout and matplotlib, transformers for the Llama layers, accelerate for
``trainer``, and for the gallery the packages of the `docs` extra; no network, no nox and no installation of the
library.  Each step is a process with its own time limit, and one that fails does not stop the others.  The output
folder holds at most ten files:

run.log                      all output of all steps, and beside.log that of those beside them
tests.xml                    the results of the tests, as JUnit XML
gallery-recording.tar.gz     for ``python tools/record_gallery.py unpack``
gpu-tests.json and a file for each benchmark, such as trainer.json      for benchmarks/results

``--only tests,gallery,benchmarks`` chooses steps, which run in that order; ``benchmarks`` stands for overhead, linear
and gpt. Run only when they are named: ``trainer``, ``llama``, ``peers`` and the ``frontier-...`` steps (some minutes
each), ``overlap`` (under two minutes), ``memory`` (device memory over a step, for the picture of the landing page; a
minute), ``machine`` (seconds), ``parallelism`` and ``pipelines``, which need two GPUs, and ``host`` (the host time of
Llama layers alone, under a minute), whose file takes the place of that of ``llama``. Parts of ``frontier.json`` from
other runs of the same sources stay, if the file lies in the folder of ``--out``. With four GPUs ``pipelines`` also
measures four ranks; each pipeline takes at most five minutes, so give ``--budget 2100``. ``--rehearse`` takes small
sizes, for a machine without a GPU.

``--beside`` names steps that run on a second GPU of the host at the same time, and each result then says which ran on
the other GPU.  It is for steps whose times are not shown, such as ``tests``: two GPUs of one host share its memory, and
copies of both at once are slower.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "src")]

from results_file import BESIDE, write  # noqa: E402 - lies in benchmarks

LOGS = "run.log", "beside.log"
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Settings of the allocator of PyTorch: several threads pin host memory, as on the page about hardware."""
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
    pins : bool
        Whether it pins much memory, so that several threads do it: each arm with a budget pins all that is saved.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    pins: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    step: Step
    status: str
    seconds: float
    last_lines: tuple[str, ...]


def steps(out: Path, *, rehearse: bool, select: str) -> dict[str, Step]:
    """Return all steps by name."""
    pytest = [
        "-m",
        "pytest",
        "-m",
        "gpu or multi_gpu",
        "tests/gpu",
        "tests/integration",
        "-q",
        "-ra",
        "--durations=10",
        "-p",
        "no:cacheprovider",
    ]
    pytest += [f"--junitxml={out / 'tests.xml'}", *(["-k", select] if select else [])]
    small = ("--rehearse",) if rehearse else ()
    benchmark, target = "benchmarks/run.py", ("--out", str(out))
    every = [
        Step("tests", tuple(pytest), 420),
        Step("gallery", ("tools/record_gallery.py", "record", *target), 480),
        Step("overhead", (benchmark, "overhead", *target, *small), 60),
        Step("linear", (benchmark, "linear", *target, *small), 70),
        Step("gpt", (benchmark, "gpt", *target, *small), 300),
        Step("trainer", (benchmark, "trainer", *target, *small), 240),
        Step("peers", (benchmark, "peers", *target, *small), 300, pins=True),
        Step("overlap", (benchmark, "overlap", *target, *small), 180),
        Step("frontier-8k", (benchmark, "frontier", "--only", "8k", *target, *small), 540, pins=True),
        Step("frontier-32k", (benchmark, "frontier", "--only", "32k", *target, *small), 540, pins=True),
        Step("frontier-8k-compiled", (benchmark, "frontier", "--only", "8k-compiled", *target, *small), 400, pins=True),
        Step(
            "frontier-32k-compiled", (benchmark, "frontier", "--only", "32k-compiled", *target, *small), 400, pins=True
        ),
        Step("parallelism", (benchmark, "parallelism", *target, *small), 480),
        Step("machine", (benchmark, "machine", *target, *small), 60),
        Step("memory", (benchmark, "memory", *target, *small), 120),
        Step("host", (benchmark, "llama", "--only", "host", *target, *small), 60),
        Step("llama", (benchmark, "llama", *target, *small), 330),
        Step("pipelines", (benchmark, "pipelines", *target, *small), 2100),
    ]
    # The machine of a rehearsal has slow cores, which others may use too.
    return {step.name: replace(step, limit=step.limit * (3 if rehearse else 1)) for step in every}


def chosen(names: str, known: dict[str, Step]) -> list[Step]:
    """Return the named steps in that order; raise `SystemExit` with the names that are unknown."""
    wanted: list[str] = []
    for name in filter(None, names.split(",")):
        wanted += ["overhead", "linear", "gpt"] if name == "benchmarks" else [name]
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise SystemExit(f"--only: no step {', '.join(unknown)}; expected {', '.join(known)} or benchmarks.")
    return [known[name] for name in dict.fromkeys(wanted)]


@dataclass(frozen=True)
class Lane:
    """Steps that run one after the other on one GPU, and the names of those on another one at the same time."""

    steps: tuple[Step, ...]
    log: Path
    gpu: int | None = None  # None for all
    beside: str = ""


def lanes(chosen: list[Step], beside: list[Step], out: Path) -> list[Lane]:
    """Return what runs at the same time; raise `SystemExit` if a step is named twice."""
    twice = [step.name for step in beside if step in chosen]
    if twice:
        raise SystemExit(f"--beside: {', '.join(twice)} of --only cannot run beside itself; name it once.")
    if not beside:
        return [Lane(tuple(chosen), out / LOGS[0])]
    names = [", ".join(step.name for step in some) for some in (chosen, beside)]
    return [
        Lane(tuple(some), out / log, gpu, other)
        for gpu, (some, log, other) in enumerate(zip((chosen, beside), LOGS, reversed(names), strict=True))
    ]


def environment(step: Step, lane: Lane | None = None) -> dict[str, str]:
    """Return the environment of a step: the library from src, unbuffered output, no display."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "agg",
        **({"PYTORCH_ALLOC_CONF": PINNING} if step.pins else {}),
        **({} if lane is None or lane.gpu is None else {"CUDA_VISIBLE_DEVICES": str(lane.gpu), BESIDE: lane.beside}),
    }


def run(step: Step, log: Path, limit: float, lane: Lane | None = None) -> Outcome:
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
            env=environment(step, lane),
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


def run_lane(lane: Lane, end: float) -> list[Outcome]:
    """Run the steps of a lane, until a time of the monotonic clock."""
    lane.log.unlink(missing_ok=True)
    outcomes = []
    for step in lane.steps:
        left = end - time.monotonic()
        if left < 5:
            outcomes.append(Outcome(step, "not run: no time left", 0.0, ()))
            continue
        outcomes.append(run(step, lane.log, min(step.limit, left), lane))
    return outcomes


def run_lanes(lanes: list[Lane], budget: float) -> list[Outcome]:
    """Run lanes at the same time, for so many seconds at most."""
    with ThreadPoolExecutor(len(lanes)) as threads:
        found = threads.map(partial(run_lane, end=time.monotonic() + budget), lanes)
        return [outcome for outcomes in found for outcome in outcomes]


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
    """Write the tests' outcomes as a result file like those of the benchmarks."""
    command = "python tools/gpu_run.py --only tests" + (f" --select {shlex.quote(select)}" if select else "")
    write(out, "gpu-tests", test_outcomes(out / "tests.xml"), command)


def benchmark_lines(out: Path) -> list[str]:
    """Return the page of the benchmarks: targets with what was measured, and all tables."""
    import report

    return report.report(report.load(out)).splitlines()


def summary(outcomes: list[Outcome], out: Path) -> None:
    """Print failures, the tables of the benchmarks, and how each step ended."""
    for outcome in outcomes:
        if outcome.step.name in ("tests", "gallery") or outcome.status != "ok":
            print(f"\n--- {outcome.step.name}")
            print("\n".join(line[:200] for line in outcome.last_lines))
    if any(outcome.step.name == "tests" for outcome in outcomes):
        print("\n".join(["", "--- failed tests", *failures(out / "tests.xml")]))
    if any(outcome.step.name not in ("tests", "gallery") for outcome in outcomes):
        print("\n".join(["", "--- benchmarks", *benchmark_lines(out)]))
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
    parser.add_argument("--only", default="tests,gallery,benchmarks", help="steps, with commas between them")
    parser.add_argument("--beside", default="", metavar="STEPS", help="steps on a second GPU at the same time")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="pytest -k for the tests")
    parser.add_argument("--rehearse", action="store_true", help="small sizes")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="for all steps together")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = steps(out, rehearse=options.rehearse, select=options.select)
    side_by_side = lanes(chosen(options.only, known), chosen(options.beside, known), out)
    outcomes = run_lanes(side_by_side, options.budget)
    if (out / "tests.xml").is_file() and any(outcome.step.name == "tests" for outcome in outcomes):
        write_test_outcomes(out, options.select)
    summary(outcomes, out)
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
