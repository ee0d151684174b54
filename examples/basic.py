"""
Offload three of twelve layers
==============================

A context around each layer offloads what autograd saves, for training loops that call their layers themselves. The
saved tensors of the first three of twelve layers are copied to host memory while later layers compute, and reloaded
while later layers run backward. For a whole model, ``actoffload.offload(model)`` is one line:
:doc:`/guide/whole_model`.
"""

# %%
# A model and an optimizer
# ------------------------
# Each of the twelve layers saves its input: 64 MiB on a GPU. They compute in float32: in bfloat16 compute is faster,
# and copies of three layers would be slower than the compute that they overlap. Without a GPU the input is smaller.
import torch

import actoffload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
shape = (1, 256, 1024) if device.type == "cpu" else (16, 1024, 1024)
torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).to(device)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

# %%
# The context and the synchronization function
# --------------------------------------------
# Every layer runs in the context, and its output goes through the synchronization function. The step makes its own
# input: memory is freed only if nothing else refers to the tensor. The report lists what each layer saved, what was
# offloaded, and why the rest was kept.
context, sync_function = actoffload.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=12)


def train_step(context=context, sync_function=sync_function):
    """Run forward, backward and optimizer."""
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
    x = torch.randn(shape, device=device)
    for layer in layers:
        with context:
            x = layer(x)
        x = sync_function(x)
    x.square().mean().backward()
    optimizer.step()


for _ in range(3):
    train_step()
print(context.report())

# %%
# The same bits
# -------------
# A disabled pair does nothing: the same loop trains without offloading. Three steps give the same weights in both ways.
import copy

nothing = actoffload.get_cpu_offload_context(enabled=False)
start = copy.deepcopy(layers.state_dict())


def weights_after_training(*pair):
    """Return the weights after three steps, from the same start and with the same inputs every time."""
    layers.load_state_dict(start)
    torch.manual_seed(1)
    for _ in range(3):
        train_step(*pair)
    return [weight.detach().clone() for weight in layers.parameters()]


same = all(map(torch.equal, weights_after_training(*nothing), weights_after_training()))
print("Weights are bit-identical:", same)

# %%
# Side by side
# ------------
# Does it help? Peak memory and step time, without and with offloading. R is the drop of the peak, divided by the
# offloaded bytes.
from functools import partial

from actoffload.measure import compare_steps, trace_memory
from actoffload.report.plots import plot_timeline, plot_trace

step_without = partial(train_step, *nothing)
print(compare_steps(step_without, train_step, context))

# %%
# Memory in use after the forward of every layer and before its backward; the peaks of the table lie in between. From
# the tenth layer on, one layer is freed for each that runs. In backward one layer is reloaded for each that is done.
# The bump at the start of backward is the gradient of the output.
traces = {"no offload": trace_memory(step_without, layers), "offload": trace_memory(train_step, layers)}
plot_trace(traces).figure.savefig("basic_memory.png", dpi=150)

# %%
# Where the copies go
# -------------------
# Each D2H copy starts as soon as its tensor is saved, and overlaps with the compute of later layers. Each H2D copy
# starts when backward has freed enough memory for it.
with context.record_timeline() as recorder:
    train_step()
plot_timeline(recorder.timeline()).figure.savefig("basic_timeline.png", dpi=150)

# %%
# Conclusion
# ----------
# Three offloaded layers lower the peak by all their bytes, because they are free when the last layer starts. The step
# takes as long as before while copies are shorter than the compute of the other layers.
