"""
Fit a model into a budget
=========================

A model whose activations do not fit on the device stops with ``torch.OutOfMemoryError``. With
``actoffload.offload(model)`` it trains; ``memory_budget=`` sets a lower limit. Here a GPU is limited to 4.5 GiB, and a
step of the model takes 7.5 GiB.
"""

# %%
# Out of memory
# -------------
# Twelve transformer blocks of PyTorch. ``torch.cuda.set_per_process_memory_fraction`` limits the GPU, and the first
# step fails. Without a GPU a smaller model runs on the CPU: nothing runs out of memory, and the plan is the same for
# every budget.
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
# inputs, so they fit. Then the fastest plan that fits is chosen and measured. A part of the device is left free for
# gaps between tensors.
handle = actoffload.offload(model)
for _ in range(steps):
    train_step()
print(handle.plan)

# %%
# The report counts what the latest step offloaded and kept. In a plan, bytes of recomputed groups are estimates.
print(handle.report())
fits = handle.plan
handle.remove()

# %%
# A budget
# --------
# ``memory_budget=`` is a lower limit, where the device is shared. It is text such as ``"24GiB"``, a number of bytes, or
# a fraction of the device such as ``0.5``. Weights, gradients, optimizer states and temporary memory count.
handle = actoffload.offload(model, memory_budget=budget)
for _ in range(steps):
    train_step()
print(handle.plan)
within_budget = handle.plan
handle.remove()

# %%
# Side by side
# ------------
# What does less memory cost? Peak memory and step time of each plan, without the limit of the GPU; ``plan=`` repeats a
# plan without measuring. Steps include the optimizer, and each begins with an idle GPU, so time of the host counts more
# than in the plan, whose time is that of forward and backward: :doc:`/api/measure`.
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

# %%
# Conclusion
# ----------
# A model that ran out of memory trains after one line. ``handle.frontier()`` lists what other budgets cost.
