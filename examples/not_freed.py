"""
Find what is not freed
======================

Offloaded memory is freed only when nothing else refers to it. A program that keeps activations for its log keeps their
memory on the device, without an error. Here the report counts such bytes, and names the variables that refer to them.
"""

# %%
# A model with a log
# ------------------
# Eight transformer blocks of PyTorch between an embedding and a head. A hook keeps the output of the first linear layer
# of each MLP, to log its size later. ``detach`` returns a tensor on the same memory.
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
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
    F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
    optimizer.step()


# %%
# The report
# ----------
# Six of the eight blocks are offloaded. References are searched in a recorded step.
handle = actoffload.offload(model, num_layers=6)
train_step()
with handle.recording():
    train_step()
report = handle.report()
print("Not freed because of", *report.held[0].holders)
print(report)

# %%
# "freed" is below 100 %. The column "not freed" names the blocks, and the table at the end the reference: the
# dictionary of this script.
#
# The fix
# -------
# The hook computes the number for the log at once, and keeps no activation. The number stays on the device: ``item``
# would make the host wait in every block.
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
# Does the fix help? Peak memory and step time with the fix, and with the bug again. R is the drop of the peak, divided
# by the offloaded bytes. The step takes much longer, because ``num_layers=6`` offloads more than the link can carry: it
# shows memory.
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
# the bug costs nothing at the peak, because autograd keeps the same memory anyway.
plot_trace(traces).figure.savefig("not_freed.png", dpi=150)
handle.remove()

# %%
# Conclusion
# ----------
# If "freed" is below 100 %, record a step: the report names what refers to the memory. Keep numbers or copies for logs,
# not activations.
