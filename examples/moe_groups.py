"""
Mixture of experts, group by group
==================================

Where dense blocks and mixtures of experts alternate, a whole block is a coarse unit: its parts save different numbers
of bytes and compute for different times. Here attention, dense MLPs and mixtures are separate groups. The example
measures how much memory each kind of group saves and how much time it costs.
"""

# %%
# Routing without synchronization
# -------------------------------
# The host queues both compute and copies, so both start late if it waits for the device in every layer. The usual way
# to sort tokens by expert waits once for each expert, to read the number of its tokens:
import copy
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from matplotlib import pyplot

import actoffload
from actoffload.measure import describe_device, measure_peak, measure_step_times
from actoffload.moe import GroupedMLP, indices_to_multihot

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (4096, (2, 1024), torch.bfloat16)
experts, topk, vocabulary = 8, 2, 1024

indices = torch.randint(experts, (64, topk), device=device)
if device.type == "cuda":
    with actoffload.find_synchronizations() as found:
        chosen = [(indices == expert).nonzero() for expert in range(experts)]
    print(found)

# %%
# ``indices_to_multihot`` returns tensors of shape (tokens, experts), which the host knows. The sum of the first over
# the tokens is the number of tokens of each expert. It stays on the device; ``GroupedMLP`` reads it there where a
# kernel can.
counts_stay = reference or (device.type == "cuda" and torch.cuda.get_device_capability()[0] in (9, 10))


class Mixture(torch.nn.Module):
    """Two of eight experts for each token, behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.router = torch.nn.Linear(width, experts, bias=False)
        self.experts = GroupedMLP(experts, width, width)

    def forward(self, x):
        """Return the weighted sum of the experts, and how unevenly they are used."""
        x = self.norm(x).flatten(0, 1)
        probs, indices = self.router(x).softmax(dim=-1).topk(topk)
        routing_map, probabilities = indices_to_multihot(indices, probs, experts)
        counts = routing_map.sum(dim=0)
        unevenness = (counts * probabilities.mean(dim=0)).sum() / len(x)
        order = indices.flatten().argsort(stable=True)
        tokens = order // topk
        y = self.experts(x[tokens], counts if counts_stay else counts.tolist())
        y = y * probs.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, tokens, y).view(*shape, width), unevenness


# %%
# Dense and sparse blocks
# -----------------------
# Eight blocks; every other one has a mixture instead of the dense MLP.


class Attention(torch.nn.Module):
    """Causal self-attention behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        """Attend."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


class DenseMLP(torch.nn.Sequential):
    """One MLP for all tokens, behind a norm."""

    def __init__(self):
        up = torch.nn.Linear(width, 4 * width)
        down = torch.nn.Linear(4 * width, width)
        super().__init__(torch.nn.LayerNorm(width), up, torch.nn.GELU(), down)


class Block(torch.nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, mlp):
        super().__init__()
        self.attention, self.mlp = Attention(), mlp

    def forward(self, x):
        """Return the block's output, and how unevenly its experts are used."""
        x = x + self.attention(x)
        y = self.mlp(x)
        y, unevenness = y if isinstance(y, tuple) else (y, 0.0)
        return x + y, unevenness


class Model(torch.nn.Module):
    """An embedding and the blocks."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList([Block(Mixture() if k % 2 else DenseMLP()) for k in range(8)])

    def forward(self, tokens):
        """Return the loss of a step."""
        x, loss = self.embedding(tokens), 0.0
        for block in self.blocks:
            x, unevenness = block(x)
            loss = loss + 0.01 * unevenness
        return loss + x.square().mean()


torch.manual_seed(0)
with device:
    model = Model().to(dtype)
    tokens = torch.randint(vocabulary, shape)


def step(model):
    """Run one forward and backward; the gradients keep their memory between steps."""
    model.zero_grad(set_to_none=False)
    model(tokens).backward()


# %%
# A whole step has no synchronization if the counts stay on the device.
step(model)
if device.type == "cuda":
    with actoffload.find_synchronizations() as found:
        step(model)
    print(found)

# %%
# Three kinds of groups
# ---------------------
# Two patterns select the parts of all blocks. The MLPs are of two classes, so they are two kinds. ``num_layers``
# holds for each kind. The last group of each kind is kept, because backward begins there. ``keep`` excludes the
# routers, which save little.
everything = ["*.attention", "*.mlp"]
handle = actoffload.offload(model, layers=everything, num_layers=7, keep="*.router")
print(handle)

# %%
# The report of a recorded step, part by part. The mixtures save the most: every token occurs once for each of its two
# experts.
step(model)
with handle.recording():
    step(model)
handle.report()

# %%
# Memory and time of each kind
# ----------------------------
# Now each kind is offloaded alone, in copies of the model that share its weights, and then all of them together. The
# last choice keeps one tensor of each mixture on the device, the input of the activation: the largest saved tensor.
handle.remove()


def copy_with(layers, num_layers):
    """Return new modules with the same weights, and a handle for them."""
    other = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    return other, actoffload.offload(other, layers=layers, num_layers=num_layers, keep="*.router")


def step_keeping(model, kept):
    """Run a step in which the experts keep the input of their activation on the device, or not."""
    for module in model.modules():
        if isinstance(module, GroupedMLP):
            module.keep_activation_input = kept
    step(model)


choices = {"attention": (Attention, 7), "dense MLPs": (DenseMLP, 3), "mixtures": (Mixture, 3), "all": (everything, 7)}
copies = {name: copy_with(*choice) for name, choice in choices.items()}
arms = {"nothing": partial(step, model)}
arms |= {name: partial(step_keeping, other, False) for name, (other, _) in copies.items()}
arms["all but one tensor"] = partial(step_keeping, copies["all"][0], True)

peaks = {name: measure_peak(arm, warmup=1) for name, arm in arms.items()}
times = measure_step_times(arms, repeats=1 if reference else 3, warmup=0)
drops = {name: (peaks["nothing"] - peak) / 2**20 for name, peak in peaks.items()}
milliseconds = {name: median(samples) * 1e3 for name, samples in times.items()}
for name in arms:
    print(f"{name:<20}{drops[name]:>10.1f} MiB saved{milliseconds[name]:>12.2f} ms")

figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=(7.5, 2.8), layout="constrained")
axes[0].barh(list(drops), list(drops.values()), color="#2b8cc4")
axes[0].set_xlabel("drop of peak memory (MiB)")
axes[1].barh(list(milliseconds), list(milliseconds.values()), color="#e69f00")
axes[1].set_xlabel("step time (ms)")
axes[0].invert_yaxis()
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
pyplot.show()

# %%
# Each kind alone lowers the peak by a part, and its copies have the whole step. Together they share the link: if a step
# takes longer with all of them, leave out the kinds that save little for their time.
for _, handle in copies.values():
    handle.remove()
