"""
Offloading and checkpointing
============================

Checkpointing drops what a block saves and recomputes it in backward. Offloading copies it to the host and back. The one
costs compute, the other needs the link. They can be combined: a checkpointed block saves only its input, which can be
offloaded. Here one model trains in all four ways, measured in turns.
"""

# %%
# One model, two switches
# -----------------------
# Eight transformer blocks of PyTorch. Checkpointing is a switch of the model, offloading a handle that can be paused.
# So all four ways run the same weights in the same modules. On a GPU the blocks are as wide as those of the largest
# models, and few, because weights and gradients need memory too.
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
from matplotlib import pyplot
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.measure import MemoryMeter, describe_device, measure_step_times

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (8192, (1, 2048), torch.bfloat16)


class Model(torch.nn.Module):
    """A stack of blocks that may be checkpointed."""

    def __init__(self):
        super().__init__()
        how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        how |= {"device": device, "dtype": dtype}
        blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **how) for _ in range(8)]
        self.blocks = torch.nn.ModuleList(blocks)
        self.checkpointing = False

    def forward(self, x):
        """Run the blocks."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


torch.manual_seed(0)
model = Model()
handle = actoffload.offload(model, num_layers=6)


def step(checkpointing, offloading):
    """Run one forward and backward; the gradients keep their memory between steps."""
    model.checkpointing = checkpointing
    model.zero_grad(set_to_none=False)
    with nullcontext() if offloading else handle.paused():
        model(torch.randn(*shape, width, device=device, dtype=dtype)).square().mean().backward()


ways = {
    "nothing": partial(step, checkpointing=False, offloading=False),
    "checkpointing": partial(step, checkpointing=True, offloading=False),
    "offload": partial(step, checkpointing=False, offloading=True),
    "both": partial(step, checkpointing=True, offloading=True),
}

# %%
# Memory and time
# ---------------
# Weights and gradients are in use before a step begins. The peak above that is counted as activations. The repeats of
# the four ways are interleaved, so that they run at the same clocks.


def peak_of(run):
    """Return the peak of a step above the memory in use before it, in bytes."""
    for _ in range(2):
        run()
    with MemoryMeter() as meter:
        meter.sample()
        run()
    return meter.peak_bytes - meter.samples[0][1]


peaks = {name: peak_of(run) for name, run in ways.items()}
times = measure_step_times(ways, repeats=1 if reference else 3, warmup=0)
seconds = {name: median(samples) for name, samples in times.items()}

print(f"{'':<14}{'activations':>14}{'step time':>14}{'':>10}")
for name in ways:
    slower = seconds[name] / seconds["nothing"] - 1
    print(f"{name:<14}{peaks[name] / 2**20:>10.1f} MiB{seconds[name] * 1e3:>11.2f} ms{100 * slower:>+8.1f} %")

# %%
# Left and down is better
# -----------------------
# Checkpointing costs about the time of one more forward. Offloading costs the time by which the copies take longer than
# the compute that they overlap. Bytes grow with the width of a model and compute with its square, so offloading costs
# less in wide models.
#
# With offloading, the saved tensors of two blocks are resident. With checkpointing, the input of every block is, and
# the saved tensors of the block that is recomputed. With both, all but two of the inputs are offloaded as well: more
# blocks then need no more memory for activations.
styles = {
    "nothing": ("#555555", 0),
    "checkpointing": ("#d55e00", 6),
    "offload": ("#2b8cc4", 0),
    "both": ("#009e73", -6),
}
figure, ax = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
for name, (colour, lift) in styles.items():
    place = seconds[name] * 1e3, peaks[name] / 2**20
    ax.plot(*place, "o", color=colour, markersize=9)
    ax.annotate(name, place, xytext=(9, lift), textcoords="offset points", va="center")
ax.set_xlim(0.9 * min(seconds.values()) * 1e3, 1.15 * max(seconds.values()) * 1e3)
ax.set_ylim(bottom=0)
ax.set_xlabel("step time (ms)")
ax.set_ylabel("peak of activations (MiB)")
ax.spines[["top", "right"]].set_visible(False)
pyplot.show()
handle.remove()
