"""
Say yourself when a layer leaves
================================

The default schedule offloads the first layers of a model. A program may know better: which layers save the most,
which part of the step leaves the link idle, what else runs between forward and backward. With manual synchronization
nothing moves by itself; a controller starts each copy, frees the memory and calls the tensors back. Here every fourth
of twelve layers leaves, so that the copies are spread evenly over the step.
"""

# %%
# A stream of your own
# --------------------
# The transfers may run on a stream that the program already has for such work. Without one, the context makes one
# stream for each direction.
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
# Three calls for each layer that leaves
# --------------------------------------
# ``start_offload_layer`` queues the copies; the host goes on at once. ``release_activation_forward_gpu_memory`` lets
# compute wait for them and frees the device memory; two layers later they have long ended, so nothing waits.
# ``start_reload_layer`` takes device memory again and queues the copies back; a hook on the output of a later layer
# calls it when backward has come that far, two layers ahead of the use. A layer without calls stays on the device.
leaving = {0, 4, 8}


def step(context, sync_function, controller, look=None):
    """Run one forward and backward; `look` is called between layers, in both directions."""
    layers.zero_grad(set_to_none=False)
    x = torch.randn(shape, device=device)
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
        x = sync_function(x)
        if k in leaving:
            controller.start_offload_layer(k)
        if k - 2 in leaving:
            controller.release_activation_forward_gpu_memory(k - 2)
            x.register_hook(lambda grad, leaver=k - 2: controller.start_reload_layer(leaver))
        if look is not None:
            look()
            x.register_hook(look)
    x.square().mean().backward()


# %%
# The input is made inside the step and held by nobody else, and the gradients stay allocated between steps: so the
# difference of the two peaks is that of the activations. With ``enabled=False`` the controller accepts the same calls
# and does nothing.


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
# All three layers are released when forward ends, so every offloaded byte should be absent at the peak.
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
# Sampled at the boundary of every layer. The curve with offloading rises in three flights of stairs, one behind each
# layer that leaves.
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
# Each copy out begins when its call is made, after its tensor is ready; each copy back begins with the backward of the
# layer that calls for it.
with context.record_timeline() as recorder:
    step(*offloading)
plot_timeline(recorder.timeline())
pyplot.show()
