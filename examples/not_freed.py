"""
Find what is not freed
======================

The library drops its reference to memory that was copied to the host, but the memory is freed only when nothing else
refers to it. A program that keeps a few activations for its log keeps their memory on the device. No error is raised
and no result is wrong. Here the report counts such bytes and names the variables that refer to them.
"""

# %%
# A model with a log
# ------------------
# Eight transformer blocks of PyTorch between an embedding and a head. A hook keeps the output of the first linear layer
# of each MLP, to log its size later. ``detach`` looks harmless, because it removes the tensor from the graph. But it
# returns a tensor on the same memory. Without a GPU the example runs on the CPU with a smaller model.
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F

import actoffload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"

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
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

activations = {}


def keep_for_the_log(name, module, args, output):
    """Keep an activation until the log is written."""
    activations[name] = output.detach()


def log_with(hook):
    """Register a hook for every block; return the handles of the hooks."""
    logged = [(name, module) for name, module in model.named_modules() if name.endswith("linear1")]
    return [module.register_forward_hook(partial(hook, name)) for name, module in logged]


hooks = log_with(keep_for_the_log)


def train_step():
    """Run forward, backward and optimizer; the gradients keep their memory between steps."""
    activations.clear()  # the log is written once a step
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
    optimizer.step()


# %%
# The report
# ----------
# Six of the eight blocks are offloaded. References to copied memory are searched only in a recorded step, because the
# search takes a moment.
handle = actoffload.offload(model, num_layers=6)
train_step()
with handle.recording():
    train_step()
report = handle.report()
print("Not freed because of", *report.held[0].holders)
print(report)

# %%
# "freed" is the part of the bytes that should be freed. The column "not freed" shows the blocks where it was not, and
# the table at the end the reference: the dictionary, by its name in this script.
#
# The fix
# -------
# The log needs one number for each block. So the hook computes it at once and keeps no activation. The number stays on
# the device: ``item`` would make the host wait in every block.
sizes = {}


def log_size(name, module, args, output):
    """Compute the number for the log."""
    sizes[name] = output.detach().square().mean().sqrt()


for hook in hooks:
    hook.remove()
hooks = log_with(log_size)
with handle.recording():
    train_step()
print(f"Freed is now {100 * handle.report().r:.1f} %.")

# %%
# Side by side
# ------------
# What follows only measures, with the fix and then with the bug again. The report counts storages, and the measured
# peaks agree: with the bug they differ by less than the offloaded bytes.
#
# On a GPU the step takes much longer with offloading. ``num_layers=6`` is chosen to show memory, and the copies of six
# blocks take longer than the compute of all eight.
from actoffload.measure import compare_steps, trace_memory
from actoffload.report.plots import plot_trace


def step_without():
    """Train without offloading."""
    with handle.paused():
        train_step()


blocks = [part for name, part in parts.items() if name.startswith("block")]
print("Fixed:", compare_steps(step_without, train_step, handle), sep="\n")
traces = {"no offload": trace_memory(step_without, blocks), "offload, fixed": trace_memory(train_step, blocks)}

hooks += log_with(keep_for_the_log)
print("\nWith the bug:", compare_steps(step_without, train_step, handle), sep="\n")
traces["offload, with the bug"] = trace_memory(train_step, blocks)

# %%
# With the bug the curve rises where it should be flat: a part of every offloaded block is not freed. Without offloading
# the bug costs nothing at the peak, because autograd keeps the same memory anyway. So such a bug is often found only
# when offloading is switched on.
plot_trace(traces).figure.savefig("not_freed.png", dpi=150)
handle.remove()
