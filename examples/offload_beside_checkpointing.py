"""
Offloading and checkpointing
============================

Checkpointing drops what a block saves and recomputes it in backward. Offloading copies it to the host and back. They
can be combined: a checkpointed block saves only its input, which can be offloaded. Here one model trains in all four
ways.
"""

# %%
# A checkpointed model, offloaded
# -------------------------------
# Eight transformer blocks of PyTorch, each of them checkpointed. ``actoffload.offload`` is called as without
# checkpointing. The report shows that the inputs of the blocks are all that is saved. Those of the last two blocks are
# kept, and count as saved outside: a checkpoint saves an input before it calls the block. That of the first block is
# not freed, because the call of the model refers to it.
#
# On a GPU the blocks are as wide as those of the largest models, and few, because weights and gradients need memory
# too. Without a GPU the example runs on the CPU with a smaller model.
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
    optimizer.zero_grad(set_to_none=False)
    model(torch.randn(*shape, width, device=device, dtype=dtype)).square().mean().backward()
    optimizer.step()


for _ in range(3):
    train_step()
print(handle.report())

# %%
# Side by side
# ------------
# What follows only measures. Checkpointing is switched off in the model, and offloading is paused, so all four ways
# train the same weights. The peaks include weights and gradients, except on the reference device.
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
# Checkpointing costs about the time of one more forward. Offloading costs the time by which the copies take longer than
# the compute that they overlap. Bytes grow with the width of a model and compute with its square, so offloading costs
# less in wide models.
#
# With offloading, the saved tensors of two blocks are resident. With checkpointing, the input of every block is, and
# the saved tensors of the block that is recomputed. With both, all but two of the inputs are offloaded as well: more
# blocks then need no more memory for activations.
measured.plot().figure.savefig("offload_beside_checkpointing.png", dpi=150)
handle.remove()
