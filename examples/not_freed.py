"""
Find what is not freed
======================

Memory that was copied to the host is given up, but it is freed only if nobody else refers to it. A model that keeps a
few activations for its log therefore offloads and saves nothing. Nothing fails and no number is wrong, so it goes
unseen. Here the report counts such bytes and names who holds them.
"""

# %%
# A model with a log
# ------------------
# Nine blocks of a transformer, as PyTorch has them. A hook keeps what the first linear layer of each MLP gives, to log
# how large it is later. ``detach`` looks harmless: it takes the tensor out of the graph. But the result is on the same
# memory.
import torch
from matplotlib import pyplot

import actoffload
from actoffload.observe.compare import compare_steps
from actoffload.observe.measure import MemoryMeter, describe_device
from actoffload.observe.plots import plot_memory

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")

torch.manual_seed(0)
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (8, 1024), torch.bfloat16)
block = torch.nn.TransformerEncoderLayer(
    width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
)
model = torch.nn.TransformerEncoder(block, 9, enable_nested_tensor=False).to(device, dtype)

activations = {}


def keep_for_the_log(module, args, output):
    """Remember an activation until somebody looks at it."""
    activations[module] = output.detach()


hooks = [block.linear1.register_forward_hook(keep_for_the_log) for block in model.layers]


def step():
    """Run one forward and backward; the gradients keep their memory between steps."""
    model.zero_grad(set_to_none=False)
    model(torch.randn(*shape, width, device=device, dtype=dtype)).square().mean().backward()


# %%
# What the report says
# --------------------
# Who holds the memory is looked for while a step is recorded. It is a single step, so it may take a moment.
handle = actoffload.offload(model)
step()
with handle.recording():
    step()
print(handle.report())

# %%
# The line on R says how much of what should be gone is gone, and the column "not freed" in which blocks it is not. The
# table below it names the holder: the dictionary, by its name in the script.
#
# The drop of the peak, which the allocator measures and not the report, falls short by the same amount:


def plain_step():
    """Run a step without offloading."""
    with handle.paused():
        step()


repeats = 1 if reference else 5
before = compare_steps(plain_step, step, handle, repeats=repeats)
print(before)


def memory_over(run):
    """Return the memory in use at the boundaries of the blocks, in both directions."""
    with MemoryMeter() as meter:

        def look(module, args, output):
            meter.sample()
            output.register_hook(meter.sample)

        looks = [block.register_forward_hook(look) for block in model.layers]
        run()
    for each in looks:
        each.remove()
    return meter.samples


curves = {"without offload": memory_over(plain_step), "offload, with the log": memory_over(step)}

# %%
# The fix
# -------
# The log wants a number for each block. So the hook computes the number at once, and lets the activation go. The number
# stays on the device: ``item`` would make the host wait for it in every block.
for hook in hooks:
    hook.remove()
activations.clear()
sizes = {}


def note_the_size(module, args, output):
    """Compute what the log shows."""
    sizes[module] = output.detach().square().mean().sqrt()


hooks = [block.linear1.register_forward_hook(note_the_size) for block in model.layers]

after = compare_steps(plain_step, step, handle, repeats=repeats)
print(after)
print(f"R: {before.ratio:.1%} before, {after.ratio:.1%} after.")

# %%
# Memory over the step
# --------------------
# With the log the curve keeps climbing: of each block that leaves, what the log holds is left behind. Without offloading
# the log looked free of charge, because autograd holds the same memory at the peak. And it is held when the step is over.
curves["offload, fixed"] = memory_over(step)
plot_memory(curves)
pyplot.show()
handle.remove()
