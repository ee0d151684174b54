"""
Fit a model into a budget
=========================

A model whose activations do not fit into the memory of the device stops with ``torch.OutOfMemoryError``. With
``actoffload.offload(model)`` it trains, and ``memory_budget=`` sets a limit below the memory of the device. Here a GPU
is limited to 4.5 GiB, and a step of the model takes 7.5 GiB.
"""

# %%
# Out of memory
# -------------
# The model is twelve transformer blocks of PyTorch. ``torch.cuda.set_per_process_memory_fraction`` limits the GPU. Then
# the first step fails. Without a GPU the example runs on the CPU with a smaller model. Nothing runs out of memory
# there, no costs are measured, and the plan is the same for every budget.
import torch

import actoffload

reference = not torch.cuda.is_available()
device = torch.device("cpu" if reference else "cuda")
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (1, 8192), torch.bfloat16)
limit, steps = 4.5, 4 if reference else 24  # GiB; the first steps measure on a GPU
budget = "64 MiB" if reference else "3.5 GiB"

torch.manual_seed(0)
how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "device": device, "dtype": dtype}
blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **how) for _ in range(8 if reference else 12)]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def train_step():
    """Run forward, backward and optimizer; the gradients are freed after the step."""
    x = torch.randn(*shape, width, device=device, dtype=dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if not reference:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit * 2**30 / torch.cuda.mem_get_info()[1])
try:
    train_step()
except torch.OutOfMemoryError as error:
    print(str(error).split("; Of the allocated memory")[0])  # what follows is about fragmentation
else:
    print("Nothing runs out of memory on the reference device." if reference else "The model fits.")
optimizer.zero_grad()

# %%
# One line
# --------
# With ``actoffload.offload(model)`` the same loop trains. The first two steps recompute all blocks and offload their
# inputs, so they fit. Then the fastest plan is chosen whose peak fits into the device, and measured. A part of the
# device is left free for gaps between tensors. The plan lists what is kept, offloaded and recomputed.
handle = actoffload.offload(model)
for _ in range(steps):
    train_step()
print(handle.plan)

# %%
# The report is about the latest step: what was offloaded, and what kept memory on the device. It counts the offloaded
# bytes. In a plan those of recomputed groups are estimates.
print(handle.report())
fits = handle.plan
handle.remove()

# %%
# A budget
# --------
# ``memory_budget=`` is a limit of our own, for a device that is shared, or for a step that comes later. It is text such
# as ``"24GiB"``, a number of bytes, or a fraction of the device such as ``0.5``. Weights, gradients, optimizer states
# and temporary memory count. If no plan is within the budget, a warning says which peak can be reached, and training
# goes on with that plan.
handle = actoffload.offload(model, memory_budget=budget)
for _ in range(steps):
    train_step()
print(handle.plan)
within_budget = handle.plan
handle.remove()

# %%
# Side by side
# ------------
# Peak memory and step time of each plan, without the limit of the GPU: ``plan=`` repeats a plan without measuring. On a
# GPU the table has times of whole steps, with the optimizer. The time in a plan is that of forward and backward. Less
# memory costs time: the copies take longer than the compute that they overlap, or parts of blocks are computed twice.
from actoffload.measure import measure_steps

if not reference:
    torch.cuda.set_per_process_memory_fraction(1.0)
measured = measure_steps({"no limit": train_step})
for name, plan in {"offload(model)": fits, f"budget of {budget}": within_budget}.items():
    with actoffload.offload(model, plan=plan):
        measured |= measure_steps({name: train_step})
print(measured)

# %%
# The dashed line is the limit. The reference device has none.
ax = measured.plot()
if not reference:
    ax.axvline(limit, color="#d55e00", linestyle="--")
ax.figure.savefig("fit_a_budget.png", dpi=150)
