"""
Offload three of twelve layers
==============================

Autograd keeps what each layer saves until backward has used it, so the memory of a step grows with every layer.
Here the saved tensors of the first three of twelve layers are offloaded to host memory while later layers compute.
They are reloaded while later layers run backward. The trained weights have the same bits as without offloading.
"""

# %%
# A model and an optimizer
# ------------------------
# Each of the twelve layers saves its input: 64 MiB on a GPU. Without a GPU the example runs on the CPU, with a smaller
# input.
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
# Every layer runs in the context, and its output goes through the synchronization function. The input is made inside
# the step: the memory of a tensor is freed only if nothing else refers to it. The report lists what each layer saved in
# the latest step, what was offloaded of it, and why the rest was kept.
context, sync_function = actoffload.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=12)


def train_step(context=context, sync_function=sync_function):
    """Run forward, backward and optimizer."""
    optimizer.zero_grad(set_to_none=False)
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
# A disabled pair does nothing, so the same loop trains without offloading. Three steps give the same weights in both
# ways, bit for bit.
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
# What follows only measures. When the last layer starts, the default schedule has freed all three offloaded layers. So
# the peak should drop by every byte that was offloaded. R is the measured drop over these bytes. On a GPU the copies of
# three layers overlap the compute of the others, so the step takes about as long.
from functools import partial

from actoffload.measure import compare_steps, trace_memory
from actoffload.report.plots import plot_timeline, plot_trace

step_without = partial(train_step, *nothing)
print(compare_steps(step_without, train_step, context))

# %%
# Memory in use after the forward of every layer and before its backward. Both curves rise alike until the tenth layer.
# From then on one layer is freed for each that runs. In backward one layer is reloaded for each that is done.
traces = {"no offload": trace_memory(step_without, layers), "offload": trace_memory(train_step, layers)}
plot_trace(traces).figure.savefig("basic_memory.png", dpi=150)

# %%
# Where the copies go
# -------------------
# The same step as a timeline. Each D2H copy starts as soon as its tensor is saved and overlaps the compute of later
# layers. Each H2D copy starts when backward has freed enough memory for it.
with context.record_timeline() as recorder:
    train_step()
plot_timeline(recorder.timeline()).figure.savefig("basic_timeline.png", dpi=150)
