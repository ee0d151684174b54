"""Run the benchmarks, each into a result file of JSON.

    PYTHONPATH=src python benchmarks/run.py gpt --out benchmarks/results

`linear` and `gpt` compare offload with checkpointing and `save_on_cpu`; `llama` measures numbers of layers at 8k and
32k tokens, and host time; `overhead` measures the host time of one saved tensor; `trainer` trains a Llama with the
Trainer of Hugging Face; `memory` records device memory over a step; `machine` is what ``python -m actoffload`` prints;
`frontier` compares ways to save memory, time against peak, and what their plans predict; `peers` compares with other
tools; `overlap` records steps for figures; `parallelism` runs FSDP2, DDP, tensor and context parallel in a process for
each GPU; `pipelines` measures pipelines of two ranks, and with four GPUs also of four. ``--rehearse`` takes small
sizes, for machines without accelerator.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import frontier
import overlap
import parallelism
import peers
import pipelines
import step_memory
import torch
from harness import measure
from host_time import measure_layers, measure_tensors
from results_file import RESULTS, beside, digest, read, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import FULL, REHEARSAL

from actoffload.machine import measure_machine
from actoffload.measure import describe_device

PARTS = {
    "llama": ("host", "8k", "32k"),
    "frontier": tuple(frontier.PARTS),
    "parallelism": parallelism.PARTS,
    "pipelines": tuple(pipelines.PARTS),
}


def measure_one(name: str, part: str, device: torch.device, *, rehearse: bool) -> dict[str, Any]:
    """Measure one part of a benchmark."""
    if name == "frontier":
        of, budgets = (frontier.SMALL_PARTS, 2) if rehearse else (frontier.PARTS, frontier.BUDGETS)
        return frontier.measure_part(part, of[part], device, budgets)
    if name == "parallelism":
        return parallelism.measure_part(part, rehearse=rehearse)
    settings = (REHEARSAL if rehearse else FULL)[part]
    if part == "host":
        return measure_layers(settings, device, 3 if rehearse else 60)
    return measure(settings, device)


def kept_parts(folder: Path, name: str) -> dict[str, Any]:
    """Return the parts of an earlier result of the same sources, which a run of other parts keeps.

    Those that were measured on another device say so.
    """
    earlier = read(folder, name)
    if earlier is None or earlier["source_digest"] != digest():
        return {}
    device, parts = earlier["device"], earlier["parts"]
    if device == asdict(describe_device()):
        return dict(parts)
    return {part: {"device": device, "day": earlier["date"][:10], **found} for part, found in parts.items()}


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Run one benchmark and write its result; one with parts after every part."""
    name, pinning = options.benchmark, os.environ.get("PYTORCH_ALLOC_CONF")
    command = f"PYTHONPATH=src python benchmarks/run.py {name}"
    command = f"PYTORCH_ALLOC_CONF={pinning} {command}" if pinning else command
    if name == "overhead":
        data = measure_tensors(5 if options.rehearse else 100, device)
    elif name in PARTS:
        default = pipelines.available(torch.accelerator.device_count()) if name == "pipelines" else PARTS[name]
        parts = options.only.split(",") if options.only else default
        data = {"parts": kept_parts(options.out, name) if options.only else {}}
        known = [part for part in PARTS[name] if part in data["parts"] or part in parts]
        command += f" --only {','.join(known)}" if options.only else ""
        if name == "pipelines":
            run_pipelines(parts, device, data, options, command)
            return
        for part in parts:
            print(f"{part}:", flush=True)
            measured = measure_one(name, part, device, rehearse=options.rehearse) | beside()
            found = {**data["parts"], part: measured}
            # The page has the parts in this order, whichever of them was measured first.
            data["parts"] = {part: found[part] for part in PARTS[name] if part in found}
            write(options.out, name, data, command)
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()
    elif name == "overlap":
        settings = replace((REHEARSAL if options.rehearse else FULL)["gpt"], layers=overlap.LAYERS)
        if not options.rehearse:
            settings = replace(settings, shape=(1, overlap.TOKENS, settings.shape[2]))
        data = overlap.measure_overlap(settings, device, 1 if options.rehearse else overlap.RECORDINGS)
    elif name == "peers":
        parts = peers.SMALL_PARTS if options.rehearse else peers.PARTS
        data = peers.measure_peers(parts, device, 1 if options.rehearse else peers.REPEATS)
    elif name == "trainer":
        import trainer

        settings = trainer.REHEARSAL if options.rehearse else trainer.FULL
        data = trainer.measure_trainer(settings, device, lambda data: write(options.out, name, data, command))
    elif name == "memory":
        data = step_memory.measure_part((frontier.SMALL_PARTS if options.rehearse else frontier.PARTS)["8k"], device)
    elif name == "machine":
        data = {"printed": str(measure_machine())}
    else:
        data = measure((REHEARSAL if options.rehearse else FULL)[name], device)
    print(f"wrote {write(options.out, name, data, command).name}")


def run_pipelines(
    parts: Sequence[str], device: torch.device, data: dict[str, Any], options: argparse.Namespace, command: str
) -> None:
    """Measure pipelines in processes of their own, and write the result after each."""

    def done(part: str, found: dict[str, Any]) -> None:
        data["parts"][part] = found
        print(f"{part}: wrote {write(options.out, 'pipelines', data, command).name}", flush=True)

    pipelines.measure_parts(parts, device, rehearse=options.rehearse, done=done)


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    names = ("linear", "gpt", "overhead", "overlap", "peers", "trainer", "memory", "machine", *PARTS)
    parser.add_argument("benchmark", choices=names)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument(
        "--only",
        metavar="PARTS",
        help="parts of llama, frontier, parallelism or pipelines; others of the same sources stay",
    )
    parser.add_argument("--rehearse", action="store_true", help="small sizes")
    options = parser.parse_args(arguments)
    known = PARTS.get(options.benchmark, ())
    if options.only and not set(options.only.split(",")) <= set(known):
        expected = f"parts of {options.benchmark}: {', '.join(known)}" if known else ", ".join(PARTS)
        parser.error(f"--only {options.only}: expected {expected}.")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # Slower attention than the flash kernel would hide copies; Trainer is measured as a user runs it.
    flash = device.type == "cuda" and options.benchmark != "trainer"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        run(options, device)


if __name__ == "__main__":
    main()
