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
# out of memory and no costs are measured. It then shows the calls, and the plan is the same for every budget. The peaks
# of the reference device do not include the weights.
import gc
import warnings
from contextlib import contextmanager

import torch

import actoffload
from actoffload.measure import describe_device, measure_steps

reference = not torch.cuda.is_available()
device = torch.device("cpu" if reference else "cuda")
print(f"Runs on {describe_device()}.")
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (1, 8192), torch.bfloat16)
layers = 8 if reference else 12
unit, bytes_of_unit = ("MiB", 2**20) if reference else ("GiB", 2**30)


def size(nbytes):
    """Return bytes as text that ``memory_budget`` takes."""
    return f"{nbytes / bytes_of_unit:.2f}{unit}"


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


def train(name, limit=None, offload=lambda model: None):
    """Train a new model on a device with `limit` bytes of memory; return its peak and time, and the handle."""
    with limited(limit):
        torch.manual_seed(0)
        of = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "device": device, "dtype": dtype}
        blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **of) for _ in range(layers)]
        model = torch.nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        handle = offload(model)

        def train_step():
            x = torch.randn(*shape, width, device=device, dtype=dtype)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return measure_steps({name: train_step}, warmup=2 if reference else 14), handle  # the first steps measure


measured, _ = train("no limit")
limit = round(0.6 * measured["no limit"].peak_bytes)
print(measured)
print(f"limit: {size(limit)}")

# %%
# Out of memory
# -------------
# With this limit the same training stops in its first step. PyTorch says how much it wanted and how much is allowed.
try:
    train("with the limit", limit)
except torch.OutOfMemoryError as error:
    print(str(error).split("; Of the allocated memory")[0])  # what follows is about fragmentation
else:
    print("Nothing runs out of memory on the reference device." if reference else "The model fits.")

# %%
# One line
# --------
# The line is ``actoffload.offload(model)``. The first step offloads everything, because it must fit. The next steps
# measure, and then the fastest plan is chosen whose peak fits into the device. The plan lists what is kept, offloaded
# and recomputed. The times that it expects are of forward and backward, without the optimizer, which the measured step
# contains; the rest of the difference is the error of the estimate.
with_limit, handle = train("offload(model)", limit, actoffload.offload)
print(with_limit)
print(handle.plan)

# %%
# The report is about the latest step: what was offloaded, and what kept memory on the device.
print(handle.report())

# %%
# A budget
# --------
# ``memory_budget=`` is a limit of our own, for a device that is shared, or for a step that comes later. It is text such
# as ``"24GiB"``, a number of bytes, or a fraction of the device such as ``0.5``. Weights, gradients, optimizer states
# and temporary memory count. Here it lies halfway between the smallest peak that the plans of the model reach and the
# limit from above.
smallest = limit // 2 if reference else handle.frontier().plans[0].peak_bytes
handle.remove()
budget = size((smallest + limit) / 2)
print(f"budget: {budget}")

with_budget, handle = train("a budget", limit, lambda model: actoffload.offload(model, memory_budget=budget))
print(with_budget)
print(handle.plan)
handle.remove()

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
impossible = size(smallest / 2)
print(f"budget: {impossible}")
with warnings.catch_warnings():
    warnings.showwarning = lambda message, *_, **__: print(message)  # without the line of the program
    out_of_reach = "a budget out of reach"
    too_small, handle = train(out_of_reach, limit, lambda model: actoffload.offload(model, memory_budget=impossible))
handle.remove()

# %%
# Peak and time
# -------------
# Less memory costs time: the copies take longer than the compute that they overlap, or parts of blocks are computed
# twice. A smaller peak may be as fast as a larger one within the noise of the measurement.
# The dashed line is the limit.
measured |= with_limit | with_budget | too_small
print(measured)
ax = measured.plot()
ax.axvline(limit / bytes_of_unit, color="#d55e00", linestyle="--")
ax.figure.savefig("fit_a_budget.png", dpi=150)
