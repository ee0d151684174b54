"""The Trainer of Hugging Face: a Llama of 1.1 billion weights without offload, with `offload(model)`, and checkpointed.

Every run trains a new model, because `offload(model)` measures and decides in its first steps; the steps after them are
timed.  The arms take turns.  The first and the last of a round are without offload: their difference is the noise.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from harness import AGAIN, CHECKPOINT, NOTHING, OURS
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import actoffload
from actoffload.measure import MemoryMeter

METHODS = (NOTHING, OURS, CHECKPOINT, AGAIN)
"""The arms of a round, in their order."""
_NEW, _OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = _NEW if _NEW in TrainingArguments.__dataclass_fields__ else _OLD
"""The argument of Trainer; transformers 5 renames it."""


@dataclass(frozen=True)
class Training:
    """The model, the batches, and the steps that are measured; the defaults are those of the recorded results.

    `tokens` has the lengths of the sequences, and `rounds` the number of rounds of each; the steps `first` to `last` are
    measured.  Short sequences have more rounds: their steps take as long as the host, which varies.
    """

    layers: int = 22
    hidden: int = 2048
    intermediate: int = 5632
    heads: int = 32
    kv_heads: int = 4
    vocabulary: int = 32000
    tokens: tuple[int, ...] = (4096, 512)
    batch: int = 2
    rounds: tuple[int, ...] = (2, 4)
    first: int = 10
    last: int = 22

    def model(self) -> LlamaForCausalLM:
        """Return a model with random weights in float32."""
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(self.tokens),
        )
        return LlamaForCausalLM(config)


FULL = Training()
REHEARSAL = Training(6, 128, 256, 4, 2, 128, (1024, 64), rounds=(1, 1), last=12)
"""The same, small enough for the reference device; never published."""


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, which are their own labels."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._rows = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class StepMeter(TrainerCallback):  # type: ignore[misc]
    """Measure the steps `first` to `last`: seconds of each and of its forward and backward, and the peak of all."""

    def __init__(self, first: int, last: int, begin: Callable[[], object] = lambda: None) -> None:
        self._first, self._last, self._begin = first, last, begin
        self._meter = MemoryMeter()
        self._measuring = False
        self.seconds: list[float] = []
        self.pass_seconds: list[float] = []
        self.peak_bytes = 0

    def time_passes(self, trainer: Trainer) -> None:
        """Sample before and after each forward and backward of a Trainer."""
        inner = trainer.training_step

        def training_step(*arguments: Any, **more: Any) -> torch.Tensor:
            self._sample()
            loss = inner(*arguments, **more)
            self._sample()
            return loss

        trainer.training_step = training_step

    def _sample(self) -> None:
        if self._measuring:
            self._meter.sample()

    def on_step_end(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin after the step before the first one, and end after the last one."""
        step = state.global_step
        if step == self._first - 1:
            self._begin()
            self._meter.__enter__()
            self._measuring = True
        self._sample()
        if step == self._last:
            self._measuring = False
            self._meter.__exit__()
            self.peak_bytes = self._meter.peak_bytes
            times = [seconds for seconds, _ in self._meter.samples]  # an end of a step, then three for each step
            self.seconds = [end - start for start, end in pairwise(times[::3])]
            self.pass_seconds = [end - start for start, end in zip(times[1::3], times[2::3], strict=True)]


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collect what the library logs in a ``with`` block: what it measured and decided."""
    found: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("actoffload")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train(method: str, settings: Training, tokens: int, device: torch.device) -> dict[str, Any]:
    """Train a new model with one method; return the seconds of its steps, its peak, and what was offloaded."""
    with device:  # a billion weights are slow to make on the host
        model = settings.model()
    handle = actoffload.offload(model) if method == OURS else None
    meter = StepMeter(settings.first, settings.last, handle.reset_statistics if handle else lambda: None)
    with tempfile.TemporaryDirectory() as folder, messages() as logged:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=settings.last,
            per_device_train_batch_size=settings.batch,
            bf16=True,
            optim="adamw_torch_fused",
            use_cpu=device.type == "cpu",
            **({CHECKPOINTING: True} if method == CHECKPOINT else {}),
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Tokens(settings.last * settings.batch, tokens, settings.vocabulary)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[meter])
        trainer.remove_callback(PrinterCallback)
        meter.time_passes(trainer)
        trainer.train()
    found: dict[str, Any] = {name: getattr(meter, name) for name in ("seconds", "pass_seconds", "peak_bytes")}
    if handle is not None:
        found["bytes_offloaded"] = handle.statistics().bytes_offloaded / len(meter.seconds)
        found |= planned(handle.plan) | {"report": str(handle.report()), "log": logged}
        handle.remove()
    trainer.accelerator.free_memory()
    return found


def planned(plan: Any) -> dict[str, Any]:
    """Return a plan as text, and its predictions of a forward and backward as far as it has any."""
    names = {"seconds": "seconds", "peak_bytes": "peak_bytes", "baseline_seconds": "without_seconds"}
    values = {key: getattr(plan, name, None) for name, key in names.items()}
    return {"plan": str(plan), "predicted": {key: value for key, value in values.items() if value is not None}}


def rows(runs: dict[int, list[dict[str, dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the data of each length from its rounds, whose runs are given by method.

    The ratio of an arm is the median over the rounds, each to the mean of the two arms without offload of its round.
    """
    found = []
    for tokens, rounds in runs.items():
        times = [{method: median(run["seconds"]) for method, run in each.items()} for each in rounds]
        baselines = [mean((each[NOTHING], each[AGAIN])) for each in times]
        arms = []
        for method in METHODS:
            ratios = [each[method] / baseline for each, baseline in zip(times, baselines, strict=True)]
            last = rounds[-1][method]
            arms.append(
                {
                    **{key: value for key, value in last.items() if key not in ("seconds", "report", "log")},
                    "method": method,
                    "seconds": median(each[method] for each in times),
                    "pass_seconds": median(median(each[method]["pass_seconds"]) for each in rounds),
                    "ratio": median(ratios),
                    "ratios": ratios,
                    "peak_bytes": max(each[method]["peak_bytes"] for each in rounds),
                }
            )
        noise = max(abs(each[AGAIN] - each[NOTHING]) / base for each, base in zip(times, baselines, strict=True))
        found.append({"tokens": tokens, "noise": noise, "arms": arms, "runs": rounds})
    return found


def measure_trainer(
    settings: Training, device: torch.device, save: Callable[[dict[str, Any]], object] = lambda data: None
) -> dict[str, Any]:
    """Measure all lengths and methods; `save` gets the data after each round of a length."""
    runs: dict[int, list[dict[str, dict[str, Any]]]] = {}
    data: dict[str, Any] = {}
    for number in range(max(settings.rounds)):
        for tokens in [of for of, rounds in zip(settings.tokens, settings.rounds, strict=True) if number < rounds]:
            done = {}
            for method in METHODS:
                done[method] = train(method, settings, tokens, device)
                gc.collect()  # Trainer and its parts refer to each other
                if device.type != "cpu":
                    torch.accelerator.empty_cache()
                step, peak = median(done[method]["seconds"]) * 1e3, done[method]["peak_bytes"] / 2**30
                print(f"  round {number + 1}, {tokens} tokens, {method}: {step:.1f} ms, {peak:.2f} GiB", flush=True)
            runs.setdefault(tokens, []).append(done)
            data = {"settings": asdict(settings), "rows": rows(runs)}
            save(data)
    return data
