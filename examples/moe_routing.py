"""
Mixture of experts without synchronization
==========================================

Routing of tokens to experts usually makes the host wait for the device in every layer, so compute and copies start
late. Here a mixture of experts trains and offloads without synchronization, and ``find_synchronizations`` names the
lines of a program that wait.
"""

# %%
# Routing that waits
# ------------------
# The usual way to sort tokens by expert waits once for each expert, to read the number of its tokens. Without a GPU
# nothing waits.
import torch
from matplotlib import pyplot

import actoffload
from actoffload.moe import GroupedMLP, indices_to_multihot

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (4096, (2, 1024), torch.bfloat16)
experts, topk = 8, 2


def lines_that_wait(function):
    """Call a function; return the lines at which the host waited."""
    if device.type != "cuda":
        function()
        return "find_synchronizations needs CUDA."
    with actoffload.find_synchronizations() as found:
        function()
    return found


indices = torch.randint(experts, (64, topk), device=device)
print(lines_that_wait(lambda: [(indices == expert).nonzero() for expert in range(experts)]))

# %%
# Routing that does not wait
# --------------------------
# ``indices_to_multihot`` returns tensors of shape (tokens, experts), which the host knows. The sum over the tokens is
# the number of tokens of each expert. It stays on the device, where ``GroupedMLP`` reads it if a kernel can.
counts_stay = reference or (device.type == "cuda" and torch.cuda.get_device_capability()[0] in (9, 10))


class Mixture(torch.nn.Module):
    """Two of eight experts for each token, behind a norm, with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.router = torch.nn.Linear(width, experts, bias=False)
        self.experts = GroupedMLP(experts, width, width)
        self.counts = None

    def forward(self, x):
        """Return the input and the weighted sum of the experts."""
        hidden = self.norm(x).flatten(0, 1)
        probs, indices = self.router(hidden).softmax(dim=-1).topk(topk)
        routing_map, _ = indices_to_multihot(indices, probs, experts)
        self.counts = routing_map.sum(dim=0)
        order = indices.flatten().argsort(stable=True)
        tokens = order // topk
        y = self.experts(hidden[tokens], self.counts if counts_stay else self.counts.tolist())
        y = y * probs.flatten()[order].unsqueeze(1)
        return x + torch.zeros_like(hidden).index_add(0, tokens, y).view_as(x)


torch.manual_seed(0)
with device:
    model = torch.nn.Sequential(torch.nn.Embedding(1024, width), *[Mixture() for _ in range(6)]).to(dtype)
    tokens = torch.randint(1024, shape)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
handle = actoffload.offload(model, num_layers=4)


def train_step():
    """Run forward, backward and optimizer; the gradients keep their memory between steps."""
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
    model(tokens).float().square().mean().backward()
    optimizer.step()


# %%
# A whole step has no synchronization if the counts stay on the device.
for _ in range(3):
    train_step()
print(lines_that_wait(train_step))

# %%
# The report of a recorded step. A GPU computes these mixtures faster than the link copies their saved tensors, so the
# report has stalls, and advises fewer groups.
with handle.recording():
    train_step()
print(handle.report())

# %%
# Side by side
# ------------
# Does it help? Peak memory and step time, without and with offloading. ``num_layers=4`` offloads although copies are
# slower than compute; ``actoffload.offload(model)`` offloads only what does not fit.
from actoffload.measure import compare_steps


def step_without():
    """Train without offloading."""
    with handle.paused():
        train_step()


print(compare_steps(step_without, train_step, handle))

# %%
# Tokens of each expert
# ---------------------
# The number of tokens of each expert changes from step to step. No size of a tensor depends on it, so the offloaded
# bytes are always the same.
figure, ax = pyplot.subplots(figsize=(5.4, 3.2), layout="constrained")
for number, mixture in enumerate(model[1:], start=1):
    ax.plot(range(experts), mixture.counts.tolist(), "o-", label=f"layer {number}")
ax.axhline(shape[0] * shape[1] * topk / experts, color="#808080", linestyle=":", label="evenly")
ax.set_xlabel("expert")
ax.set_ylabel("tokens")
ax.set_ylim(bottom=0)
ax.legend(frameon=False, ncols=4, loc="lower center")
ax.spines[["top", "right"]].set_visible(False)
figure.savefig("moe_routing.png", dpi=150)
handle.remove()

# %%
# Conclusion
# ----------
# No line of the step waits where the counts stay on the device, so copies are queued in time. Use
# ``find_synchronizations`` on your own step, and replace the lines that it names.
