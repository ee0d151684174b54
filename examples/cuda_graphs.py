"""
Capture the transfers in a CUDA graph
=====================================

A CUDA graph replays a whole step with one call. With offloading, the copies are captured together with the compute,
and the memory pool of the graph is smaller by the offloaded bytes. This example captures a training step, then the
forward and backward of a module with ``torch.cuda.make_graphed_callables``, and compares both with eager steps.
"""

# %%
# Twelve layers, three of which are offloaded
# -------------------------------------------
# The graph reads its input from one fixed tensor. That tensor is never offloaded, so the step begins with a copy of it,
# which can be.
import copy

import torch

import actoffload
from actoffload.measure import compare_captures, compare_steps, describe_device, trace_memory
from actoffload.report.plots import plot_timeline, plot_trace

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
shape = (16, 1024, 1024) if cuda else (1, 256, 1024)
print(f"Runs on {describe_device()}.")

torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).to(device)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
offloading = actoffload.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=12)
nothing = actoffload.get_cpu_offload_context(enabled=False)
static_input = torch.randn(shape, device=device)


def forward(x, context, sync_function):
    """Run the layers in the context."""
    for layer in layers:
        with context:
            x = layer(x)
        x = sync_function(x)
    return x


def train_step(pair):
    """Run forward, backward and optimizer on the fixed input."""
    optimizer.zero_grad(set_to_none=False)
    forward(static_input.clone(), *pair).square().mean().backward()
    optimizer.step()


# %%
# Capturing a training step
# -------------------------
# Steps before the capture warm the pool of pinned memory: none can be allocated during a capture, and a tensor without
# host memory would stay on the device, with a warning. They run on the stream of the capture, as PyTorch advises.
# Without CUDA there are no graphs; the example then runs the same steps eagerly.


def capture(pair):
    """Return a function that replays a captured step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train_step(pair)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        train_step(pair)
    return graph.replay


graphed = torch.cuda.make_graphed_callables
if not cuda:
    print("CUDA graphs need CUDA: nothing is captured on this machine.")
    capture, graphed = lambda pair: lambda: train_step(pair), lambda module, sample: module
    compare_captures = compare_steps

# The gradients of the same weights are computed on two streams on purpose, in a capture and in eager steps.
torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
replay = capture(offloading)

# %%
# A replay is an eager step, bit for bit
# --------------------------------------
# Ten replays with fresh inputs give the same weights as ten eager steps without offloading.
start = copy.deepcopy(layers.state_dict())


def weights_after_training(step):
    """Return the weights after ten steps, from the same start and with the same inputs every time."""
    layers.load_state_dict(start)
    torch.manual_seed(1)
    for _ in range(10):
        static_input.copy_(torch.randn(shape, device=device))
        step()
    return [weight.detach().clone() for weight in layers.parameters()]


expected = weights_after_training(lambda: train_step(nothing))
print("Weights are bit-identical:", all(map(torch.equal, expected, weights_after_training(replay))))

# %%
# Peak memory of a graph
# ----------------------
# ``compare_captures`` captures the step without and with offloading. The peaks are those of the captures: a graph keeps
# this memory as long as it lives. The times are those of replays, whose copies overlap compute as in an eager step.
context = offloading[0]
print(compare_captures(lambda: train_step(nothing), lambda: train_step(offloading), context))

# %%
# The report is that of the captured step. A replay does not run Python, so it counts nothing.
print(context.report())

# %%
# A graph has the memory and the copies of the eager step. These are the memory and the timeline of the eager step,
# because times inside a graph cannot be read.
traces = {
    "no offload": trace_memory(lambda: train_step(nothing), layers),
    "offload": trace_memory(lambda: train_step(offloading), layers),
}
plot_trace(traces).figure.savefig("cuda_graphs_memory.png", dpi=150)

# %%
with context.record_timeline() as recorder:
    train_step(offloading)
plot_timeline(recorder.timeline()).figure.savefig("cuda_graphs_timeline.png", dpi=150)

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
        return forward(x.clone(), *offloading)


model = graphed(Model(), (torch.randn(shape, device=device),))


def graphed_step():
    """Run the graphed model, and an eager loss and optimizer."""
    optimizer.zero_grad(set_to_none=False)
    model(static_input).square().mean().backward()
    optimizer.step()


print("Weights are bit-identical:", all(map(torch.equal, expected, weights_after_training(graphed_step))))

# %%
# A graph keeps its host memory. ``close`` frees it; the graphs must not be replayed afterwards.
context.close()
