"""
Fit a model into a budget
=========================

A model whose activations do not fit into the memory of the device stops with ``torch.OutOfMemoryError``. With
``actoffload.offload(model)`` the memory of the device is the limit, and ``memory_budget=`` sets a smaller one. Here the
memory of a GPU is limited, so that a model does not fit; then it trains all the same.
"""

# %%
# A model and a smaller device
# ----------------------------
# A few transformer blocks of PyTorch and an optimizer. ``torch.cuda.set_per_process_memory_fraction`` makes the GPU as
# small as we want it to be: 60 % of what the model takes. Without a GPU the example runs on the CPU, where nothing runs
# out of memory and nothing is measured. It then shows the calls, and the plan is the same for every budget. The peaks
# of the reference device do not include the weights.
import gc
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from matplotlib import pyplot

import actoffload
from actoffload.measure import describe_device, measure_peak, measure_step_times

reference = not torch.cuda.is_available()
device = torch.device("cpu" if reference else "cuda")
print(f"Runs on {describe_device()}.")
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (1, 8192), torch.bfloat16)
layers = 8 if reference else 12
unit, bytes_of_unit = ("MiB", 2**20) if reference else ("GiB", 2**30)


def size(nbytes, space=" "):
    """Return bytes as text."""
    return f"{nbytes / bytes_of_unit:.2f}{space}{unit}"


@contextmanager
def limited(nbytes):
    """Limit the memory of the GPU that the process may use to `nbytes`; the CPU is not limited."""
    gc.collect()
    if reference or nbytes is None:
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@dataclass
class Run:
    """What training took: bytes, and seconds of a step, which are not measured on the reference device."""

    peak: int
    seconds: float
    plan: object = None
    frontier: object = None

    def __str__(self):
        return f"peak {size(self.peak)}" + ("" if reference else f", step {1e3 * self.seconds:.1f} ms")


def train(limit=None, offloading=False, **how):
    """Train a new model on a device with `nbytes` of memory; return what it took."""
    with limited(limit):
        torch.manual_seed(0)
        of = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "device": device, "dtype": dtype}
        blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **of) for _ in range(layers)]
        model = torch.nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        handle = actoffload.offload(model, **how) if offloading else None

        def step():
            x = torch.randn(*shape, width, device=device, dtype=dtype)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        peak = measure_peak(step, warmup=2 if reference else 14)  # the first steps measure
        seconds = 0.0 if reference else median(measure_step_times({"": step}, repeats=5, warmup=0)[""])
        if handle is None:
            return Run(peak, seconds)
        found = Run(peak, seconds, handle.plan, None if reference else handle.frontier())
        handle.remove()
        return found


without = train()
limit = round(0.6 * without.peak)
print(f"without a limit: {without}")
print(f"limit: {size(limit)}")

# %%
# Out of memory
# -------------
# With this limit the same training stops in its first step. PyTorch says how much it wanted and how much is allowed.
try:
    train(limit)
except torch.OutOfMemoryError as error:
    print(". ".join(str(error).split(". ")[:4]))
else:
    print("Nothing runs out of memory on the reference device." if reference else "The model fits.")

# %%
# One line
# --------
# The line is ``actoffload.offload(model)``. The first step offloads everything, because it must fit. The next steps
# measure, and then the fastest plan is chosen whose peak fits into the device. The plan lists what is kept, offloaded
# and recomputed.
with_limit = train(limit, offloading=True)
print(f"offload(model): {with_limit}")
print(with_limit.plan)

# %%
# A budget
# --------
# ``memory_budget=`` is a limit of our own, for a device that is shared, or for a step that comes later. It is text such
# as ``"24GiB"``, a number of bytes, or a fraction of the device such as ``0.5``. Weights, gradients, optimizer states
# and temporary memory count. Here it lies halfway between the smallest peak that the plans of the model reach and the
# limit from above.
smallest = limit // 2 if reference else with_limit.frontier.plans[0].peak_bytes
budget = size((smallest + limit) / 2, space="")
with_budget = train(limit, offloading=True, memory_budget=budget)
print(f"offload(model, memory_budget={budget!r}): {with_budget}")
print(with_budget.plan)

# %%
# A text that is not a budget is refused at once:
try:
    actoffload.offload(torch.nn.Sequential(torch.nn.Linear(8, 8)), memory_budget="24")
except ValueError as error:
    print(error)

# %%
# A budget that no plan reaches
# -----------------------------
# Weights and gradients are on the device in any case, and so are the activations of the layer that computes. If the
# budget is smaller than that, a warning says which peak can be reached. Training goes on with the plan of that peak. On
# the reference device peaks are not measured, so there is no warning.
impossible = size(smallest / 2, space="")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    too_small = train(limit, offloading=True, memory_budget=impossible)
for warning in caught:
    if "memory_budget" in str(warning.message):
        print(warning.message)
print(f"offload(model, memory_budget={impossible!r}): {too_small}")

# %%
# Peak and time
# -------------
# Less memory costs time: the copies take longer than the compute beside them, or parts of blocks are computed twice.
# Each bar is a peak; the numbers behind the bars are step times, as a ratio to training without a limit.
bars = {
    "no limit": without,
    "offload(model)": with_limit,
    f'memory_budget="{budget}"': with_budget,
    f'memory_budget="{impossible}"': too_small,
}
figure, ax = pyplot.subplots(figsize=(7.5, 2.8), layout="constrained")
for place, run in enumerate(bars.values()):
    ax.barh(place, run.peak / bytes_of_unit, color="#555555" if place == 0 else "#2b8cc4", height=0.6)
    text = "" if reference else f" {run.seconds / without.seconds:.3f} x"
    ax.text(run.peak / bytes_of_unit, place, text, va="center", fontsize=9)
ax.axvline(limit / bytes_of_unit, color="#d55e00", linestyle="--", label=f"limit {size(limit)}")
ax.set_yticks(range(len(bars)), bars)
ax.invert_yaxis()
ax.set_xlim(right=1.12 * without.peak / bytes_of_unit)
ax.set_xlabel(f"peak of device memory ({unit})")
ax.legend(frameon=False, fontsize=8, loc="lower right")
ax.spines[["top", "right"]].set_visible(False)
pyplot.show()
