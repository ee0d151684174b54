"""Llama with the Trainer of Hugging Face: all weights, with LoRA by PEFT, and with weights in 4 bits."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from harness import DEVICE, Recorder, Train, UnavailableError, Way
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

__all__ = ["SIZES", "Sizes", "train", "trainer"]

FIELDS = TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
"""The argument of Trainer; transformers 5 renames it."""
SEQUENCES = 64  # different ones, which are repeated


@dataclass(frozen=True)
class Sizes:
    """A Llama, by default of 8 billion weights in bfloat16 with LoRA, and its batches."""

    tokens: int
    batch: int = 1
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    lora: bool = True
    four_bit: bool = False
    liger: bool = False

    @property
    def config(self) -> LlamaConfig:
        """The configuration of the model."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.tokens,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            attn_implementation="sdpa",
            use_cache=False,
        )


SIZES = {
    "T1": Sizes(4096, 2, 22, 2048, 5632, 32, 4, 32000, lora=False),
    "L4": Sizes(4096),
    "L16": Sizes(16384),
    "L32": Sizes(32768, liger=True),
    "Q16": Sizes(16384, four_bit=True),
    "bits": Sizes(4096),
}
SMALL = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "vocabulary": 128, "liger": False}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, which are their own labels."""

    def __init__(self, sizes: Sizes) -> None:
        shape = SEQUENCES, sizes.tokens
        self._rows = torch.randint(sizes.vocabulary, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Offload where `OffloadCallback` does, tell the recorder where steps end, and stop when it is done."""

    def __init__(self, recorder: Recorder, way: Way) -> None:
        self._recorder, self._way = recorder, way

    def on_train_begin(self, arguments: Any, state: Any, control: Any, *, model: nn.Module, **more: Any) -> None:
        self._recorder.handle = self._way.offload(model)

    def on_step_end(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.step_ended()
        control.should_training_stop = self._recorder.done


def _recorded(trainer: Trainer, way: Way, model: nn.Module, recorder: Recorder) -> None:
    """Record each forward and backward of a Trainer, and enter the context of the way, as `SFTTrainer` does."""
    inner, inner_loss, around = trainer.training_step, trainer.compute_loss, way.around(model)

    def training_step(*arguments: Any, **more: Any) -> torch.Tensor:
        recorder.begin()
        with around:
            loss = inner(*arguments, **more)
        recorder.backward_ended()
        return loss

    def compute_loss(*arguments: Any, **more: Any) -> Any:
        loss = inner_loss(*arguments, **more)
        recorder.forward_ended(loss)
        return loss

    trainer.training_step, trainer.compute_loss = training_step, compute_loss


def need(package: str) -> None:
    """Raise `UnavailableError` if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"{package} is not installed where this was measured.")


def _model(sizes: Sizes) -> nn.Module:
    """Return a model with random weights."""
    if sizes.four_bit:
        need("bitsandbytes")
        model = _in_four_bits(sizes)
    else:
        dtype = torch.bfloat16 if sizes.lora else torch.float32
        with DEVICE:  # billions of weights are slow to make on the host
            model = LlamaForCausalLM._from_config(sizes.config, dtype=dtype)
    if not sizes.lora:
        return model
    need("peft")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def _in_four_bits(sizes: Sizes) -> Any:
    """Return a model whose linear layers, but for the head, are in 4 bits; one at a time is in bfloat16."""
    import bitsandbytes as bnb

    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(sizes.config, dtype=torch.bfloat16)
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    for name in linear:
        parent, _, own = name.rpartition(".")
        rows, columns = model.get_submodule(name).weight.shape
        new = bnb.nn.Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        weight = 0.02 * torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE)
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=new)
        setattr(model.get_submodule(parent), own, new.to(DEVICE))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                made = torch.empty(weight.shape, dtype=torch.bfloat16, device=DEVICE)
                setattr(module, name, nn.Parameter(made.fill_(1.0) if made.dim() == 1 else made.normal_(std=0.02)))
    with DEVICE:
        model.model.rotary_emb = type(model.model.rotary_emb)(sizes.config)
    model.is_loaded_in_4bit = True  # read by PEFT
    return model


def train(sizes: Sizes, way: Way, recorder: Recorder) -> None:
    """Train a new model with a new Trainer until the recorder is done."""
    if sizes.liger:
        need("liger_kernel")
    if way.inputs_offloaded and CHECKPOINTING == "gradient_checkpointing":
        raise UnavailableError(f"transformers {importlib.metadata.version('transformers')} offloads no inputs.")
    model = _model(sizes)
    more: dict[str, Any] = {CHECKPOINTING: True} if way.checkpointed else {}
    if way.inputs_offloaded:
        more[f"{CHECKPOINTING}_kwargs"] = {"offload": True}
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
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **more,
        )
        trainer = Trainer(model, arguments, train_dataset=Tokens(sizes), callbacks=[_Steps(recorder, way)])
        trainer.remove_callback(PrinterCallback)
        _recorded(trainer, way, model, recorder)
        try:
            trainer.train()
        finally:
            trainer.accelerator.free_memory()


def trainer(name: str, *, rehearse: bool) -> Train:
    """Return the function that trains the model of a job."""
    sizes = SIZES[name]
    if rehearse:
        sizes = replace(sizes, **SMALL, tokens=32)
    if name == "bits":  # the only job of its process
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    return partial(train, sizes)
