"""
Find what is not freed
======================

Memory that was copied to the host is given up, but it is free only when nobody else refers to it. A program that keeps
a few activations for its log keeps their memory on the device, copied or not. Nothing fails and no result is wrong, so
nobody sees it. Here the report counts such bytes and names who holds them.
"""

# %%
# A model with a log
# ------------------
# Eight transformer blocks, as PyTorch has them, between an embedding and a head. A hook keeps what the first linear
# layer of each MLP gives, so that a log can say later how large it was. ``detach`` looks harmless, because it takes the
# tensor out of the graph. But what it returns is on the same memory.
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from matplotlib import pyplot

import actoffload
from actoffload.measure import MemoryMeter, compare_steps, describe_device
from actoffload.report.plots import plot_memory

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")

torch.manual_seed(0)
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (2048, (8, 1024), torch.bfloat16)
vocabulary = 512 if reference else 8192
how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
with device:
    parts = {"embedding": torch.nn.Embedding(vocabulary, width)}
    for k in range(8):
        parts[f"block{k}"] = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, **how)
    parts["head"] = torch.nn.Linear(width, vocabulary)
    model = torch.nn.Sequential(OrderedDict(parts)).to(dtype)
    tokens = torch.randint(vocabulary, shape)

activations = {}


def keep_for_the_log(name, module, args, output):
    """Remember an activation until the log asks for it."""
    activations[name] = output.detach()


def log_with(hook):
    """Let a hook look at every block; return what takes it away again."""
    logged = [(name, module) for name, module in model.named_modules() if name.endswith("linear1")]
    return [module.register_forward_hook(partial(hook, name)) for name, module in logged]


hooks = log_with(keep_for_the_log)


def step():
    """Run one forward and backward; the gradients keep their memory between steps."""
    activations.clear()  # the log is written once in a step
    model.zero_grad(set_to_none=False)
    F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()


# %%
# What the report says
# --------------------
# Who holds memory is looked for only in a step that is recorded, because it takes a moment.
handle = actoffload.offload(model)
step()
with handle.recording():
    step()
report = handle.report()
print("Not freed because of", *report.held[0].holders)
report

# %%
# R is how much of what should be gone is gone. The column "not freed" says in which blocks it is not, and the table at
# the end who holds it: the dictionary, by its name in this script. A notebook shows the report as this page does;
# ``print`` gives the same as text.
#
# The report counts storages. The peaks with and without offloading say it in another way: they differ by less than what
# was offloaded.


def plain_step():
    """Run a step without offloading."""
    with handle.paused():
        step()


repeats, steps = (1, 1) if reference else (3, 2)
before = compare_steps(plain_step, step, handle, repeats=repeats, steps=steps)
print(before)

# %%
# Before the bug is mended, the memory in use at the boundaries of the blocks is noted, for the picture below.


def memory_over(run):
    """Return the memory in use at the boundaries of the blocks, in both directions."""
    with MemoryMeter() as meter:

        def look(module, args, output):
            meter.sample()
            output.register_hook(meter.sample)

        blocks = [part for name, part in parts.items() if name.startswith("block")]
        looking = [block.register_forward_hook(look) for block in blocks]
        run()
    for each in looking:
        each.remove()
    return meter.samples


curves = {"without offload": memory_over(plain_step)}
curves["offload, with the bug"] = memory_over(step)

# %%
# The fix
# -------
# The log wants one number for each block. So the hook computes it at once and lets the activation go. The number may
# stay on the device: ``item`` would make the host wait in every block.
for hook in hooks:
    hook.remove()
activations.clear()
sizes = {}


def note_the_size(name, module, args, output):
    """Compute what the log shows."""
    sizes[name] = output.detach().square().mean().sqrt()


hooks = log_with(note_the_size)
after = compare_steps(plain_step, step, handle, repeats=repeats, steps=steps)
print(after)
print(f"R was {100 * before.ratio:.1f} % and is {100 * after.ratio:.1f} %.")

# %%
# Memory over the step
# --------------------
# With the bug the curve goes on climbing where it should stay level: of every block that leaves, a piece stays behind.
# Without offloading the bug costs nothing at the peak, because autograd holds the same memory there anyway. So it may
# lie in a program unnoticed until offloading is switched on.
curves["offload, fixed"] = memory_over(step)
plot_memory(curves)
pyplot.show()
handle.remove()
