"""Llama with the Trainer of Hugging Face: all weights, with LoRA by PEFT, and with weights in 4 bits.

A job has one length of sequences, or is a search for the longest one that trains.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from harness import DEVICE, Recorder, Sample, Train, UnavailableError, Way, need, run_arms
from jobs import JOBS, LENGTHS
from peft import LoraConfig, get_peft_model
from stack import SMALL, Sizes
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

__all__ = ["longest", "search", "trainer"]

FIELDS = TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
"""The argument of Trainer; transformers 5 renames it."""
SEQUENCES = 64  # different ones, which are repeated


@dataclass(frozen=True)
class Llama(Sizes):
    """A Llama with LoRA, with weights in 4 bits, with the kernels of Liger; a batch has so many sequences."""

    batch: int = 1
    lora: bool = True
    four_bit: bool = False
    liger: bool = False
    reads_loss: bool = True  # in each step, as the Trainer does by default


_T1 = Llama(22, 4096, 2048, 5632, 32, 4, 32000, dtype=torch.float32, batch=2, lora=False)
SIZES = {
    "T1": _T1,
    "T1f": replace(_T1, reads_loss=False),
    "L4": Llama(32, 4096),
    "L16": Llama(32, 16384),
    "L32": Llama(32, 32768, liger=True),
    "Q16": Llama(32, 16384, four_bit=True),
    "bits": Llama(32, 4096),
}
TINY = {**SMALL, "layers": 3, "liger": False}


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Offload where `OffloadCallback` does, tell the recorder where steps end, and stop when it is done."""

    def __init__(self, recorder: Recorder, way: Way) -> None:
        self._recorder, self._way = recorder, way

    def on_train_begin(self, arguments: Any, state: Any, control: Any, *, model: nn.Module, **more: Any) -> None:
        self._recorder.handle = self._way.offload(model)

    def on_step_end(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.step_ended()
        control.should_training_stop = self._recorder.done


class _Recorded(Trainer):  # type: ignore[misc]
    """Record each forward and backward, within the context of the way, as `SFTTrainer` enters it."""

    recorder: Recorder
    around: Any

    def training_step(self, *arguments: Any, **more: Any) -> torch.Tensor:
        self.recorder.begin()
        with self.around:
            loss = super().training_step(*arguments, **more)
        self.recorder.backward_ended()
        return loss

    def compute_loss(self, *arguments: Any, **more: Any) -> Any:
        loss = super().compute_loss(*arguments, **more)
        self.recorder.forward_ended(loss)
        return loss


def _model(sizes: Llama) -> nn.Module:
    """Return a model with random weights."""
    if sizes.four_bit:
        need("bitsandbytes")
        model = _in_four_bits(sizes)
    else:
        with DEVICE:  # billions of weights are slow to make on the host
            model = LlamaForCausalLM._from_config(sizes.config, dtype=sizes.dtype)
    if not sizes.lora:
        return model
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def _in_four_bits(sizes: Llama) -> Any:
    """Return a model whose linear layers, but for the head, are in 4 bits; one at a time is in bfloat16."""
    import bitsandbytes as bnb

    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(sizes.config, dtype=torch.bfloat16)
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    for name in linear:
        rows, columns = model.get_submodule(name).weight.shape
        with torch.device("meta"):  # random numbers for weights that are replaced took a minute
            new = bnb.nn.Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        weight = 0.02 * torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE)
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=new)
        model.set_submodule(name, new.to(DEVICE))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                made = torch.empty(weight.shape, dtype=torch.bfloat16, device=DEVICE)
                setattr(module, name, nn.Parameter(made.fill_(1.0) if made.dim() == 1 else made.normal_(std=0.02)))
    with DEVICE:
        model.model.rotary_emb = type(model.model.rotary_emb)(sizes.config)
    model.is_loaded_in_4bit = True  # read by PEFT
    return model


def train(sizes: Llama, way: Way, recorder: Recorder) -> None:
    """Train a new model with a new Trainer until the recorder is done."""
    if sizes.liger:
        need("liger_kernel")
    model = _model(sizes)
    more: dict[str, Any] = {CHECKPOINTING: True} if way.checkpointed else {}
    if way.arm == "checkpoint_offload":
        more[f"{CHECKPOINTING}_kwargs"] = {"offload": True}
    rows = torch.randint(sizes.vocabulary, (SEQUENCES, sizes.tokens), generator=torch.Generator().manual_seed(0))
    tokens = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=1000,
            per_device_train_batch_size=sizes.batch,
            bf16=True,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            use_liger_kernel=sizes.liger,
            use_cpu=DEVICE.type == "cpu",
            logging_strategy="no",
            logging_nan_inf_filter=sizes.reads_loss,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **more,
        )
        trainer = _Recorded(model, arguments, train_dataset=tokens, callbacks=[_Steps(recorder, way)])
        trainer.recorder, trainer.around = recorder, way.around(model)
        try:
            trainer.train()
        finally:
            trainer.accelerator.free_memory()


def trainer(name: str, *, rehearse: bool) -> Train:
    """Return the function that trains the model of a job."""
    sizes = SIZES[name]
    if rehearse:
        sizes = replace(sizes, **TINY, tokens=32)
    if name == "bits":  # the only job of its process
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    return partial(train, sizes)


# The longest sequence that trains

FIRST = {"none": 8, "checkpoint": 64, "checkpoint_offload": 128, "trl": 128, "offload": 128}
"""Thousands of tokens that are tried first; fewer with less memory, as less is left beside the weights."""


def longest(lengths: Sequence[int], first: int, trains: Callable[[int], bool]) -> int | None:
    """Return the longest of ascending lengths that trains, or None; each is tried once, and the first one first.

    If it trains, the second next follows, and so on, so that a long search takes few tries.
    """
    low, high = -1, len(lengths)  # the last known to train, and the first known not to
    at = min(range(len(lengths)), key=lambda k: abs(lengths[k] - first))
    while high - low > 1:
        if trains(lengths[at]):
            low = at
            at = min(at + 2, high - 1) if high == len(lengths) else (low + high) // 2
        else:
            high = at
            at = max(at - 2, low + 1) if low < 0 else (low + high) // 2
    return lengths[low] if low >= 0 else None


def search(
    name: str, write: Callable[[Sample], object], arms: Sequence[str], memory: float | None, *, rehearse: bool
) -> None:
    """Search the longest sequence of each arm, in at most `memory` GB of device memory."""
    base, lengths = Llama(32, 0, four_bit=name == "context-qlora", liger=True), LENGTHS
    if rehearse:
        base, lengths = replace(base, **TINY), (16, 32, 64)
    if memory is not None and DEVICE.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory * 1e9 / torch.cuda.mem_get_info()[1]))

    for arm in arms or JOBS[name].arms:

        def trains(tokens: int, arm: str = arm) -> bool:
            sizes, more = replace(base, tokens=tokens), {"tokens": tokens, "memory_gb": memory}
            (sample,) = run_arms(JOBS[name], partial(train, sizes), write, (arm,), **more)
            if sample["status"] == "skipped":  # at any length
                raise UnavailableError
            return bool(sample["status"] == "ok")

        first = FIRST[arm] * 1024 * max(0.05, ((memory or 80) - (6 if base.four_bit else 18)) / 62)
        try:
            print(f"{arm}: {longest(lengths, 32 if rehearse else int(first), trains)} tokens train", flush=True)
        except UnavailableError:
            continue
