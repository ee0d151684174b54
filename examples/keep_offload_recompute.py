"""
Keep, offload or recompute
==========================

Saved tensors can be kept on the device, offloaded to the host, or recomputed. Each way has a price: memory, time of the
link, or time of the device. With ``memory_budget=`` the planner chooses for each block. The example compares its plan
with offloading alone and with activation checkpointing.
"""

# %%
# A model with a memory budget
# ----------------------------
# Twelve transformer blocks of PyTorch. A step takes 7.5 GiB, and the budget is 4.1 GiB. ``recompute="auto"`` is the
# default: the plan recomputes cheap operators, such as norms and activation functions, and keeps or offloads results
# that take long to compute, such as matrix products.
#
# Without a GPU a smaller model runs on the CPU, where no costs are measured: ``recompute=True`` recomputes all blocks.
import torch

import actoffload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (1, 8192), torch.bfloat16)
layers, budget, recompute = (8, None, True) if reference else (12, "4.1GiB", "auto")

torch.manual_seed(0)
how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, "device": device, "dtype": dtype}
blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **how) for _ in range(layers)]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
handle = actoffload.offload(model, memory_budget=budget, recompute=recompute)


def train_step(forward=model, shape=shape):
    """Run forward, backward and optimizer; the gradients are freed after the step."""
    x = torch.randn(*shape, width, device=device, dtype=dtype)
    forward(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(4 if reference else 24):  # the first steps measure on a GPU
    train_step()
print(handle.plan)

# %%
# The report of the latest step:
print(handle.report())

# %%
# Side by side
# ------------
# Does it help? Peak memory and step time of the plan, offloading alone with the same budget, checkpointing, and
# neither. Steps include the optimizer, and each begins with an idle GPU, so time of the host counts more than in the
# plan, whose time is that of forward and backward: :doc:`/api/measure`.
from functools import partial

from torch.utils.checkpoint import checkpoint

from actoffload.measure import measure_steps


def checkpointed(x):
    """Run the model with each block checkpointed."""
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


while handle.settling:  # the plan takes more passes where the times of passes differ
    train_step()
both = measure_steps({"offload and recompute": train_step})
frontier = None if reference else handle.frontier()
handle.remove()

measured = measure_steps({"keep": train_step, "checkpoint": partial(train_step, checkpointed)})
handle = actoffload.offload(model, memory_budget=budget, recompute=False)
train_step()
while handle.settling:
    train_step()
measured |= measure_steps({"offload": train_step}) | both
handle.remove()
print(measured)

# %%
# Each bar is a peak, with the step time beside it on a GPU. Checkpointing computes the forward of every block again.
# Offloading alone copies so much that compute stalls.
measured.plot().figure.savefig("keep_offload_recompute.png", dpi=150)

# %%
# What other budgets would cost
# -----------------------------
# ``handle.frontier()`` lists plans, each faster than all with a smaller peak, by the costs that the first steps
# measured. Times are of forward and backward. That of the present plan was measured.
if reference:
    print("Costs are not known on the reference device.")
else:
    print(frontier)
    frontier.plot().figure.savefig("keep_offload_recompute_frontier.png", dpi=150)

# %%
# The same bits
# -------------
# Recomputation runs the same kernels on the same values, so training gives the same weights. Fast attention kernels add
# in any order, so this comparison uses a deterministic kernel and short sequences. All blocks are recomputed.
import copy

from torch.nn.attention import SDPBackend, sdpa_kernel

start = copy.deepcopy(model.state_dict())


def weights_after_training():
    """Return the weights after three steps, from the same start and with the same inputs every time."""
    model.load_state_dict(start)
    torch.manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            train_step(shape=(8, 256))
    return [weight.detach().clone() for weight in model.parameters()]


without = weights_after_training()
with actoffload.offload(model, num_layers=layers - 2, recompute=True) as handle:
    same = all(map(torch.equal, without, weights_after_training()))
    print(f"{len(handle.plan.offloaded)} blocks are offloaded and {len(handle.plan.recomputed)} recomputed.")
print("Weights are bit-identical:", same)

# %%
# Conclusion
# ----------
# The combination is faster than checkpointing and than offloading alone: the link and the device share the work. Where
# less memory would do, give a lower budget: the frontier has its price.
