"""
Offload three of twelve layers
==============================

Autograd keeps what each layer saves until backward has used it, so the memory of a step grows with every layer.
Here the saved tensors of the first three of twelve layers are offloaded to host memory while later layers compute.
They are reloaded while later layers run backward. The gradients stay the same to the last bit.
"""

# %%
# A model whose memory is easy to count
# -------------------------------------
# Each of the twelve layers saves its input: 64 MiB on a GPU. Without a GPU the example runs on the CPU, with a smaller
# input.
import torch
from matplotlib import pyplot

import actoffload
from actoffload.measure import MemoryMeter, compare_steps, describe_device
from actoffload.report.plots import plot_memory, plot_timeline

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
shape = (1, 512, 1024) if device.type == "cpu" else (16, 1024, 1024)
print(f"Runs on {describe_device()}.")

torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).to(device)

# %%
# The context and the synchronization function
# --------------------------------------------
# Every layer runs in the context, and its output goes through the synchronization function. A disabled pair does
# nothing, so the same loop runs the step without offload.
offloading = actoffload.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=12)
nothing = actoffload.get_cpu_offload_context(enabled=False)


def step(context, sync_function, look=None):
    """Run one forward and backward; `look` is called between layers, in both directions."""
    layers.zero_grad(set_to_none=False)
    x = torch.randn(shape, device=device)
    for layer in layers:
        with context:
            x = layer(x)
        x = sync_function(x)
        if look is not None:
            look()
            x.register_hook(look)
    x.square().mean().backward()


# %%
# Two details matter for the measurement. The input is made inside the step: the memory of a tensor is freed only if
# nothing else refers to it. ``set_to_none=False`` keeps the gradients between steps, so that the measured step does not
# allocate them.
#
# The gradients with and without offloading are bit-identical:


def gradients(pair):
    """Return the gradients of a step whose input is the same every time."""
    torch.manual_seed(1)
    step(*pair)
    return [parameter.grad.clone() for parameter in layers.parameters()]


same = all(map(torch.equal, gradients(nothing), gradients(offloading)))
print("Gradients are bit-identical:", same)

# %%
# What it saves and what it costs
# -------------------------------
# When the last layer starts, the default schedule has freed all three offloaded layers. So the peak should drop by
# every byte that was offloaded. R is the measured drop over these bytes.
context, sync_function = offloading
result = compare_steps(
    lambda: step(*nothing),
    lambda: step(*offloading),
    context,
    repeats=7 if device.type != "cpu" else 2,
    steps=5 if device.type != "cpu" else 1,
)
print(result)

# %%
# Memory over the step
# --------------------
# Memory is sampled at the boundary of every layer. Both curves rise alike until the tenth layer, where the tensor of
# the first layer is freed. From then on one layer is freed for each that runs. In backward one layer is reloaded for
# each that is done. Between the samples a step needs a little more: the peaks in the table are those of the allocator.
curves = {}
for name, pair in (("without", nothing), ("with offload", offloading)):
    with MemoryMeter() as meter:
        step(*pair, meter.sample)
    curves[name] = meter.samples
plot_memory(curves)
pyplot.show()

# %%
# Where the copies go
# -------------------
# The same step as a timeline. Each D2H copy starts as soon as its tensor is saved and overlaps the compute of later
# layers. Each H2D copy starts when backward has freed enough memory for it.
with context.record_timeline() as recorder:
    step(*offloading)
plot_timeline(recorder.timeline())
pyplot.show()
