"""
Capture the transfers in a CUDA graph
=====================================

A CUDA graph replays a whole step with one call. With offloading, the copies are captured together with the compute,
and the memory pool of the graph is smaller by the offloaded bytes. This example captures a whole step, then the forward
and backward of a module with ``torch.cuda.make_graphed_callables``, and compares replays with eager steps bit by bit.
"""

# %%
# Twelve layers, three of which are offloaded
# -------------------------------------------
# The other cells need CUDA: elsewhere they do nothing.
from statistics import median

import torch
from matplotlib import pyplot

import actoffload
from actoffload.measure import Comparison, MemoryMeter, describe_device, measure_step_times
from actoffload.report.plots import plot_memory, plot_timeline

graphs = torch.cuda.is_available()
print(f"Runs on {describe_device()}." if graphs else "CUDA graphs need CUDA: nothing is captured on this machine.")

device = torch.device("cuda" if graphs else "cpu")
shape = (16, 1024, 1024)
# The gradients of the same weights are computed on two streams on purpose, in a capture and in eager steps.
torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).to(device)


def forward(x, pair, look=None):
    """Run the layers in the context; `look` is called between them, in both directions."""
    context, sync_function = pair
    for layer in layers:
        with context:
            x = layer(x)
        x = sync_function(x)
        if look is not None:
            look()
            x.register_hook(look)
    return x


# %%
# Capturing a whole step
# ----------------------
# The graph reads its input from one fixed tensor. That tensor is never offloaded, so the step begins with a copy of it,
# which can be. A step before the capture warms the pool of pinned memory: none can be allocated during a capture, and a
# tensor without host memory would stay on the device, with a warning.


def train_step(x, pair, look=None):
    """Run a step that leaves its gradients in the same tensors every time."""
    layers.zero_grad(set_to_none=False)
    forward(x.clone(), pair, look).square().mean().backward()


def gradients():
    return [parameter.grad.clone() for parameter in layers.parameters()]


def capture(static_input, pair):
    """Return a graph of a step, and the memory in use during its capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            train_step(static_input, pair)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with MemoryMeter() as meter, torch.cuda.graph(graph):
        train_step(static_input, pair, meter.sample)
    return graph, meter


if graphs:
    offloading = actoffload.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=12)
    nothing = actoffload.get_cpu_offload_context(enabled=False)
    static_input = torch.randn(shape, device=device)
    capture(static_input, nothing)  # the first capture allocates workspaces that the others share
    plain_graph, plain_memory = capture(static_input, nothing)
    graph, memory = capture(static_input, offloading)

# %%
# Replays are eager steps, bit for bit
# ------------------------------------
# Ten fresh inputs are copied into the fixed tensor; each replay is compared with an eager step without offloading.
if graphs:
    same = 0
    for _ in range(10):
        static_input.copy_(torch.randn(shape, device=device))
        graph.replay()
        replayed = gradients()
        train_step(static_input, nothing)
        same += all(map(torch.equal, replayed, gradients()))
    print(f"{same} of 10 replays give the gradients of the eager step, bit for bit.")

# %%
# Peak memory of a graph
# ----------------------
# The peaks are those of the two captures: a graph keeps its memory as long as it lives.
if graphs:
    times = measure_step_times({"without": plain_graph.replay, "with": graph.replay}, steps=5)
    context = offloading[0]
    context.reset_statistics()
    train_step(static_input, offloading)
    offloaded = context.statistics().bytes_offloaded
    result = Comparison(
        device=describe_device(),
        peak_without=plain_memory.peak_bytes,
        peak_with=memory.peak_bytes,
        bytes_offloaded=offloaded,
        seconds_without=median(times["without"]),
        seconds_with=median(times["with"]),
    )
    print(result)

# %%
# Memory over the step, sampled at the boundary of every layer during the capture; the time is that of the host.
if graphs:
    plot_memory({"without": plain_memory.samples, "with offload": memory.samples})
    pyplot.show()

# %%
# The graph contains the copies of the eager step. This is the timeline of the eager step: times inside a graph cannot
# be read.
if graphs:
    with context.record_timeline() as recorder:
        train_step(static_input, offloading)
    plot_timeline(recorder.timeline())
    pyplot.show()

# %%
# Graphed callables
# -----------------
# ``make_graphed_callables`` captures the forward and the backward of a module in two graphs, so that loss and optimizer
# stay eager. The contexts are inside the forward of the module: what one graph offloads, the other reloads.


class Model(torch.nn.Module):
    """The layers with their contexts, as one module."""

    def __init__(self):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        """Run the layers on a copy of the input, which can be offloaded."""
        return forward(x.clone(), offloading)


if graphs:
    model = torch.cuda.make_graphed_callables(Model(), (torch.randn(shape, device=device),))
    same = 0
    for _ in range(10):
        x = torch.randn(shape, device=device)
        train_step(x, nothing)
        expected = gradients()
        layers.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        same += all(map(torch.equal, expected, gradients()))
    print(f"{same} of 10 steps with graphed callables give the gradients of the eager step, bit for bit.")

# %%
# A graph keeps its host memory. ``close`` frees it when the graphs are no longer replayed.
if graphs:
    del graph, model
    context.close()
