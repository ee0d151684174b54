"""
One line for a Hugging Face Llama
=================================

A model from Hugging Face has no place where a context could go around its layers, and its code should stay as it is.
``actoffload.offload`` finds the layers by itself and follows the model with hooks. Here a Llama with random weights
trains with that one line; what it saved, what it cost and how many layers are worth it is measured.
"""

# %%
# An unmodified model
# -------------------
# On a GPU the layers are as wide as those of Llama 3 8B, and there are eight of them. On the CPU, which plays the
# device where there is no GPU, everything is smaller. The weights are random; nothing is downloaded.
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
    use_cache=False,  # of keys and values, for generating text: it would hold what should leave
)
torch.manual_seed(0)
with device:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if reference else torch.bfloat16)
    tokens = torch.randint(config.vocab_size, (8, 256) if reference else (1, 2048))

# %%
# The line
# --------
# The handle says what was found and what will happen, before the first step.
handle = actoffload.offload(model)
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
# The gradients are the same bits. Fast attention kernels add in an order that differs from run to run, with and without
# offloading; so this comparison takes a piece of the text and the kernel that always gives the same result.


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
# Both steps are measured in turns. R is the drop of the peak over the bytes that were offloaded: how much of them was
# gone when memory was scarcest.
repeats, steps = (1, 1) if reference else (3, 2)
print(compare_steps(plain_step, step, handle, repeats=repeats, steps=steps))

# %%
# What each layer did
# -------------------
# The report is about the last step. If that was recorded, it knows times and stalls as well, and simulates what another
# number of layers would do.
with handle.recording():
    step()
handle.report()

# %%
# Where the copies go
# -------------------
# The recorded step. Each layer is copied out from the moment at which its tensors are saved, and comes back while the
# layers behind it run backward. Hatched stretches are stalls: there compute waits for the link.
handle.timeline().plot()
pyplot.show()

# %%
# How many layers
# ---------------
# Memory falls by the same amount with every layer that leaves. Time is another matter: on a GPU copies run beside
# compute and cost hardly anything as long as they fit there; what does not fit is waited for. The reference device
# copies with the CPU that also computes, so its times say little. ``reschedule`` changes the number from one step to
# the next.
counts = range(len(handle.plan.offloaded) + 1)


def step_with(count):
    """Run a step in which so many layers leave."""
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
    ax.set_xlabel("layers that leave")
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
pyplot.show()

# %%
# ``remove`` takes the hooks off the model, which is as it was, and gives the host memory back.
handle.remove()
