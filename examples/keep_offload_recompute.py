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
# smaller model. No costs are measured there, so no budget can be met: ``recompute=True`` recomputes all blocks instead.
import copy
import warnings

import torch
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.measure import describe_device, measure_steps

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (1, 8192), torch.bfloat16)
layers = 8 if reference else 12


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
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def train_step():
    """Run forward, backward and optimizer; the gradients are freed after the step."""
    x = torch.randn(*shape, width, device=device, dtype=dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


measured = measure_steps({"keep": train_step})
model.checkpointing = True
measured |= measure_steps({"checkpoint": train_step})
model.checkpointing = False
print(measured)

# %%
# Offload alone
# -------------
# The budget is a quarter of the way from the peak with checkpointing to the peak without. ``recompute=False`` allows
# keeping and offloading only. If this budget is out of reach so, a warning says which peak is reached. The first steps
# measure; then the plan is final.
lowest, highest = measured["checkpoint"].peak_bytes, measured["keep"].peak_bytes
budget = round(0.75 * lowest + 0.25 * highest)
print(f"budget: {budget / 2**20:.1f} MiB")
first_steps = 2 if reference else 14

with warnings.catch_warnings():
    warnings.showwarning = lambda message, *_, **__: print(message)  # without the line of the program
    handle = actoffload.offload(model, memory_budget=budget, recompute=False)
    measured |= measure_steps({"offload": train_step}, warmup=first_steps)
saved_without = sum(handle.plan.nbytes)
handle.remove()

# %%
# Offload and recompute
# ---------------------
# ``recompute="auto"`` is the default: blocks are recomputed where that is faster than to copy all of what they save. In
# a recomputed block the outputs of matrix products and attention are saved all the same, because they take long to
# compute. They are kept or offloaded like everything else. What is computed again is cheap: norms, activation functions
# and sums.
handle = actoffload.offload(model, memory_budget=budget, recompute=True if reference else "auto")
measured |= measure_steps({"offload and recompute": train_step}, warmup=first_steps)
print(handle.plan)
print(
    f"The blocks save {sum(handle.plan.nbytes) / 2**20:.1f} MiB, and {saved_without / 2**20:.1f} without recomputation."
)

# %%
# The report is about the latest step: what was offloaded, and why the rest was kept.
print(handle.report())

# %%
# Peak and time
# -------------
print(measured)

# %%
# Each bar is a peak. On a GPU the ratio beside it is the step time. Checkpointing computes the forward of every block
# again. Offloading alone has to copy so much that compute waits for the copies.
measured.plot().figure.savefig("keep_offload_recompute.png", dpi=150)

# %%
# What other budgets would cost
# -----------------------------
# ``handle.frontier()`` searches plans from the smallest peak on, each faster than all with a smaller peak. It uses what
# the first steps measured, so no further step is run. Its times are estimates of forward and backward, without the
# optimizer; the table above has measured steps. Printed it is a table; it is data as well: ``handle.frontier().plans``
# are plans that ``offload(model, plan=...)`` takes. On the reference device costs are not known.
try:
    print(handle.frontier())
except RuntimeError as error:
    print(error)
else:
    handle.frontier().plot().figure.savefig("keep_offload_recompute_frontier.png", dpi=150)

# %%
# The same bits
# -------------
# A recomputed block runs the same kernels on the same values with the same random numbers. So training gives the same
# weights, if two runs without offloading do. Some kernels of GPUs add in any order; then the first line says so, and
# bits cannot be compared.
start = copy.deepcopy(model.state_dict())


def weights_after_training():
    """Return the weights after three steps, from the same start and with the same inputs every time."""
    model.load_state_dict(start)
    torch.manual_seed(1)
    for _ in range(3):
        train_step()
    return [weight.detach().cpu() for weight in model.parameters()]


with_handle = weights_after_training()
handle.remove()
without, again = weights_after_training(), weights_after_training()
for name, weights in {"two runs without": again, "without and with": with_handle}.items():
    print(f"{name}: {'the same bits' if all(map(torch.equal, without, weights)) else 'not the same bits'}")
