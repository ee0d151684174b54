"""The jobs and their arms: what each measures, how often, and for how long at most.

Neither torch nor a framework is imported here, so that the report is written without them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARMS", "JOBS", "LENGTHS", "Job"]

ARMS = {
    "none": "no offload",
    "none2": "no offload, again",
    "waiting": "no offload, routing by masks",
    "checkpoint": "checkpointing",
    "checkpoint_offload": "checkpointing, inputs offloaded",
    "trl": "checkpointing, TRL's offloading",
    "qkv": 'offload(layers="*.qkv", fraction=1.0)',
    "offload": "offload(model)",
    "budget": "offload(model, memory_budget)",
    "selective": "selective checkpointing",
    "save_on_cpu": "save_on_cpu(pin_memory=True)",
}
"""The arms of a job by name; a budget is the peak of checkpointing and 3 %."""
USUAL = "none", "none2", "checkpoint", "checkpoint_offload", "trl", "offload", "budget"
PLAIN = *USUAL, "selective", "save_on_cpu"
FEW = "none", "none2", "checkpoint", "offload", "budget"
LENGTHS = tuple(1024 * k for k in (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512))
"""Numbers of tokens among which the longest one is searched."""


@dataclass(frozen=True)
class Job:
    """One job.

    Parameters
    ----------
    title, words, module : str
        Heading and description on the page, and the file of `benchmarks` that runs it.
    minutes, limit : float
        Expected minutes on an H100, and seconds after which its process is stopped.
    arms : tuple of str
        Names of `ARMS`; ``"budget:15.4"`` is a budget of so many GiB.
    rounds, warm_up, steps, gpus : int
        Rounds over all arms; steps of an arm in a round, once its plan is final: not measured, and measured; ranks.
    searches : bool
        Whether the longest sequence of each arm is searched, in a process of its own.
    """

    title: str
    words: str
    module: str
    minutes: float
    limit: float
    arms: tuple[str, ...] = USUAL
    rounds: int = 3
    warm_up: int = 2
    steps: int = 6
    gpus: int = 1
    searches: bool = False


_TRAINER = "Trainer of Hugging Face, fused AdamW, "
_LORA = f"{_TRAINER}Llama 3 8B in bfloat16 with LoRA (r = 16, all linear layers), "
_FOUR_BIT = f"{_TRAINER}Llama 3 8B in 4 bits (bitsandbytes, NF4) with LoRA (r = 16, all linear layers), "
_AUTOCAST = "float32 weights, bfloat16 autocast"
_SEARCH = {"rounds": 1, "warm_up": 1, "steps": 1, "searches": True}
_SEARCHED = "none", "checkpoint", "checkpoint_offload", "trl", "offload"
_BUDGETS = tuple(f"budget:{gib}" for gib in (14.93, 15.4, 16.5, 18.3, 20, 21.7, 23.4, 25.1, 28.5, 31.8))


def _layers(count: str, tokens: int, more: str = "") -> str:
    return f"{count} layers as wide as those of Llama 3 8B, {tokens} tokens, bfloat16, no optimizer.{more}"


JOBS = {
    "T1": Job("Llama 1.1B", f"{_TRAINER}{_AUTOCAST}, 4096 tokens × 2.", "trainer", 2.5, 240),
    "T1f": Job("Llama 1.1B, no filter", "As above with `logging_nan_inf_filter=False`: no wait.", "trainer", 2.5, 240),
    "L4": Job("Llama 8B LoRA, 4k", f"{_LORA}4096 tokens × 1.", "trainer", 3, 300, rounds=2),
    "L16": Job("Llama 8B LoRA, 16k", f"{_LORA}16384 tokens × 1.", "trainer", 3, 300, rounds=2, steps=2),
    "L32": Job("Llama 8B LoRA, 32k", f"{_LORA}32768 tokens × 1, Liger kernels.", "trainer", 3, 300, rounds=1, steps=3),
    "Q16": Job("Llama 8B QLoRA, 16k", f"{_FOUR_BIT}16384 tokens × 1.", "trainer", 3, 300, rounds=1, steps=3),
    "P8": Job("16 layers, 8k", _layers("16", 8192), "stack", 2.5, 240, PLAIN),
    "P32": Job("4 layers, 32k", _layers("4", 32768), "stack", 2, 240, PLAIN, rounds=2),
    "P8c": Job("16 compiled layers, 8k", _layers("16 compiled", 8192), "stack", 2.5, 300, rounds=2),
    "P32c": Job("4 compiled layers, 32k", _layers("4 compiled", 32768), "stack", 2.5, 300, rounds=2),
    "B8": Job(
        "Budgets, 16 layers, 8k",
        _layers("16", 8192, " Budgets from the peak of checkpointing to that without offload."),
        *("stack", 2, 240, ("none", "none2", "checkpoint", *_BUDGETS)),
        rounds=1,
    ),
    "F2": Job("FSDP2 on two GPUs, 8k", _layers("12 sharded", 8192), "stack", 2.5, 300, gpus=2),
    "F4": Job("FSDP2 on four GPUs, 8k", _layers("12 sharded", 8192), "stack", 1.5, 240, FEW, rounds=2, steps=4, gpus=4),
    "PP2": Job(
        "Pipeline on two GPUs",
        "Interleaved 1F1B, two stages of one such layer on each rank, 16 microbatches of 16384 tokens, bfloat16.",
        *("stack", 3, 300, FEW),
        rounds=1,
        steps=3,
        gpus=2,
    ),
    "E4": Job(
        "Experts in a pipeline on four GPUs",
        "Interleaved 1F1B, data parallel 2 × pipeline 2, two stages on each rank, each of two layers of attention and "
        "8 experts (hidden size 4096, 2048 in an expert, 2 for a token), which both data-parallel ranks share; 12 "
        "microbatches of 8192 tokens, bfloat16. All arms but one route by `indices_to_multihot`, without a "
        "synchronization.",
        *("experts", 2, 300, ("waiting", "none", "none2", "qkv", "checkpoint", "offload", "budget")),
        rounds=1,
        steps=4,
        gpus=4,
    ),
    "ViT-L": Job(
        "ViT-L, 256 images",
        f"Vision transformer (24 layers, hidden size 1024), 224 × 224 pixels, plain loop, fused AdamW, {_AUTOCAST}.",
        *("vision", 2, 240),
    ),
    "DiT-XL": Job(
        "DiT-XL/2, 32 latents",
        f"Diffusion transformer (28 layers, hidden size 1152), latents 64 × 64, plain loop, fused AdamW, {_AUTOCAST}.",
        *("vision", 2.5, 330),
    ),
    "bits": Job(
        "Same bits, Llama 8B LoRA",
        f"{_LORA}4096 tokens × 1, deterministic kernels. The losses of the first steps are compared with those without "
        "offload; they depend on all gradients before.",
        *("trainer", 1, 180, FEW),
        rounds=1,
        warm_up=3,
        steps=1,
    ),
    "context": Job("Longest context, Llama 8B LoRA", f"{_LORA}Liger kernels.", "trainer", 9, 570, _SEARCHED, **_SEARCH),
    "context-qlora": Job(
        "Longest context, Llama 8B QLoRA", f"{_FOUR_BIT}Liger kernels.", "trainer", 9, 570, _SEARCHED, **_SEARCH
    ),
}
