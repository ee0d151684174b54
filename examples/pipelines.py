"""
Pipeline parallelism: every rank by one plan
============================================

``actoffload.offload(schedule, memory_budget=...)`` makes one plan for all stages and microbatches of a rank. The first
ranks have the most microbatches in flight, so their peaks decide what fits: they free the most.
"""

# %%
# One line per rank
# -----------------
# ``torchrun`` runs this program once for each rank. Two ranks have two stages each, in an interleaved schedule of
# PyTorch. With two GPUs the ranks use NCCL, otherwise gloo on the CPU. Every rank calls ``offload`` with its schedule.
# On a GPU the first steps are measured, until ``handle.settling`` is False.
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib import pyplot
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import actoffload
from actoffload.measure import measure_steps

gpus = torch.cuda.device_count() >= 2
width, tokens, dtype = (4096, 4096, torch.bfloat16) if gpus else (64, 64, torch.float32)
ranks, microbatches, layers = 2, 8 if gpus else 4, 2


def make_schedule(rank, device):
    """Return the modules of a rank and their schedule; this is all PyTorch's."""
    how = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": device, "dtype": dtype}
    modules, stages = [], []
    for index in range(rank, 2 * ranks, ranks):
        blocks = [torch.nn.TransformerEncoderLayer(width, width // 32, 4 * width, **how) for _ in range(layers)]
        modules.append(torch.nn.Sequential(*blocks))
        stages.append(PipelineStage(modules[-1], index, 2 * ranks, device))
    return modules, ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda y, _: y.float().square().mean())


def run_rank(folder):
    """Train as one rank, without offloading and with it; write what was measured into a folder."""
    warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    modules, schedule = make_schedule(rank, device)
    optimizer = torch.optim.SGD(torch.nn.ModuleList(modules).parameters(), lr=1e-3)

    def train_step():
        x = torch.randn(microbatches, tokens, width, dtype=dtype, device=device)
        target = torch.zeros(microbatches, device=device)
        # Gradients stay allocated: peaks differ by activations only.
        optimizer.zero_grad(set_to_none=False)
        given, expected = ((x,) if rank == 0 else ()), (target if rank == ranks - 1 else None)
        schedule.step(*given, target=expected, return_outputs=False)
        optimizer.step()

    measured = measure_steps({"no offload": train_step})

    # The budget is three quarters of the highest peak, the same number on every rank.
    peaks = [None] * ranks
    dist.all_gather_object(peaks, measured.steps["no offload"].peak_bytes)
    budget = 3 * max(peaks) // 4
    handle = actoffload.offload(schedule, memory_budget=budget, min_bytes=2**20 if gpus else 2**12)
    train_step()
    while handle.settling:
        train_step()
    handle.reset_statistics()
    train_step()
    table = str(handle.table())

    measured |= measure_steps({"memory_budget": train_step})
    steps = {name: (of.peak_bytes, of.seconds) for name, of in measured.steps.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps({"table": table, "steps": steps, "budget": budget}))
    handle.remove()
    dist.destroy_process_group()


if "RANK" in os.environ:  # this process is a rank
    run_rank(sys.argv[1])
    sys.exit()

# %%
# Start the ranks
# ---------------
# ``handle.table()`` has the bytes of one step for each rank: what is offloaded and kept. The peak in the table counts
# saved tensors only. ``torchrun`` cannot run a notebook, so the cells of one are written
# into a file.
with tempfile.TemporaryDirectory() as folder:
    program = sys.argv[0]
    if cells := globals().get("In"):  # IPython's list of the cells that were run
        program = str(Path(folder, "ranks.py"))
        Path(program).write_text("\n".join(cell for cell in cells if "get_ipython" not in cell))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    subprocess.run([sys.executable, "-m", *launcher, program, folder], env=environment, check=True)
    results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]

print("Two GPUs with NCCL." if gpus else "Two processes on the CPU with gloo.")
print(results[0]["table"])

# %%
# Side by side
# ------------
# Does it help? The bars are peaks of all device memory in a step; on a GPU, weights and gradients count too.
figure, ax = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
for place, (name, colour) in enumerate((("no offload", "#9a9a9a"), ("memory_budget", "#2b8cc4"))):
    peaks = [result["steps"][name][0] / 2**20 for result in results]
    bars = ax.barh([rank + 0.38 * place for rank in range(ranks)], peaks, 0.36, label=name, color=colour)
    ax.bar_label(bars, fmt="%.1f MiB", padding=4)
if gpus:  # on the CPU a budget counts saved tensors alone
    ax.axvline(results[0]["budget"] / 2**20, color="#c05a1e", label="the budget")
ax.set_yticks([rank + 0.19 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
ax.set_xlabel("peak of device memory (MiB)")
ax.margins(x=0.2)
ax.invert_yaxis()
ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
ax.spines[["top", "right"]].set_visible(False)
ax.tick_params(axis="y", length=0)
figure.savefig("pipelines.png", dpi=150)

# %%
# The slowest rank decides how long a step takes.
if gpus:
    without, with_budget = (max(of["steps"][name][1] for of in results) for name in results[0]["steps"])
    print(f"A step takes {without * 1e3:.1f} ms without offloading and {with_budget * 1e3:.1f} ms within the budget.")
else:
    print("Times on the CPU say nothing about a GPU.")

# %%
# Conclusion
# ----------
# One number for all ranks: each frees what it has above the budget, and a rank below it leaves its stages as they are.
