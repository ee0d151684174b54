"""The arguments of others that the pages on migration name exist, as these packages are installed here."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

PAGES = Path(__file__).parents[2] / "docs" / "migration"


def text() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))


def takes(function: Any, *arguments: str) -> None:
    """Check that a function takes these arguments, and that a page names each of them."""
    parameters = inspect.signature(function).parameters
    for argument in arguments:
        assert argument in parameters
        assert argument in text()


def test_names_of_pytorch():
    takes(save_on_cpu, "pin_memory", "device_type")
    takes(checkpoint, "use_reentrant", "context_fn")
    takes(fully_shard, "offload_policy")
    takes(CPUOffloadPolicy, "pin_memory")
    takes(CPUOffload, "offload_params")
    for function in (checkpoint_sequential, checkpoint_wrapper.offload_wrapper, checkpoint_wrapper.checkpoint_wrapper):
        assert function.__name__ in text()
    assert hasattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts")


def test_names_of_transformers():
    transformers = pytest.importorskip("transformers")
    known = {field.name for field in fields(transformers.TrainingArguments)}
    names = {"gradient_checkpointing", "activation_checkpointing", "activation_checkpointing_kwargs"}
    assert names <= known
    assert all(name in text() for name in names)
    takes(transformers.PreTrainedModel.activation_checkpointing_enable, "every_n_layers", "offload")
    assert hasattr(transformers.PreTrainedModel, "gradient_checkpointing_enable")


def test_names_of_trl():
    trl = pytest.importorskip("trl")
    from trl.models.activation_offloading import NoOpManager, OffloadActivations, get_act_offloading_ctx_manager

    takes(OffloadActivations, "use_pin_memory", "use_streams", "min_offload_size", "max_fwd_stash_size")
    takes(get_act_offloading_ctx_manager, "model")
    assert NoOpManager.__name__ in text()
    parameters = inspect.signature(OffloadActivations).parameters
    for name in ("min_offload_size", "max_fwd_stash_size"):
        assert f"`{name}={parameters[name].default}`" in text()
    assert "activation_offloading" in {field.name for field in fields(trl.SFTConfig)}
