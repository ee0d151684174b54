"""
One line for a Hugging Face Llama
=================================

``actoffload.offload`` finds the layers of a Hugging Face model, whose code stays as it is. Here the number of offloaded
layers is chosen by hand, and the example measures what each number saves. Without a number, ``offload`` offloads what
does not fit: :doc:`/guide/whole_model`.
"""

# %%
# An unmodified model
# -------------------
# Eight layers as wide as those of Llama 3 8B, with random weights; without a GPU a smaller model runs on the CPU. The
# handle shows which layers are offloaded, and the report what each layer saved, and why tensors were kept.
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import actoffload

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
config = LlamaConfig(
    hidden_size=128 if reference else 4096,
    intermediate_size=448 if reference else 14336,
    num_hidden_layers=4 if reference else 8,
    num_attention_heads=4 if reference else 32,
    num_key_value_heads=1 if reference else 8,
    vocab_size=256 if reference else 32000,
    use_cache=False,  # a cache of keys and values would keep memory that should be freed
)
torch.manual_seed(0)
with device:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if reference else torch.bfloat16)
    tokens = torch.randint(config.vocab_size, (8, 256) if reference else (1, 2048))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

handle = actoffload.offload(model, num_layers=config.num_hidden_layers - 2)
print(handle)


def train_step(tokens=tokens):
    """Run forward, backward and optimizer; the gradients keep their memory between steps."""
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: peaks differ by activations only
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()


for _ in range(3):
    train_step()
print(handle.report())

# %%
# The same bits
# -------------
# Two steps give the same weights with and without offloading. Fast attention kernels add in any order, so this
# comparison uses the first 512 tokens and a deterministic kernel.
import copy

from torch.nn.attention import SDPBackend, sdpa_kernel

start = copy.deepcopy(model.state_dict())


def weights_after_training():
    """Return the weights after two steps from the same start."""
    model.load_state_dict(start)
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(2):
            train_step(tokens[:, :512])
    return [weight.detach().clone() for weight in model.parameters()]


with handle.paused():
    without = weights_after_training()
print("Weights are bit-identical:", all(map(torch.equal, without, weights_after_training())))
start.clear()  # frees the copy of the weights
without.clear()

# %%
# Side by side
# ------------
# What does each layer save, and what does it cost? Peak memory and step time by the number of offloaded layers.
from actoffload.measure import measure_steps

handle.remove()
measured = measure_steps({"0 layers": train_step}, repeats=3)
for number in range(2, config.num_hidden_layers - 1, 2):
    with actoffload.offload(model, num_layers=number):
        measured |= measure_steps({f"{number} layers": train_step}, repeats=3)
print(measured)
measured.plot().figure.savefig("hugging_face_llama_layers.png", dpi=150)

# %%
# Where the copies go
# -------------------
# A recorded step has a timeline. Each layer is offloaded as soon as its tensors are saved, and reloaded while later
# layers run backward. Hatched intervals are stalls.
with actoffload.offload(model, num_layers=config.num_hidden_layers - 2) as handle:
    train_step()
    with handle.recording():
        train_step()
handle.timeline().plot().figure.savefig("hugging_face_llama_timeline.png", dpi=150)

# %%
# Conclusion
# ----------
# Every offloaded layer lowers the peak by the same amount. With 2048 tokens a layer computes for a shorter time than
# its copies take, so each costs time: longer sequences offload more for free, and ``offload(model)`` without a number
# recomputes where that is faster.
