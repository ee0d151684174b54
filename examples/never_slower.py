"""
One line that offloads what is free
===================================

``actoffload.offload(model)`` measures in the first passes how much can be offloaded without a longer step, and then
offloads that much. Here a Llama trains with that line: with long sequences, where a part is free, and with short ones,
where nothing is.
"""

# %%
# The training loop with one more line
# ------------------------------------
# The line is ``actoffload.offload(model)``. The first step offloads everything, so that it fits if any plan does. The
# next steps are measured with and without offloading. Then the plan is final.
#
# On a GPU the model has eight layers, as wide as those of Llama 3 8B, with random weights. Weights and AdamW are in
# float32, and autocast computes in bfloat16. That takes about 62 GiB; with less memory, lower ``num_hidden_layers``.
# Without a GPU the example runs on the CPU with a smaller model. Nothing is measured there, and all groups but the last
# two and the last of each kind are offloaded, with long and with short sequences.
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import actoffload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
config = LlamaConfig(
    hidden_size=128 if reference else 4096,
    intermediate_size=384 if reference else 14336,
    num_hidden_layers=4 if reference else 8,
    num_attention_heads=4 if reference else 32,
    num_key_value_heads=1 if reference else 8,
    vocab_size=256 if reference else 32000,
    use_cache=False,  # a cache of keys and values would keep memory that should be freed
)
shapes = {"long": (4, 512), "short": (4, 256)} if reference else {"long": (1, 16384), "short": (2, 512)}

torch.manual_seed(0)
with device:
    model = LlamaForCausalLM(config)
    tokens = torch.randint(config.vocab_size, shapes["long"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

handle = actoffload.offload(model)


def train_step():
    """Run forward, backward and optimizer; the gradients are freed after the step."""
    with torch.autocast(device.type, torch.bfloat16, enabled=not reference):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(24):
    train_step()
print(handle.report())

# %%
# All layers save the cosines and sines of the rotary embedding. On a GPU the report counts them as not freed, because
# the layers that are kept refer to them.
#
# The plan lists what is kept and what is offloaded, with the expected peak and time of a pass. A pass is one forward
# and its backward.
print(handle.plan)

# %%
# Side by side: long sequences
# ----------------------------
# What follows only measures. ``paused`` trains without offloading, and all kinds of steps are measured in turns. On a
# GPU the table also has times. They are those of whole steps, with the optimizer. Steps without offloading are measured
# twice, to show by how much times differ.
from actoffload.measure import measure_steps


def step_without():
    """Train without offloading."""
    with handle.paused():
        train_step()


while handle.settling:  # the plan takes more passes where the times of passes differ
    train_step()
steps = {"no offload": step_without, "offload(model)": train_step, "no offload, again": step_without}
measured = measure_steps(steps)
print(measured)
measured.plot().figure.savefig("never_slower.png", dpi=150)
handle.remove()

# %%
# Side by side: short sequences
# -----------------------------
# The same model and the same line. A short step may end before a copy would, and the host may need all of its time to
# queue kernels. Then nothing is offloaded, and the plan gives the reason.
tokens = torch.randint(config.vocab_size, shapes["short"], device=device)
measured = measure_steps({"no offload": train_step}, calls=5)

handle = actoffload.offload(model)
train_step()
while handle.settling:
    train_step()
measured |= measure_steps({"offload(model)": train_step}, calls=5)
print(handle.plan)

# %%
# If nothing is offloaded, no saved-tensor hook runs. The host still takes longer in one run than in another. A second
# run without offloading shows by how much step times differ.
handle.remove()
measured |= measure_steps({"no offload, again": train_step}, calls=5)
print(measured)

# %%
# ``plan.save("plan.json")`` writes a plan to a file. ``actoffload.offload(model, plan="plan.json")`` repeats it without
# measuring, as in a job that was stopped. Its peak is the same in every run.
