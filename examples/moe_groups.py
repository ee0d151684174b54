"""
Mixture of experts, group by group
==================================

Where dense blocks and mixtures of experts alternate, parts of a block save different numbers of bytes. Here attention,
dense MLPs and mixtures are separate groups, and the example measures what each kind saves. Routing is that of
:ref:`sphx_glr_gallery_moe_routing.py`.
"""

# %%
# Dense and sparse blocks
# -----------------------
# Eight blocks; every other one has a mixture instead of the dense MLP. Without a GPU the model is smaller.
import torch
import torch.nn.functional as F

import actoffload
from actoffload.moe import GroupedMLP, indices_to_multihot

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
width, shape, dtype = (128, (8, 256), torch.float32) if reference else (4096, (2, 1024), torch.bfloat16)
experts, topk, vocabulary = 8, 2, 1024
# GroupedMLP reads the number of tokens of each expert on the device where a kernel can.
counts_stay = reference or (device.type == "cuda" and torch.cuda.get_device_capability()[0] in (9, 10))


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


class Mixture(torch.nn.Module):
    """Two of eight experts for each token, behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.router = torch.nn.Linear(width, experts, bias=False)
        self.experts = GroupedMLP(experts, width, width)

    def forward(self, x):
        """Return the weighted sum of the experts."""
        hidden = self.norm(x).flatten(0, 1)
        probs, indices = self.router(hidden).softmax(dim=-1).topk(topk)
        counts = indices_to_multihot(indices, probs, experts)[0].sum(dim=0)
        order = indices.flatten().argsort(stable=True)
        tokens = order // topk
        y = self.experts(hidden[tokens], counts if counts_stay else counts.tolist())
        y = y * probs.flatten()[order].unsqueeze(1)
        return torch.zeros_like(hidden).index_add(0, tokens, y).view_as(x)


def dense_mlp():
    """Return one MLP for all tokens, behind a norm."""
    up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
    return torch.nn.Sequential(torch.nn.LayerNorm(width), up, torch.nn.GELU(), down)


class Block(torch.nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, mlp):
        super().__init__()
        self.attention, self.mlp = Attention(), mlp

    def forward(self, x):
        """Run both."""
        x = x + self.attention(x)
        return x + self.mlp(x)


torch.manual_seed(0)
with device:
    blocks = [Block(Mixture() if k % 2 else dense_mlp()) for k in range(8)]
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), *blocks).to(dtype)
    tokens = torch.randint(vocabulary, shape)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %%
# Three kinds of groups
# ---------------------
# Two patterns select the parts of all blocks. The MLPs are of two classes, so they are two kinds, and ``num_layers``
# counts by kind. The last group of each kind is kept, because backward begins there. ``keep`` excludes the routers. The
# mixtures save the most, because every token occurs once for each of its two experts.
handle = actoffload.offload(model, layers=["*.attention", "*.mlp"], num_layers=7, keep="*.router")
print(handle)


def train_step():
    """Run forward, backward and optimizer; the gradients keep their memory between steps."""
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
    model(tokens).float().square().mean().backward()
    optimizer.step()


for _ in range(3):
    train_step()
print(handle.report())
handle.remove()

# %%
# Side by side
# ------------
# What does each kind save, and what does it cost? Each kind alone, and all of them together.
from actoffload.measure import measure_steps

measured = measure_steps({"keep everything": train_step}, repeats=3)
choices = {
    "attention": {"layers": "*.attention", "num_layers": 7},
    "dense MLPs": {"layers": "[1357].mlp", "num_layers": 3},
    "mixtures": {"layers": Mixture, "num_layers": 3},
    "all": {"layers": ["*.attention", "*.mlp"], "num_layers": 7},
}
for name, choice in choices.items():
    with actoffload.offload(model, keep="*.router", **choice):
        measured |= measure_steps({name: train_step}, repeats=3)
print(measured)

# %%
# ``num_layers`` offloads whether or not that is free, and this model computes too little for its copies. So on a GPU
# each kind makes the step longer.
measured.plot().figure.savefig("moe_groups.png", dpi=150)

# %%
# Conclusion
# ----------
# Divide time by drop for each kind, and offload the kinds with the smallest ratio. ``offload(model)`` without
# ``num_layers`` makes that choice by measured costs, and recomputes where that is faster.
