"""
Offloading and checkpointing
============================

Checkpointing drops what a block saves and recomputes it in backward. Offloading copies it to the host and back. The one
costs compute, the other needs the link. They can be combined: a checkpointed block saves only its input, which can be
offloaded. Here one model trains in all four ways.
"""

# %%
# One model, two switches
# -----------------------
# Eight transformer blocks of PyTorch. Checkpointing is a switch of the model, offloading a handle that can be paused.
# So all four ways train the same weights in the same modules. On a GPU the blocks are as wide as those of the largest
# models, and few, because weights and gradients need memory too. Without a GPU the example runs on the CPU, with a
# smaller model.
from contextlib import nullcontext
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.measure import describe_device, measure_steps

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
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
handle = actoffload.offload(model, num_layers=6)


def train_step(checkpointing, offloading):
    """Run forward, backward and optimizer; the gradients keep their memory between steps."""
    model.checkpointing = checkpointing
    optimizer.zero_grad(set_to_none=False)
    with nullcontext() if offloading else handle.paused():
        model(torch.randn(*shape, width, device=device, dtype=dtype)).square().mean().backward()
    optimizer.step()


# %%
# Memory and time
# ---------------
# The peaks include weights and gradients, except on the reference device. Checkpointing costs about the time of one
# more forward. Offloading costs the time by which the copies take longer than the compute that they overlap. Bytes grow
# with the width of a model and compute with its square, so offloading costs less in wide models.
measured = measure_steps(
    {
        "keep": partial(train_step, checkpointing=False, offloading=False),
        "checkpoint": partial(train_step, checkpointing=True, offloading=False),
        "offload": partial(train_step, checkpointing=False, offloading=True),
        "both": partial(train_step, checkpointing=True, offloading=True),
    }
)
print(measured)

# %%
# The report is about the latest step, with both: the inputs of the blocks are all that is saved.
print(handle.report())

# %%
# With offloading, the saved tensors of two blocks are resident. With checkpointing, the input of every block is, and
# the saved tensors of the block that is recomputed. With both, all but two of the inputs are offloaded as well: more
# blocks then need no more memory for activations.
measured.plot().figure.savefig("offload_beside_checkpointing.png", dpi=150)
handle.remove()
