"""
Manual offload schedule
=======================

With manual synchronization the program calls a controller that starts each copy, frees the memory and reloads the
tensors. It pays where the program knows more than the default schedule: which layers save the most, or when the link is
idle. Here every fourth of twelve layers is offloaded, so the copies are spread evenly over the step.
"""

# %%
# Your own copy stream
# --------------------
# The copies can run on a stream of the program. By default the context makes one stream for each direction. The layers
# are those of :ref:`sphx_glr_gallery_basic.py`.
import torch

import actoffload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
shape = (1, 256, 1024) if device.type == "cpu" else (16, 1024, 1024)

torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).to(device)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

context, sync_function, controller = actoffload.get_cpu_offload_context(
    enabled=True,
    model_layers=12,
    manual_synchronization=True,
    offload_stream=None if device.type == "cpu" else torch.Stream(device),
)

# %%
# Three calls for each offloaded layer
# ------------------------------------
# ``start_offload_layer`` queues the copies and returns at once. ``release_activation_forward_gpu_memory`` makes compute
# wait for them, and frees the device memory; two layers later the copies have ended, so nothing stalls.
# ``start_reload_layer`` allocates device memory and queues the reload. A layer without calls is kept.
offloaded = {0, 4, 8}


def train_step(context=context, sync_function=sync_function, controller=controller):
    """Run forward, backward and optimizer."""
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
    x = torch.randn(shape, device=device)
    for k, layer in enumerate(layers):
        with context:
            x = layer(x)
        x = sync_function(x)
        if k in offloaded:  # queue its copies
            controller.start_offload_layer(k)
        if k - 2 in offloaded:  # free it now, and reload it when backward has reached this layer
            controller.release_activation_forward_gpu_memory(k - 2)
            x.register_hook(lambda grad, layer=k - 2: controller.start_reload_layer(layer))
    x.square().mean().backward()
    optimizer.step()


for _ in range(3):
    train_step()
print(context.report())

# %%
# The same bits
# -------------
# With ``enabled=False`` the controller accepts the same calls and does nothing. Three steps give the same weights in
# both ways.
import copy

nothing = actoffload.get_cpu_offload_context(enabled=False, manual_synchronization=True)
start = copy.deepcopy(layers.state_dict())


def weights_after_training(*trio):
    """Return the weights after three steps, from the same start and with the same inputs every time."""
    layers.load_state_dict(start)
    torch.manual_seed(1)
    for _ in range(3):
        train_step(*trio)
    return [weight.detach().clone() for weight in layers.parameters()]


same = all(map(torch.equal, weights_after_training(*nothing), weights_after_training()))
print("Weights are bit-identical:", same)

# %%
# Side by side
# ------------
# Does it help? Peak memory and step time, without and with offloading.
from functools import partial

from actoffload.measure import compare_steps, trace_memory
from actoffload.report.plots import plot_timeline, plot_trace

step_without = partial(train_step, *nothing)
print(compare_steps(step_without, train_step, context))

# %%
# Memory in use after the forward of every layer and before its backward; the peaks of the table lie in between. The
# curve is level where a layer is freed in forward, and where a reload starts in backward.
traces = {"no offload": trace_memory(step_without, layers), "manual schedule": trace_memory(train_step, layers)}
plot_trace(traces).figure.savefig("manual_synchronization_memory.png", dpi=150)

# %%
# Where the copies go
# -------------------
# Each D2H copy starts when its call is made and its tensor is ready. Each H2D copy starts with the backward of the
# layer whose hook calls ``start_reload_layer``.
with context.record_timeline() as recorder:
    train_step()
plot_timeline(recorder.timeline()).figure.savefig("manual_synchronization_timeline.png", dpi=150)

# %%
# Conclusion
# ----------
# All three layers are on the host when forward ends, where memory has its peak. The saving is that of the default
# schedule; which layers are offloaded, and when, is now up to the program.
