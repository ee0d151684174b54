"""
Fine-tune a model that did not fit
==================================

LoRA trains few weights, but saves nearly as many activations as full training. Here the Trainer of Hugging Face runs
out of memory on a GPU that is limited to 10 GiB. With one callback it trains; the model stays as it is.
"""

# %%
# A Llama with LoRA
# -----------------
# Random weights, with the sizes of Llama 3.2 1B and a smaller vocabulary; nothing is downloaded. Without a GPU a
# smaller model runs on the CPU.
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import actoffload
from actoffload.integrations import OffloadCallback

reference = not torch.cuda.is_available()
device = torch.device("cpu" if reference else "cuda")
limit, steps, length = 10, 2 if reference else 24, 1024 if reference else 8192  # GiB, steps, tokens
config = LlamaConfig(
    hidden_size=256 if reference else 2048,
    intermediate_size=1024 if reference else 8192,
    num_hidden_layers=3 if reference else 16,
    num_attention_heads=4 if reference else 32,
    num_key_value_heads=1 if reference else 8,
    vocab_size=256 if reference else 32000,
)
torch.manual_seed(0)
with device:
    llama = LlamaForCausalLM._from_config(config, dtype=torch.float32 if reference else torch.bfloat16)
model = get_peft_model(llama, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(config.vocab_size, (steps, length))]


def train(callbacks):
    """Train with the Trainer."""
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=1,
        bf16=not reference,
        use_cpu=reference,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()


# %%
# Out of memory
# -------------
# ``torch.cuda.set_per_process_memory_fraction`` limits the GPU. The first step fails; on the CPU nothing is limited.
if reference:
    print("Nothing runs out of memory on the reference device.")
else:
    torch.cuda.set_per_process_memory_fraction(limit * 2**30 / torch.cuda.mem_get_info()[1])
    try:
        train([])
    except torch.OutOfMemoryError as error:
        print(str(error).split("; Of the allocated memory")[0])  # what follows is about fragmentation
    else:
        print("The model fits.")
    model.zero_grad()
    torch.cuda.empty_cache()

# %%
# One callback
# ------------
# The callback offloads the model when training begins, prints the report when the plan is final, and removes itself at
# the end.
callback = OffloadCallback()
train([callback])

# %%
# The plan says what is kept, offloaded and recomputed. ``OffloadCallback(memory_budget="8GiB")`` would set a lower
# limit.
print(callback.handle.plan)

# %%
# Side by side
# ------------
# What does less memory cost? Peak memory and step time, without the limit of the GPU; ``plan=`` repeats the plan
# without measuring.
from actoffload.measure import measure_steps

batch = torch.randint(config.vocab_size, (1, length), device=device)


def train_step():
    """Run forward and backward as the Trainer does; the gradients are freed."""
    with torch.autocast(device.type, torch.bfloat16, enabled=not reference):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    model.zero_grad()


if not reference:
    torch.cuda.set_per_process_memory_fraction(1.0)
measured = measure_steps({"no limit": train_step})
with actoffload.offload(model, plan=callback.handle.plan):
    measured |= measure_steps({"OffloadCallback()": train_step})
print(measured)

# %%
# The dashed line is the limit. The reference device has none.
ax = measured.plot()
if not reference:
    ax.axvline(limit, color="#d55e00", linestyle="--")
ax.figure.savefig("trainer_lora.png", dpi=150)

# %%
# Conclusion
# ----------
# A fine-tuning that ran out of memory trains after one line, with the same batch and sequence length, and without
# checkpointing in the model.
