"""Run jobs, each in a process of its own with a time limit, and write their samples and rows.

    PYTHONPATH=src python benchmarks/run.py T1 L4 --out build/bench --commit $(git rev-parse HEAD)

``samples.jsonl`` gets a line for each arm of each round as soon as it is measured, ``results.csv`` a row for each arm
after each job, and ``run.log`` what the processes print. A job that fails, runs out of memory or is stopped has rows
that say so. ``--list`` prints the jobs; ``--rehearse`` takes tiny sizes, for machines without accelerator.
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
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

import rows  # noqa: E402
from jobs import JOBS  # noqa: E402

MACHINE = {"machine": 60.0, "overlap": 180.0, "links": 60.0}
"""What `tools/record_machine.py` records of the machine, and seconds after which it is stopped."""
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Settings of PyTorch's allocator, so that the arms beside ours pin host memory with several threads, too."""


def origin(commit: str, command: str) -> dict[str, Any]:
    """Return where, when and of which commit a job is measured."""
    from actoffload.measure import describe_device

    device = asdict(describe_device())
    versions = {name: device[name] for name in ("driver", "torch", "python")}
    versions["transformers"] = next((found.version for found in metadata.distributions(name="transformers")), "")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"device": device["name"], **versions, "commit": commit, "date": date, "command": command}


def run_here(name: str, options: argparse.Namespace) -> None:
    """Run one job in this process, which is one of several ranks if torchrun started it."""
    import torch

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    about = origin(options.commit, f"python benchmarks/run.py {name}")
    if ranks > 1:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(timeout=timedelta(seconds=90))  # then a rank that waits ends

    def write(sample: dict[str, Any]) -> None:
        failed = ranks > 1 and sample["status"] in ("failed", "out of memory")
        if rank == 0 or failed:
            rows.append(options.out / "samples.jsonl", {"job": name, "series": options.series, **sample, **about})
            print(
                name, sample["arm"], sample.get("tokens", ""), f"round {sample['round']}", sample["status"], flush=True
            )
        if failed:  # the other ranks may wait for this one; its exit stops them
            os._exit(1)

    module = importlib.import_module(JOBS[name].module)
    if JOBS[name].searches:
        module.search(name, write, options.arms, options.memory, rehearse=options.rehearse)
    else:
        from harness import run_arms

        job = replace(JOBS[name], rounds=options.rounds or (1 if options.rehearse else JOBS[name].rounds))
        if options.rehearse:
            job = replace(job, warm_up=1, steps=2 if job.gpus == 1 else 1)
        run_arms(job, module.trainer(name, rehearse=options.rehearse), write, options.arms)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def commands(name: str, options: argparse.Namespace) -> list[list[str]]:
    """Return the command of each process that a job needs."""
    job = JOBS.get(name)
    gpus = job.gpus if job is not None else 1 if name != "links" else 4 if options.rehearse else "gpu"
    ranks = [] if gpus == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    more = ["--out", str(options.out), "--commit", options.commit, *(["--rehearse"] if options.rehearse else [])]
    if job is None:
        return [[sys.executable, *ranks, str(ROOT / "tools" / "record_machine.py"), name, *more]]
    more += ["--series", options.series, *(["--rounds", str(options.rounds)] if options.rounds else [])]
    base = [sys.executable, *ranks, str(Path(__file__)), name, "--here", *more]
    arms = options.arms or job.arms
    if not job.searches:
        return [[*base, "--arms", ",".join(arms)]]
    memories = [["--memory", memory] for memory in options.memory.split(",")] if options.memory else [[]]
    return [[*base, *memory, "--arms", arm] for memory in memories for arm in arms]


def run_job(name: str, options: argparse.Namespace, end: float) -> str:
    """Run the processes of a job until a time of the monotonic clock; return how it ended."""
    limit = JOBS[name].limit if name in JOBS else MACHINE[name]
    end, status, samples = min(end, time.monotonic() + limit), "ok", options.out / "samples.jsonl"
    waiting = commands(name, options)
    while waiting:
        left = max(0.0, end - time.monotonic()) / len(waiting)  # what one does not need, the others have
        ended = run_process(waiting.pop(0), options.out / "run.log", left)
        if ended != "ok":
            status = ended
            found = [s for s in rows.samples_of(samples) if (s["job"], s["series"]) == (name, options.series)]
            if found and found[-1]["status"] == "begun":
                rows.append(samples, {**found[-1], "status": "stopped", "note": ended})
    rows.write(options.out / "results.csv", rows.summarize(rows.samples_of(samples)))
    return status


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
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join([*JOBS, *MACHINE])}")
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
    if unknown := sorted(set(options.jobs) - {*JOBS, *MACHINE}):
        parser.error(f"no job {', '.join(unknown)}; expected {', '.join([*JOBS, *MACHINE])}.")
    if options.here:
        options.memory = float(options.memory) if options.memory else None
        run_here(options.jobs[0], options)
        return 0
    if not options.commit:  # that of the working tree, with a plus if files differ; empty outside of a repository
        git = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
        options.commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    end, outcomes = time.monotonic() + options.budget, {}
    for name in options.jobs:
        begun = time.monotonic()
        outcomes[name] = run_job(name, options, end) if end - begun > 5 else "no time left"
        print(f"{name}: {outcomes[name]}, {time.monotonic() - begun:.0f} s", flush=True)
    print(json.dumps(outcomes))
    return 0 if set(outcomes.values()) <= {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
