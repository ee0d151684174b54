"""
Offloading and checkpointing
============================

Checkpointing recomputes the activations of a block; offloading copies them to the host and back. Both can be combined:
a checkpointed block saves its input, which can be offloaded. Here one model trains in all four ways.
"""

# %%
# A checkpointed model, offloaded
# -------------------------------
# Eight wide transformer blocks of PyTorch, each of them checkpointed. The report shows that they save their inputs
# only. Those of the last two blocks are kept, and count as saved outside: a checkpoint saves an input before it calls
# the block. That of the first block is not freed, because the call of the model refers to it.
import torch
from torch.utils.checkpoint import checkpoint

import actoffload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (8192, (1, 2048), torch.bfloat16)


class Model(torch.nn.Module):
    """A stack of blocks that may be checkpointed."""

    def __init__(self):
        super().__init__()
        how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        how |= {"device": device, "dtype": dtype}
        blocks = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **how) for _ in range(8)]
        self.blocks = torch.nn.ModuleList(blocks)
        self.checkpointing = True

    def forward(self, x):
        """Run the blocks."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
handle = actoffload.offload(model, num_layers=6)


def train_step():
    """Run forward, backward and optimizer; the gradients keep their memory between steps."""
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
    model(torch.randn(*shape, width, device=device, dtype=dtype)).square().mean().backward()
    optimizer.step()


for _ in range(3):
    train_step()
print(handle.report())

# %%
# Side by side
# ------------
# Which way is best? Peak memory and step time of all four ways, with the same weights. Peaks include weights and
# gradients, except on the reference device.
from contextlib import nullcontext
from functools import partial

from actoffload.measure import measure_steps


def step_with(checkpointing, offloading):
    """Train with or without checkpointing and offloading."""
    model.checkpointing = checkpointing
    with nullcontext() if offloading else handle.paused():
        train_step()


measured = measure_steps(
    {
        "keep": partial(step_with, checkpointing=False, offloading=False),
        "checkpoint": partial(step_with, checkpointing=True, offloading=False),
        "offload": partial(step_with, checkpointing=False, offloading=True),
        "both": partial(step_with, checkpointing=True, offloading=True),
    }
)
print(measured)

# %%
# Checkpointing costs about one more forward. Offloading costs the time by which copies are longer than compute: less in
# wide models, whose bytes grow with the width, and whose compute grows with its square.
#
# With offloading, the saved tensors of two blocks are resident; with checkpointing, the input of every block and the
# saved tensors of one. With both, all but two of the inputs are offloaded as well.
measured.plot().figure.savefig("offload_beside_checkpointing.png", dpi=150)
handle.remove()

# %%
# Conclusion
# ----------
# In a wide model offloading is faster than checkpointing at nearly the same peak. Both together pay in deep models,
# whose inputs need memory. ``memory_budget=`` finds the fastest mix without checkpointing in the model.
