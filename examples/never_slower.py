"""
One line that offloads what is free
===================================

Offloading costs no time while the link copies beside compute. How much that is depends on the model, the batch and the
machine. ``actoffload.offload(model)`` measures it in the first steps, and then offloads what is free. Here a Llama
trains with the Trainer of Hugging Face, with long and with short sequences.
"""

# %%
# A model and a Trainer
# ---------------------
# The weights are random; nothing is downloaded. The optimizer is AdamW. On a GPU the model has eight layers, as wide as
# those of a Llama of 8 billion weights, and runs under bfloat16 autocast. That takes 64 GiB; with less memory, lower
# ``num_hidden_layers``. Without a GPU the example runs on the CPU, with a smaller model and in float32, which every CPU
# has.
import gc
import logging
import sys
import tempfile
from contextlib import ExitStack
from statistics import median

import torch
from matplotlib import pyplot
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import actoffload
from actoffload.measure import Measurement, Measurements, MemoryMeter, describe_device

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
reference = device.type == "cpu"
print(f"Runs on {describe_device()}.")

config = LlamaConfig(
    hidden_size=128 if reference else 4096,
    intermediate_size=384 if reference else 14336,
    num_hidden_layers=4 if reference else 8,
    num_attention_heads=4 if reference else 32,
    num_key_value_heads=1 if reference else 8,
    vocab_size=256 if reference else 32000,
)
lengths = {"long": 512, "short": 64} if reference else {"long": 16384, "short": 512}
batches = {"long": 4 if reference else 1, "short": 4 if reference else 2}
wanted, most = 4 if reference else 12, 60
unit, bytes_of_unit = ("MiB", 2**20) if reference else ("GiB", 2**30)


class Steps(TrainerCallback):
    """Measure the time and the peak of device memory of each step; stop after some steps with the final plan."""

    def __init__(self, handle):
        self.handle, self.seconds, self.peaks, self.step = handle, [], [], ExitStack()
        self.first = 2  # the first steps warm up, or are measured

    def on_step_begin(self, args, state, control, **kwargs):
        """Begin a step."""
        if self.handle is not None and self.handle.settling:
            self.first = max(self.first, len(self.peaks) + 1)
        self.meter = self.step.enter_context(MemoryMeter())
        self.meter.sample()

    def on_step_end(self, args, state, control, **kwargs):
        """End a step."""
        self.meter.sample()
        self.step.close()
        (begin, _), (end, _) = self.meter.samples
        self.seconds.append(end - begin)
        self.peaks.append(self.meter.peak_bytes)
        control.should_training_stop = len(self.peaks) >= self.first + wanted

    def measurement(self):
        """Return the peak and the median time of the steps after the first ones."""
        return Measurement(max(self.peaks[self.first :]), median(self.seconds[self.first :]))


def train(sequences, offloading):
    """Train a new model with long or short sequences; return its steps, and the plan and the report of its handle."""
    batch = batches[sequences]
    gc.collect()  # frees the model of the Trainer before
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config)
    handle = actoffload.offload(model) if offloading else None
    steps = Steps(handle)
    tokens = torch.randint(config.vocab_size, (most * batch, lengths[sequences]))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=most,
            per_device_train_batch_size=batch,
            bf16=not reference,
            optim="adamw_torch_fused",
            use_cpu=reference,
            dataloader_pin_memory=not reference,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        arguments._n_gpu = 1  # where there are several, a Trainer without a launcher makes replicas in threads
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[steps])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if handle is None:
        return steps, None, None
    plan, report = handle.plan, handle.report()
    handle.remove()
    return steps, plan, report


# %%
# Long sequences
# --------------
# The line is ``actoffload.offload(model)``, in front of the Trainer. In the first step everything is offloaded, so that
# it fits if any plan does. The next steps are measured with and without offloading. When ``handle.settling`` is False,
# the plan is final. The logger ``actoffload`` reports it, and how many passes it took.
logger = logging.getLogger("actoffload")
logger.setLevel(logging.INFO)
logger.addHandler(logging.StreamHandler(sys.stdout))

long_without, _, _ = train("long", offloading=False)
long_with, plan, report = train("long", offloading=True)

# %%
# The plan lists what is kept and what is offloaded, with the peak and the time that are expected of a forward and its
# backward.
print(plan)

# %%
# The report compares the step with the step without offloading.
print(report)

# %%
# Peak and time of the steps with the final plan:
measured = {"no offload": long_without.measurement(), "offload(model)": long_with.measurement()}
measured = Measurements(describe_device(), measured)
print(measured)
measured.plot().figure.savefig("never_slower.png", dpi=150)

# %%
# Short sequences
# ---------------
# The same model and the same line. A short step may end before a copy would, and the host may need all of its time to
# queue kernels. Then nothing is offloaded, and the log gives the reason.
short_without, _, _ = train("short", offloading=False)
short_with, plan, report = train("short", offloading=True)
short_again, _, _ = train("short", offloading=False)
print(plan)

# %%
# If nothing is offloaded, no hook runs, and the program is the same as without the line. Step times then differ because
# the host takes longer in one run than in another. Two runs without offloading show how much.
short = {"no offload": short_without, "offload(model)": short_with, "no offload, again": short_again}
print(Measurements(describe_device(), {name: steps.measurement() for name, steps in short.items()}))

# %%
# Step by step
# ------------
# The peak of each step, and on a GPU its time. The steps that measure are shaded. On the reference device nothing is
# measured, and all groups but the last two are offloaded.
panels = {"long": (long_without, long_with), "short": (short_without, short_with)}
rows = [(f"peak memory ({unit})", lambda steps: [peak / bytes_of_unit for peak in steps.peaks])]
if not reference:
    rows.insert(0, ("step time (ms)", lambda steps: [1e3 * seconds for seconds in steps.seconds]))
size = (8.5, 0.6 + 2.7 * len(rows))
figure, axes = pyplot.subplots(len(rows), 2, figsize=size, layout="constrained", sharex=True, squeeze=False)
for row, (label, values) in zip(axes, rows, strict=True):
    for ax, (without, with_offload) in zip(row, panels.values(), strict=True):
        if not reference:
            ax.axvspan(0.5, with_offload.first + 0.5, color="#eeeeee")
        for steps, colour, name in (without, "#555555", "no offload"), (with_offload, "#2b8cc4", "offload(model)"):
            ax.plot(range(1, len(steps.peaks) + 1), values(steps), "o-", color=colour, label=name)
        ax.set_ylim(0, 2 * max(values(without)[without.first :]))  # the first step, which allocates, takes longer
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
for ax, name in zip(axes[0], panels, strict=True):
    ax.set_title(f"{lengths[name]} tokens × {batches[name]}", fontsize=10, loc="left")
    ax.legend(frameon=False, fontsize=8, loc="upper right")
for ax in axes[-1]:
    ax.set_xlabel("step")
figure.savefig("never_slower_steps.png", dpi=150)

# %%
# ``plan.save("plan.json")`` writes a plan to a file. ``actoffload.offload(model, plan="plan.json")`` repeats it without
# measuring, as in a job that was stopped. Its peak is the same in every run.
