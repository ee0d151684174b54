"""
Capture the transfers in a CUDA graph
=====================================

A CUDA graph replays a whole step with one call, which saves the time in which the host launches kernels. The copies of
offloading are captured with the compute, and the memory pool of the graph is smaller by the offloaded bytes.
"""

# %%
# Capture a training step
# -----------------------
# Three of twelve layers, those of :ref:`sphx_glr_gallery_basic.py`, are offloaded. The graph reads its input from one
# fixed tensor, which is never offloaded. So the step begins with a copy of it.
#
# Steps before the capture allocate pinned memory, which a capture cannot. They run on the stream of the capture, as
# PyTorch advises. Without CUDA the example runs the same steps eagerly.
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
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
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


# The example computes gradients of the same weights on two streams, in the capture and in eager steps: no warning.
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
# Does it help? Eager steps, without and with offloading. A graph has the same copies, and keeps the peak of its capture
# as long as it lives.
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
# Conclusion
# ----------
# Offloading needs no change for a capture but a few steps before it. A graph keeps its host memory: ``close`` frees it,
# and the graph must not be replayed afterwards.
context.close()
