"""
One line for a Hugging Face Llama
=================================

The layers of a Hugging Face model are called inside its own code, which should stay as it is. ``actoffload.offload``
finds the layers and follows the forward of the model. Here a Llama with random weights trains with that one line. The
number of offloaded layers is given by hand, and the example measures peak memory and step time for each number. Without
a number it is found by measurement; see :ref:`sphx_glr_gallery_never_slower.py`.
"""

# %%
# An unmodified model
# -------------------
# On a GPU there are eight layers as wide as those of Llama 3 8B. Without a GPU the example runs on the CPU, with a
# smaller model. The weights are random; nothing is downloaded.
from functools import partial
from statistics import median

import torch
from matplotlib import pyplot
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

import actoffload
from actoffload.measure import compare_steps, describe_device, measure_peak, measure_step_times

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")

config = LlamaConfig(
    hidden_size=128 if reference else 4096,
    intermediate_size=448 if reference else 14336,
    num_hidden_layers=6 if reference else 8,
    num_attention_heads=4 if reference else 32,
    num_key_value_heads=1 if reference else 8,
    vocab_size=1024 if reference else 32000,
    use_cache=False,  # a cache of keys and values would keep memory that should be freed
)
torch.manual_seed(0)
with device:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if reference else torch.bfloat16)
    tokens = torch.randint(config.vocab_size, (8, 256) if reference else (1, 2048))

# %%
# One line
# --------
# All layers but the last two are offloaded. The handle shows which they are, before the first step.
handle = actoffload.offload(model, num_layers=config.num_hidden_layers - 2)
print(handle)


def step(tokens=tokens):
    """Run one forward and backward; the gradients keep their memory between steps."""
    model.zero_grad(set_to_none=False)
    model(tokens, labels=tokens).loss.backward()


def plain_step(tokens=tokens):
    """Run the same without offloading."""
    with handle.paused():
        step(tokens)


# %%
# The gradients are bit-identical. Fast attention kernels add in an order that differs from run to run, with and without
# offloading. So this comparison uses a part of the text and a deterministic kernel.


def gradients(run):
    """Return the gradients of one step."""
    with sdpa_kernel(SDPBackend.MATH):
        run(tokens[:, :512])
    return [parameter.grad.clone() for parameter in model.parameters()]


same = all(map(torch.equal, gradients(plain_step), gradients(step)))
print("Gradients are bit-identical:", same)

# %%
# What it saves and what it costs
# -------------------------------
# Both steps are measured in turns. R is the drop of the peak over the offloaded bytes: the fraction of them that was
# not on the device at the peak.
repeats, steps = (1, 1) if reference else (3, 2)
print(compare_steps(plain_step, step, handle, repeats=repeats, steps=steps))

# %%
# Report for each layer
# ---------------------
# The report describes the last step. If that was recorded, it contains times and stalls, and simulates other numbers of
# offloaded layers.
with handle.recording():
    step()
handle.report()

# %%
# Where the copies go
# -------------------
# The recorded step. Each layer is offloaded from the moment at which its tensors are saved, and reloaded while later
# layers run backward. Hatched intervals are stalls: compute waits for a transfer.
handle.timeline().plot()
pyplot.show()

# %%
# How many layers
# ---------------
# Every offloaded layer lowers the peak by the same amount. On a GPU the copies overlap compute: they cost hardly any
# time as long as they take no longer than compute. Compute waits for the rest. The reference device copies with the CPU
# that also computes, so its times say little. ``reschedule`` changes the number between steps.
counts = range(len(handle.plan.offloaded) + 1)


def step_with(count):
    """Run a step with a number of layers offloaded."""
    handle.reschedule(num_layers=count)
    step()


arms = {count: partial(step_with, count) for count in counts}
peaks = [measure_peak(arm, warmup=1) for arm in arms.values()]
times = measure_step_times(arms, repeats=repeats, warmup=0)

figure, (memory, time) = pyplot.subplots(1, 2, figsize=(7.5, 2.6), layout="constrained")
memory.plot(counts, [peak / 2**30 for peak in peaks], "o-", color="#2b8cc4")
memory.set_ylabel("peak memory (GiB)")
time.plot(counts, [median(times[count]) * 1e3 for count in counts], "o-", color="#d55e00")
time.set_ylabel("step time (ms)")
for ax in (memory, time):
    ax.set_xlabel("layers offloaded")
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
pyplot.show()

# %%
# ``remove`` restores the model and frees the host memory.
handle.remove()
