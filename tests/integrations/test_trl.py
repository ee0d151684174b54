"""Trainers of TRL whose step has more than one forward: a reference model, and completions that are generated."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed  # noqa: E402

from actoffload.integrations import OffloadCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # those of TRL itself

WORDS = [f"w{k}" for k in range(30)]
TEXTS = [" ".join(WORDS[(k * n) % 30] for n in range(1, 9 + k % 5)) for k in range(8)]
DATA = {"prompt": TEXTS, "chosen": [text[::-1] for text in TEXTS], "rejected": TEXTS[::-1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model and its tokenizer: TRL loads the reference model from there."""
    path = tmp_path_factory.mktemp("model")
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<pad>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"eos_token": "<eos>", "pad_token": "<pad>", "padding_side": "left"}
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, eos_token_id=0, pad_token_id=1)).save_pretrained(path)
    return path


def train(kind: str, folder: Path, lora: bool, callback: OffloadCallback | None) -> list[torch.Tensor]:
    """Return the weights after some steps."""
    set_seed(0)
    more: dict[str, Any] = {"use_cpu": True, "bf16": True, "disable_tqdm": True, "activation_checkpointing": False}
    more |= {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.1}
    more |= {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "output_dir": str(folder / kind)}
    given: dict[str, Any] = {
        "model": LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "processing_class": PreTrainedTokenizerFast.from_pretrained(folder),
        "train_dataset": Dataset.from_dict(DATA if kind == "dpo" else {"prompt": TEXTS}),
        "peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        "callbacks": [callback] if callback else [],
    }
    if kind == "dpo":
        trainer = trl.DPOTrainer(args=trl.DPOConfig(max_length=32, **more), **given)
    else:
        settings = trl.GRPOConfig(num_generations=2, max_completion_length=6, beta=0.1, num_iterations=2, **more)
        reward = [lambda completions, **_: [float(len(set(text.split()))) for text in completions]]
        trainer = trl.GRPOTrainer(reward_funcs=reward, args=settings, **given)
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in weights]
    trainer.train()
    assert not all(map(torch.equal, weights, before))
    return weights


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_training_with_several_forwards_has_the_same_bits(kind, lora, folder):
    callback = OffloadCallback(report_at=2, min_bytes=64, recompute=True)
    want = train(kind, folder, lora, None)
    found = train(kind, folder, lora, callback)
    assert all(map(torch.equal, found, want))
    assert sum(group.bytes_offloaded for group in callback.report.groups) > 0
    assert all(group.recomputed for group in callback.report.groups)
