"""
Manual offload schedule
=======================

The default schedule offloads the first layers of a model. A program may know a better choice: which layers save the
most, when the link is idle, what else runs between forward and backward. With manual synchronization the program calls
a controller that starts each copy, frees the memory and reloads the tensors. Here every fourth of twelve layers is
offloaded, so that the copies are spread evenly over the step.
"""

# %%
# Your own copy stream
# --------------------
# The transfers may run on a stream of the program. By default the context makes one stream for each direction.
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

offloading = actoffload.get_cpu_offload_context(
    enabled=True,
    model_layers=12,
    manual_synchronization=True,
    offload_stream=None if device.type == "cpu" else torch.Stream(device),
)
nothing = actoffload.get_cpu_offload_context(enabled=False, manual_synchronization=True)

# %%
# Three calls for each offloaded layer
# ------------------------------------
# ``start_offload_layer`` queues the copies and returns at once. ``release_activation_forward_gpu_memory`` makes compute
# wait for them and frees the device memory. Two layers later the copies have ended, so there is no stall.
# ``start_reload_layer`` allocates device memory and queues the reload. A hook on the output of a later layer calls it
# two layers ahead of the use in backward. A layer without calls stays on the device.
offloaded = {0, 4, 8}


def step(context, sync_function, controller, look=None):
    """Run one forward and backward; `look` is called between layers, in both directions."""
    layers.zero_grad(set_to_none=False)
    x = torch.randn(shape, device=device)
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
        x = sync_function(x)
        if k in offloaded:
            controller.start_offload_layer(k)
        if k - 2 in offloaded:
            controller.release_activation_forward_gpu_memory(k - 2)
            x.register_hook(lambda grad, layer=k - 2: controller.start_reload_layer(layer))
        if look is not None:
            look()
            x.register_hook(look)
    x.square().mean().backward()


# %%
# The input is made inside the step, so nothing else refers to it, and the gradients stay allocated between steps. So
# the two peaks differ by activations alone. With ``enabled=False`` the controller accepts the same calls and does
# nothing.


def gradients(trio):
    """Return the gradients of a step whose input is the same every time."""
    torch.manual_seed(1)
    step(*trio)
    return [parameter.grad.clone() for parameter in layers.parameters()]


same = all(map(torch.equal, gradients(nothing), gradients(offloading)))
print("Gradients are bit-identical:", same)

# %%
# What it saves and what it costs
# -------------------------------
# All three layers are freed when forward ends, so no offloaded byte should be on the device at the peak.
context = offloading[0]
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
# Memory is sampled at the boundary of every layer. The curve with offloading falls after each offloaded layer.
curves = {}
for name, trio in (("without", nothing), ("with offload", offloading)):
    with MemoryMeter() as meter:
        step(*trio, meter.sample)
    curves[name] = meter.samples
plot_memory(curves)
pyplot.show()

# %%
# Where the copies go
# -------------------
# Each D2H copy starts when its call is made and its tensor is ready. Each H2D copy starts with the backward of the
# layer whose hook calls ``start_reload_layer``.
with context.record_timeline() as recorder:
    step(*offloading)
plot_timeline(recorder.timeline())
pyplot.show()
