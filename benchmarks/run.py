"""Run jobs, each in a process of its own with a time limit, and write their samples and rows.

    PYTHONPATH=src python benchmarks/run.py T1 L4 --out build/bench --commit $(git rev-parse HEAD)

``samples.jsonl`` gets a line for each arm of each round as soon as it is measured, ``results.csv`` a row for each arm
after each job, and ``run.log`` what the processes print. A job that fails, runs out of memory or is stopped has rows
that say so. ``machine``, ``overlap`` and ``links`` write ``machine.txt``, ``overlap.json`` and ``links.json``.
``--list`` prints the jobs;
``--rehearse`` takes tiny sizes, for machines without accelerator.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

import rows  # noqa: E402
from jobs import JOBS, Job  # noqa: E402

OTHERS = {"machine": 60.0, "overlap": 180.0, "links": 60.0}
"""What is recorded besides the jobs, and seconds after which it is stopped."""
WAITING = 90.0
"""Seconds for which a rank waits for the others, then its process ends."""
LEAST = 30.0
"""Seconds that have to be left for further arms of ranks, one of which failed."""
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Settings of the allocator of PyTorch: several threads pin host memory, as on the page about hardware."""


def origin(commit: str, command: str) -> dict[str, Any]:
    """Return where, when and of which commit a job is measured."""
    from actoffload.measure import describe_device

    device = asdict(describe_device())
    versions = {name: device[name] for name in ("driver", "torch", "python")}
    try:
        versions["transformers"] = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        versions["transformers"] = ""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"device": device["name"], **versions, "commit": commit, "date": date, "command": command}


def present_commit() -> str:
    """Return the commit of the working tree, with a plus if files differ; empty outside of a repository."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    found = git(["git", "rev-parse", "HEAD"])
    if found.returncode:
        return ""
    changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return found.stdout.strip() + "+" * bool(changed)


def run_here(name: str, options: argparse.Namespace) -> None:
    """Run one job in this process, which is one of several ranks if torchrun started it."""
    import torch

    job, rank, ranks = JOBS.get(name), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    command = f"python benchmarks/run.py {name}"
    about = origin(options.commit, command)
    if ranks > 1:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(timeout=timedelta(seconds=WAITING))
    if name == "machine":
        from actoffload.machine import measure_machine

        when = f"{about['device']}, torch {about['torch']}, {about['date'][:10]}, commit {options.commit[:12]}"
        (options.out / "machine.txt").write_text(f"{when}\n\n{measure_machine()}\n", encoding="utf-8")
        return
    if job is None:
        importlib.import_module("link_rates" if name == "links" else name).record(
            options.out, about, rehearse=options.rehearse
        )
        if ranks > 1:
            torch.distributed.destroy_process_group()
        return
    job = replace(job, rounds=options.rounds or job.rounds)
    if options.rehearse:
        job = replace(job, rounds=options.rounds or 1, warm_up=1, steps=2 if job.gpus == 1 else 1)

    samples = options.out / "samples.jsonl"

    def write(sample: dict[str, Any]) -> None:
        failed = ranks > 1 and sample["status"] in ("failed", "out of memory")
        if rank == 0 or failed:
            rows.append(samples, {"job": name, "series": options.series, **sample, **about})
            if sample["status"] != "begun":
                print(describe(name, sample), flush=True)
        if failed:  # the other ranks may wait for this one; its exit stops them
            os._exit(1)

    module = importlib.import_module(job.module)
    if job.module == "context":
        module.search(name, write, rehearse=options.rehearse, arms=options.arms, memory=options.memory)
    else:
        from harness import run_arms

        earlier = [sample for sample in of_series(name, options) if sample["status"] != "begun"]
        run_arms(job, module.trainer(name, rehearse=options.rehearse), write, options.arms, earlier)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def describe(name: str, sample: dict[str, Any]) -> str:
    """Return a line about a sample."""
    steps = ", ".join(f"{seconds * 1e3:.1f}" for seconds in sample.get("seconds", ()))
    keys = "tokens", "status", "peak_bytes", "passes", "startup_seconds", "kernel_seconds", "note"
    more = ", ".join(f"{key} {sample[key]}" for key in keys if sample.get(key))
    return f"{name} {sample['arm']}, round {sample['round'] + 1}: {steps} ms, {more}"


def commands(name: str, options: argparse.Namespace) -> list[tuple[tuple[str, ...], list[str]]]:
    """Return the arms and the command of each process that a job needs."""
    job = JOBS.get(name)
    python = [sys.executable]
    gpus = job.gpus if job is not None else 1 if name != "links" else 4 if options.rehearse else "gpu"
    if gpus != 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    base = [*python, str(Path(__file__)), name, "--here", "--out", str(options.out), "--commit", options.commit]
    base += ["--series", options.series, *(["--rehearse"] if options.rehearse else [])]
    base += ["--rounds", str(options.rounds)] if options.rounds else []
    arms = options.arms or (job.arms if job is not None else ())
    if job is None or not job.apart:
        return [(arms, [*base, *(["--arms", ",".join(arms)] if arms else [])])]
    memories = [["--memory", memory] for memory in options.memory.split(",")] if options.memory else [[]]
    return [((arm,), [*base, *memory, "--arms", arm]) for memory in memories for arm in arms]


def run_job(name: str, options: argparse.Namespace, end: float) -> str:
    """Run the processes of a job until a time of the monotonic clock; return how it ended.

    If one of several ranks fails, new processes run the arms that were not begun.
    """
    job: Job | None = JOBS.get(name)
    limit = job.limit if job is not None else OTHERS[name]
    end, status = min(end, time.monotonic() + limit), "ok"
    waiting = commands(name, options)
    while waiting:
        left = max(0.0, end - time.monotonic()) / len(waiting)  # what one does not need, the others have
        arms, command = waiting.pop(0)
        ended = run_process(command, options.out / "run.log", left)
        if ended != "ok":
            status = ended
            goes_on = job is not None and job.gpus > 1 and end - time.monotonic() > LEAST
            if rest := note_stopped(name, arms, ended, options, goes_on=goes_on):
                waiting += commands(name, argparse.Namespace(**{**vars(options), "arms": rest}))
    rows.write(options.out / "results.csv", rows.summarize(rows.samples_of(options.out / "samples.jsonl")))
    return status


def of_series(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the samples that this run has of a job."""
    found = rows.samples_of(options.out / "samples.jsonl")
    return [sample for sample in found if sample["job"] == name and sample["series"] == options.series]


def note_stopped(
    name: str, arms: Sequence[str], ended: str, options: argparse.Namespace, *, goes_on: bool
) -> tuple[str, ...]:
    """Write a sample for the arm in which a process ended, and unless others go on, for each that was not begun.

    Returns those that were not begun.
    """
    path, found = options.out / "samples.jsonl", of_series(name, options)
    about = {key: found[-1].get(key) for key in rows.ORIGIN} if found else {"commit": options.commit}
    base = {"job": name, "series": options.series, **about}
    last = found[-1] if found else None
    if last is not None and last["status"] == "begun":
        rows.append(path, {**last, "status": "stopped", "note": ended})
    rest = tuple(arm for arm in arms if arm not in {sample["arm"] for sample in found})
    goes_on = goes_on and 0 < len(rest) < len(arms)
    for arm in () if goes_on else rest:
        rows.append(path, {**base, "arm": arm, "round": 0, "status": "not run", "note": ended})
    return rest if goes_on else ()


def run_process(command: Sequence[str], log: Path, limit: float) -> str:
    """Run a process with its output in the log; return how it ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    environment = {"PYTORCH_ALLOC_CONF": PINNING, **os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    environment |= {"TEARDOWN_CUPTI": "1"}  # a profiled step must not slow those after it
    environment |= {"OMP_NUM_THREADS": "1"} if "--rehearse" in command else {}
    if limit < 1:
        return "no time left"
    with log.open("a", encoding="utf-8") as file:
        file.write(f"=== {' '.join(command[1:])}\n")
        file.flush()
        # In a session of its own, because stopping it must stop the processes that it started.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {limit:.0f} s"
    if code < 0:
        return f"ended by signal {-code}" + ", as when host memory runs out" * (code == -signal.SIGKILL)
    return "ok" if code == 0 else f"exit status {code}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; return 1 if a process did not end well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join([*JOBS, *OTHERS])}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of samples, rows and log")
    parser.add_argument("--commit", default="", help="commit that is measured, where the copy has no repository")
    parser.add_argument("--arms", default="", help="only these arms, with commas between them")
    parser.add_argument("--memory", default="", help="context: GB of device memory that may be used, such as 24,48")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="for all jobs together")
    parser.add_argument("--rounds", type=int, help="instead of the job's")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    parser.add_argument("--list", action="store_true", help="print the jobs and their minutes on an H100")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--series", default=datetime.now(UTC).strftime("%Y%m%dT%H%M%S"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.arms = tuple(filter(None, options.arms.split(",")))
    if options.list:
        print("\n".join(f"{name:<14} {job.minutes:>4} min, {job.gpus} GPU  {job.title}" for name, job in JOBS.items()))
        return 0
    if unknown := sorted(set(options.jobs) - {*JOBS, *OTHERS}):
        parser.error(f"no job {', '.join(unknown)}; expected {', '.join([*JOBS, *OTHERS])}.")
    if options.here:
        options.memory = float(options.memory) if options.memory else None
        run_here(options.jobs[0], options)
        return 0
    options.commit = options.commit or present_commit()
    end, outcomes = time.monotonic() + options.budget, {}
    for name in options.jobs:
        begun = time.monotonic()
        outcomes[name] = run_job(name, options, end) if end - begun > 5 else "no time left"
        print(f"{name}: {outcomes[name]}, {time.monotonic() - begun:.0f} s", flush=True)
    print(json.dumps(outcomes))
    return 0 if set(outcomes.values()) <= {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
