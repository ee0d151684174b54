"""
Keep, offload or recompute
==========================

What a block saves for backward can be kept on the device, copied to the host and back, or computed again. Each has its
price: memory, time of the link, time of the device. Here one model trains under a memory budget, and the planner
chooses for each block. The result is compared with offloading alone and with activation checkpointing.
"""

# %%
# One model, four ways
# --------------------
# A few transformer blocks of PyTorch, which may be checkpointed. Without a GPU the example runs on the CPU, with a
# smaller model. Nothing is measured there, so no budget can be met and no time is shown: ``recompute=True`` recomputes
# all blocks instead.
import warnings
from statistics import median

import torch
from matplotlib import pyplot
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.measure import describe_device, measure_peak, measure_step_times

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (1, 8192), torch.bfloat16)
layers = 8 if reference else 12
unit, bytes_of_unit = ("MiB", 2**20) if reference else ("GiB", 2**30)


class Model(torch.nn.Module):
    """A stack of blocks that may be checkpointed."""

    def __init__(self):
        super().__init__()
        how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        how |= {"device": device, "dtype": dtype}
        blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **how) for _ in range(layers)]
        self.blocks = torch.nn.ModuleList(blocks)
        self.checkpointing = False

    def forward(self, x):
        """Run the blocks."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


torch.manual_seed(0)
model = Model()


def step():
    """Run a forward and a backward of the same input."""
    torch.manual_seed(1)
    x = torch.randn(*shape, width, device=device, dtype=dtype)
    model.zero_grad()
    model(x).float().square().mean().backward()


def gradients():
    """Return the gradients of a step, on the host so that they take no device memory."""
    step()
    return [weight.grad.cpu() for weight in model.parameters()]


peaks, seconds = {}, {}


def measure(name, warmup=2):
    """Measure the peak of a step, and on a GPU its time."""
    peaks[name] = measure_peak(step, warmup=warmup)
    text = ""
    if not reference:
        seconds[name] = median(measure_step_times({name: step}, repeats=5, warmup=0)[name])
        text = f", {1e3 * seconds[name]:.1f} ms, {seconds[name] / seconds['keep']:.3f} x"
    print(f"{name}: peak {peaks[name] / bytes_of_unit:.2f} {unit}{text}")


measure("keep")
kept = gradients()
repeatable = all(map(torch.equal, gradients(), kept))

model.checkpointing = True
measure("checkpoint")
model.checkpointing = False

# %%
# Offload alone
# -------------
# The budget is a quarter of the way from the peak with checkpointing to the peak without. ``recompute=False`` allows
# keeping and offloading only. Where this budget is out of reach so, a warning says which peak is reached.
budget = round(0.75 * peaks["checkpoint"] + 0.25 * peaks["keep"])
print(f"budget: {budget / bytes_of_unit:.2f} {unit}")
first_steps = 2 if reference else 14  # the first steps measure
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    handle = actoffload.offload(model, memory_budget=budget, recompute=False)
    measure("offload", first_steps)
for warning in caught:
    if "memory_budget" in str(warning.message):
        print(warning.message)
saved_without = handle.plan.nbytes
handle.remove()

# %%
# Offload and recompute
# ---------------------
# ``recompute="auto"`` is the default: blocks are recomputed where that is faster than to copy all of what they save. In
# a recomputed block the outputs of matrix products and attention are saved all the same, because they take long to
# compute. They are kept or offloaded like everything else. What is computed again is cheap: norms, activation functions
# and sums.
handle = actoffload.offload(model, memory_budget=budget, recompute=True if reference else "auto")
measure("offload and recompute", first_steps)
print(handle.plan)

# %%
# The bytes that the blocks save, without and with recomputation:
print(f"{'':<28}{'saved by all blocks':>20}")
for name, saved in {"without recomputation": saved_without, "with the present plan": handle.plan.nbytes}.items():
    print(f"{name:<28}{sum(saved) / bytes_of_unit:>16.2f} {unit}")

# %%
# The same bits
# -------------
# A recomputed block runs the same kernels on the same values with the same random numbers. So gradients have the same
# bits as without, if those of two runs without have. Some kernels of GPUs add in any order; then the first line below
# says so, and bits cannot be compared.
print(f"two runs without:     {'the same bits' if repeatable else 'not the same bits'}")
same = all(map(torch.equal, gradients(), kept))
print(f"without and with:     {'the same bits' if same else 'not the same bits'}")

# %%
# What other budgets would cost
# -----------------------------
# ``handle.frontier()`` searches plans from the smallest peak on, each faster than all with a smaller peak. It uses what
# the first steps measured, so no further step is run. Printed it is a table; it is data as well:
# ``handle.frontier().plans`` are plans that ``offload(model, plan=...)`` takes. On the reference device costs are not
# known.
frontier = None
try:
    frontier = handle.frontier()
    print(frontier)
except RuntimeError as error:
    print(error)

# %%
# Left and down is better
# -----------------------
# The curve is the frontier, with the present plan marked. The points are measured: keeping everything, checkpointing
# all blocks, offloading alone, and the present plan. On the reference device the figure has the peaks only.
colours = {"keep": "#555555", "checkpoint": "#d55e00", "offload": "#b8659a", "offload and recompute": "#009e73"}
figure, ax = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
if frontier is None:
    ax.barh(list(peaks), [peak / bytes_of_unit for peak in peaks.values()], color=list(colours.values()), height=0.6)
    ax.invert_yaxis()
    ax.set_xlabel(f"peak of device memory ({unit}), reference device")
else:
    frontier.plot(ax)
    for name, colour in colours.items():
        ax.plot(peaks[name] / bytes_of_unit, 1e3 * seconds[name], "s", color=colour, label=f"{name}, measured")
    ax.axvline(budget / bytes_of_unit, color="#999999", linestyle=":", label="budget")
    ax.legend(frameon=False, fontsize=8)
ax.spines[["top", "right"]].set_visible(False)
pyplot.show()
handle.remove()
