"""
One line for a Hugging Face Llama
=================================

The layers of a Hugging Face model are called inside its own code, which should stay as it is. ``actoffload.offload``
finds the layers and follows the forward of the model. Here the number of offloaded layers is given by hand, and the
example measures what each number saves. Without a number, ``offload`` measures and decides: :doc:`/guide/whole_model`.
"""

# %%
# An unmodified model
# -------------------
# The handle shows which layers are offloaded, before the first step. After some steps the report lists what each layer
# saved, what was offloaded of it, and why the rest was kept.
#
# On a GPU there are eight layers as wide as those of Llama 3 8B, with random weights. Without a GPU the example runs on
# the CPU with a smaller model.
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
    optimizer.zero_grad(set_to_none=False)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()


for _ in range(3):
    train_step()
print(handle.report())

# %%
# The same bits
# -------------
# Two steps give the same weights with and without offloading. Fast attention kernels add in an order that differs from
# run to run, with and without offloading. So this comparison uses the first 512 tokens and a deterministic kernel.
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
# ``handle.remove`` ends offloading; each further call of ``offload`` here ends with its ``with`` block. Every offloaded
# layer lowers the peak by the same amount. On a GPU the table also has times: copies cost hardly any time as long as
# they take no longer than compute. Compute waits for the rest. The host takes time to queue the copies too.
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
# A recorded step has a timeline. Each layer is offloaded from the moment at which its tensors are saved, and reloaded
# while later layers run backward. Hatched intervals are stalls: compute waits for a copy.
with actoffload.offload(model, num_layers=config.num_hidden_layers - 2) as handle:
    train_step()
    with handle.recording():
        train_step()
handle.timeline().plot().figure.savefig("hugging_face_llama_timeline.png", dpi=150)
