"""Run the benchmarks, each into a result file of JSON.

    PYTHONPATH=src python benchmarks/run.py gpt --out benchmarks/results

`linear` and `gpt` compare offload with checkpointing and `save_on_cpu`; `llama` measures every number of layers at 8k
and 32k tokens, and host time; `overhead` measures the host time of one saved tensor; `trainer` trains a Llama with the
Trainer of Hugging Face.  ``--rehearse`` takes small sizes, for machines without accelerator.
"""

from __future__ import annotations

import argparse
import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from harness import measure
from host_time import measure_layers, measure_tensors
from results_file import RESULTS, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import FULL, REHEARSAL

LLAMA = ("host", "8k", "32k")


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Run one benchmark and write its result; that of `llama` after every part."""
    sizes = REHEARSAL if options.rehearse else FULL
    name, command = options.benchmark, f"PYTHONPATH=src python benchmarks/run.py {options.benchmark}"
    if name == "overhead":
        data = measure_tensors(5 if options.rehearse else 100, device)
    elif name == "llama":
        command += f" --only {options.only}" if options.only else ""
        data = {"parts": {}}
        for part in options.only.split(",") if options.only else LLAMA:
            print(f"{part}:", flush=True)
            host = partial(measure_layers, repeats=3 if options.rehearse else 60)
            data["parts"][part] = (host if part == "host" else measure)(sizes[part], device)
            write(options.out, name, data, command)
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()
    elif name == "trainer":
        import trainer

        settings = trainer.REHEARSAL if options.rehearse else trainer.FULL
        data = trainer.measure_trainer(settings, device, lambda data: write(options.out, name, data, command))
    else:
        data = measure(sizes[name], device)
    print(f"wrote {write(options.out, name, data, command).name}")


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("benchmark", choices=("linear", "gpt", "llama", "overhead", "trainer"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--only", metavar="PARTS", help=f"parts of llama, with commas between: {', '.join(LLAMA)}")
    parser.add_argument("--rehearse", action="store_true", help="small sizes")
    options = parser.parse_args(arguments)
    unknown = sorted(set((options.only or LLAMA[0]).split(",")) - set(LLAMA))
    if unknown or (options.only and options.benchmark != "llama"):
        parser.error(f"--only {options.only}: expected parts of llama: {', '.join(LLAMA)}.")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # Slower attention than the flash kernel would hide copies; Trainer is measured as a user runs it.
    flash = device.type == "cuda" and options.benchmark != "trainer"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        run(options, device)


if __name__ == "__main__":
    main()
