"""
Capture the transfers in a CUDA graph
=====================================

A CUDA graph replays a whole step with one call. With offloading inside, the copies to the host and back are captured
along with the compute, and the graph's own memory pool shrinks by what leaves. This example captures a whole step, then
the forward and backward of a module with ``torch.cuda.make_graphed_callables``, and compares replays with eager steps
bit by bit.
"""

# %%
# Twelve layers, three of which leave
# -----------------------------------
# Graphs belong to CUDA: elsewhere the script stops after this cell.
from statistics import median

import torch
from matplotlib import pyplot

import actoffload
from actoffload.measure import Comparison, MemoryMeter, describe_device, measure_step_times
from actoffload.report.plots import plot_memory, plot_timeline

graphs = torch.cuda.is_available()
print(f"Runs on {describe_device()}." if graphs else "CUDA graphs need CUDA: nothing to capture on this machine.")

device = torch.device("cuda" if graphs else "cpu")
shape = (16, 1024, 1024)
# Here the gradients of the same weights are made on two streams, in a capture and in eager steps; that is meant.
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
# The graph reads its input from one fixed tensor. That tensor can never leave the device, so the step begins with a
# copy of it, which can. A step before the capture warms the pool of page-locked memory: during a capture none can be
# taken from the system, and a tensor without a place on the host would stay on the device, with a warning.


def train_step(x, pair, look=None):
    """Run a step that leaves its gradients in the same tensors every time."""
    layers.zero_grad(set_to_none=False)
    forward(x.clone(), pair, look).square().mean().backward()


def gradients():
    return [parameter.grad.clone() for parameter in layers.parameters()]


def capture(static_input, pair):
    """Return a graph of a step, and what the memory was during its capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            train_step(static_input, pair)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with MemoryMeter(host_clock=True) as meter, torch.cuda.graph(graph):
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
# The drop is kept
# ----------------
# The peaks are those of the two captures: what a graph needs is reserved for it as long as it lives.
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
        bytes_absent=offloaded,
        seconds_without=median(times["without"]),
        seconds_with=median(times["with"]),
    )
    print(result)

# %%
# Memory over the step, sampled at the boundary of every layer while it is captured; the time is the host's.
if graphs:
    plot_memory({"without": plain_memory.samples, "with offload": memory.samples})
    pyplot.show()

# %%
# The copies inside the graph are those of the eager step, whose timeline follows: inside a graph no times can be read.
if graphs:
    with context.record_timeline() as recorder:
        train_step(static_input, offloading)
    plot_timeline(recorder.timeline())
    pyplot.show()

# %%
# Forward and backward apart
# --------------------------
# ``make_graphed_callables`` captures the forward and the backward of a module in two graphs, so that loss and optimizer
# stay eager. The contexts are inside the module's forward; what was copied out in the one graph comes back in the
# other.


class Model(torch.nn.Module):
    """The layers with their contexts, as one module."""

    def __init__(self):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        """Run the layers on a copy of the input, which may leave."""
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
# The host memory that a graph uses is part of it. ``close`` gives it back when the graphs are no longer replayed.
if graphs:
    del graph, model
    context.close()
