"""
Capture the transfers in a CUDA graph
=====================================

A CUDA graph replays a whole step with one call. With offloading, the copies are captured together with the compute,
and the memory pool of the graph is smaller by the offloaded bytes. Here a training step is captured and compared with
eager steps.
"""

# %%
# Capture a training step
# -----------------------
# Three of twelve layers are offloaded. The graph reads its input from one fixed tensor. That tensor is never offloaded,
# so the step begins with a copy of it, which can be.
#
# Steps before the capture warm the pool of pinned memory: none can be allocated during a capture, and a tensor without
# host memory would stay on the device, with a warning. They run on the stream of the capture, as PyTorch advises.
# Without CUDA there are no graphs; the example then runs the same steps eagerly.
import torch

import actoffload

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
shape = (16, 1024, 1024) if cuda else (1, 256, 1024)

torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).to(device)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
context, sync_function = actoffload.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=12)
static_input = torch.randn(shape, device=device)


def forward(x, context=context, sync_function=sync_function):
    """Run the layers in the context."""
    for layer in layers:
        with context:
            x = layer(x)
        x = sync_function(x)
    return x


def train_step(*pair):
    """Run forward, backward and optimizer on the fixed input."""
    optimizer.zero_grad(set_to_none=False)
    forward(static_input.clone(), *pair).square().mean().backward()
    optimizer.step()


def capture():
    """Return a function that replays a captured step."""
    if not cuda:
        print("CUDA graphs need CUDA: nothing is captured on this machine.")
        train_step()
        return train_step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train_step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        train_step()
    return graph.replay


# The gradients of the same weights are computed on two streams on purpose, in a capture and in eager steps.
torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
replay = capture()
for _ in range(3):
    static_input.copy_(torch.randn(shape, device=device))
    replay()

# %%
# The report is that of the captured step. A replay does not run Python, so it counts nothing.
print(context.report())

# %%
# The same bits
# -------------
# Ten replays with fresh inputs give the same weights as ten eager steps without offloading.
import copy

nothing = actoffload.get_cpu_offload_context(enabled=False)
start = copy.deepcopy(layers.state_dict())


def weights_after_training(step):
    """Return the weights after ten steps, from the same start and with the same inputs every time."""
    layers.load_state_dict(start)
    torch.manual_seed(1)
    for _ in range(10):
        static_input.copy_(torch.randn(shape, device=device))
        step()
    return [weight.detach().clone() for weight in layers.parameters()]


expected = weights_after_training(lambda: train_step(*nothing))
print("Weights are bit-identical:", all(map(torch.equal, expected, weights_after_training(replay))))

# %%
# Side by side
# ------------
# ``compare_steps`` measures eager steps without and with offloading. A graph has the same copies, and keeps the peak of
# its capture as long as it lives.
from actoffload.measure import compare_steps, trace_memory
from actoffload.report.plots import plot_trace

print(compare_steps(lambda: train_step(*nothing), train_step, context))

# %%
# Memory cannot be read inside a graph, so this is the memory of the eager step.
traces = {
    "no offload": trace_memory(lambda: train_step(*nothing), layers),
    "offload": trace_memory(train_step, layers),
}
plot_trace(traces).figure.savefig("cuda_graphs_memory.png", dpi=150)

# %%
# A graph keeps its host memory. ``close`` frees it; the graphs must not be replayed afterwards. For
# ``torch.cuda.make_graphed_callables`` see :doc:`the guide </guide/cuda_graphs>`.
context.close()
