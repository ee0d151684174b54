"""
Pipeline parallelism: every rank by one plan
============================================

In a pipeline each rank has some layers of the model, and several microbatches are in flight. The first ranks keep the
most of them, so their peaks decide what fits. ``actoffload.offload(schedule)`` offloads the stages of a rank by one
plan for all its microbatches. The ranks plan together, and only as much is offloaded as copies have time for.
"""

# %%
# A rank
# ------
# ``torchrun`` runs this program once for each rank. The schedule is interleaved: each of two ranks has two stages. A
# stage is a stack of pre-norm attention blocks. With two GPUs the ranks use NCCL, otherwise gloo on the CPU.
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib import pyplot
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import actoffload
from actoffload.measure import MemoryMeter

gpus = torch.cuda.device_count() >= 2
width, tokens, dtype = (4096, 4096, torch.bfloat16) if gpus else (64, 64, torch.float32)
ranks, stages_per_rank, layers = 2, 2, 2
microbatches, steps = (8, 4) if gpus else (4, 2)


class Block(torch.nn.Module):
    """Causal self-attention and an MLP, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        """Return the block's output; input and output are (batch, tokens, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_schedule(rank, device):
    """Return the modules of a rank and their schedule; this is all PyTorch's."""
    modules, stages = [], []
    for index in range(rank, ranks * stages_per_rank, ranks):
        with device:
            module = torch.nn.Sequential(*(Block() for _ in range(layers))).to(dtype)
        modules.append(module)
        stages.append(PipelineStage(module, index, ranks * stages_per_rank, device))
    return modules, ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda y, _: y.float().square().mean())


def measure(rank, device, optimizer, schedule):
    """Train for some steps; return the seconds and the largest peak of the last ones."""
    seconds, peaks = [], []
    for _ in range(steps):
        x = torch.randn(microbatches, tokens, width, dtype=dtype, device=device)
        target = torch.zeros(microbatches, device=device)
        optimizer.zero_grad(set_to_none=False)
        with MemoryMeter() as meter:
            dist.barrier()
            begun = time.perf_counter()
            given, expected = ((x,) if rank == 0 else ()), (target if rank == ranks - 1 else None)
            schedule.step(*given, target=expected, return_outputs=False)
            optimizer.step()
            if gpus:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        peaks.append(meter.peak_bytes)
    return {"seconds": median(seconds[1:]), "peak": max(peaks[1:])}


# %%
# One line per rank
# -----------------
# Every rank calls ``offload`` with its schedule. In the first step everything is offloaded, and on a GPU two more are
# measured. Then the ranks exchange what they measured, plan, and try the plans: until then the handle is ``settling``.
# ``table`` collects the reports of all ranks.


def run_rank(folder):
    """Measure steps without offloading and with it, as one rank."""
    warnings.simplefilter("ignore", actoffload.ReferenceDeviceWarning)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    modules, schedule = make_schedule(rank, device)
    optimizer = torch.optim.SGD(torch.nn.ModuleList(modules).parameters(), lr=1e-3)
    found = {"without": measure(rank, device, optimizer, schedule)}

    handle = actoffload.offload(schedule, min_bytes=2**20 if gpus else 2**12)
    while handle.settling:
        measure(rank, device, optimizer, schedule)
    handle.reset_statistics()
    found["with"] = measure(rank, device, optimizer, schedule)

    found |= {"table": str(handle.table()), "report": str(handle.report())}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    handle.remove()
    dist.destroy_process_group()


if "RANK" in os.environ:  # this process is a rank
    run_rank(sys.argv[1])
    sys.exit()

# %%
# Start the ranks
# ---------------
# The table has the bytes of one step for each rank: what is offloaded and kept, and the peak of the saved tensors
# beside that of the plan. ``torchrun`` cannot run a notebook, so the cells of one are written into a file.
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
# Each rank has a report of its own. This is that of the first one, about its latest step.
print(results[0]["report"])

# %%
# Memory by rank
# --------------
# The peak of device memory of each rank in a step; on a GPU weights and gradients are part of it. The first rank has
# more microbatches in flight than the last one, and so it offloads more.
names = [f"rank {rank}" for rank in range(ranks)]
figure, ax = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
for place, (key, label, colour) in enumerate((("without", "no offload", "#9a9a9a"), ("with", "offloaded", "#2b8cc4"))):
    peaks = [result[key]["peak"] / 2**20 for result in results]
    ax.barh([rank + 0.38 * place for rank in range(ranks)], peaks, 0.36, label=label, color=colour)
ax.set_yticks([rank + 0.19 for rank in range(ranks)], names)
ax.set_xlabel("peak memory (MiB)")
ax.invert_yaxis()
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
ax.tick_params(axis="y", length=0)
figure.savefig("pipelines.png", dpi=150)

# %%
# The slowest rank decides how long a step takes. A plan that is chosen without arguments costs no time by what the
# first steps measured. On a GPU, what is left of the difference is noise and the error of the estimate.
if gpus:
    seconds = [max(result[key]["seconds"] for result in results) for key in ("without", "with")]
    print(f"A step takes {seconds[0] * 1e3:.1f} ms without offloading and {seconds[1] * 1e3:.1f} ms with it.")
else:
    print("Times on the CPU say nothing about a GPU.")
