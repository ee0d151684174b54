"""The Trainer of Hugging Face: a Llama of 1.1 billion weights without offload, with `offload(model)`, and checkpointed.

One run trains a model without offload, then with `offload(model)`, which measures and decides in its first steps, then
without again: the two parts without are compared with each other, too, and their difference is the noise.  A host may
be a third slower in one process than in the next, which says nothing about offloading; so these parts share a run.
Checkpointing has a run of its own, which comes first.  Long sequences then have another part, with
`offload(model, memory_budget=...)`: the peak with checkpointing and 3 %.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from harness import AGAIN, CHECKPOINT, NOTHING, OURS, SETTLING, check_settling
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import actoffload
from actoffload.measure import MemoryMeter

BUDGET = "budget"
METHODS = (NOTHING, OURS, BUDGET, CHECKPOINT, AGAIN)
"""The arms of a round, in their order."""
_NEW, _OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = _NEW if _NEW in TrainingArguments.__dataclass_fields__ else _OLD
"""The argument of Trainer; transformers 5 renames it."""


@dataclass(frozen=True)
class Training:
    """The model, the batches, and the steps that are measured; the defaults are those of the recorded results.

    `tokens` has the lengths of the sequences, and `rounds` the number of rounds of each.  Short sequences have more
    rounds: their steps take as long as the host, which varies.  Of each method `steps` steps are measured, behind
    `warm_up` others and behind those in which `offload(model)` measures.
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
    warm_up: int = 3
    steps: int = 12
    budget_tokens: int = 4096
    more: float = 1.03

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
REHEARSAL = Training(6, 128, 256, 4, 2, 128, (1024, 64), rounds=(1, 1), steps=3, budget_tokens=1024)
"""The same, small enough for the reference device; never published."""


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, which are their own labels."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._rows = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


@dataclass
class Part:
    """So many measured steps of a run behind others: the peak, and seconds of each and of its forward and backward.

    `queue_seconds` are those that the host takes to queue a forward; the device may take longer to run it.  The plan of
    a `handle`, if there is one, is final before any of these steps.
    """

    before: int
    steps: int
    handle: Callable[[], Any] | None = None
    begin: Callable[[], object] = lambda: None  # before all of them
    measure: Callable[[], object] = lambda: None  # before the measured ones
    end: Callable[[], object] = lambda: None  # behind all of them
    seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    pass_seconds: list[float] = field(default_factory=list)
    queue_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


class Parts(TrainerCallback):  # type: ignore[misc]
    """Run and measure the parts of a run, one after the other."""

    def __init__(self, *parts: Part) -> None:
        self._waiting = list(parts)
        self._left = self._settling = 0
        self._meter: MemoryMeter | None = None
        self.most = sum(part.before + part.steps + SETTLING * (part.handle is not None) for part in parts)

    def time_passes(self, trainer: Trainer) -> None:
        """Sample before and after each forward and backward of a Trainer, and time the host in forward."""
        inner, inner_loss = trainer.training_step, trainer.compute_loss

        def training_step(*arguments: Any, **more: Any) -> torch.Tensor:
            self._sample()
            loss = inner(*arguments, **more)
            self._sample()
            return loss

        def compute_loss(*arguments: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            loss = inner_loss(*arguments, **more)
            if self._meter is not None:
                self._waiting[0].queue_seconds.append(time.perf_counter() - begun)
            self._sample()
            return loss

        trainer.training_step, trainer.compute_loss = training_step, compute_loss

    def _sample(self) -> None:
        if self._meter is not None:
            self._meter.sample()

    def on_train_begin(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin the first part."""
        self._begin()

    def _begin(self) -> None:
        part = self._waiting[0]
        self._left, self._settling = part.before, 0
        part.begin()

    def on_step_end(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin to measure where the first measured step begins, and end after the last one of a part."""
        self._sample()
        part = self._waiting[0]
        if self._meter is None and part.handle is not None and part.handle().settling:
            self._settling += 1
            check_settling(self._settling, part.handle())
            return
        self._left -= 1
        if self._left:
            return
        if self._meter is None:
            part.measure()
            self._left, self._meter = part.steps, MemoryMeter()
            self._meter.__enter__()
            self._sample()
            return
        self._meter.__exit__()
        part.peak_bytes = self._meter.peak_bytes
        times = [seconds for seconds, _ in self._meter.samples]  # an end of a step, then four for each step
        part.seconds = [end - start for start, end in pairwise(times[::4])]
        part.forward_seconds = [end - start for start, end in zip(times[1::4], times[2::4], strict=True)]
        part.pass_seconds = [end - start for start, end in zip(times[1::4], times[3::4], strict=True)]
        self._meter = None
        self._waiting.pop(0)
        part.end()
        if self._waiting:
            self._begin()
        else:
            control.should_training_stop = True


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


def train(
    settings: Training, tokens: int, device: torch.device, *, checkpoint: bool = False, budget: int | None = None
) -> dict[str, Any]:
    """Train a new model; return by method the seconds of its steps, its peak, and what was offloaded."""
    with device:  # a billion weights are slow to make on the host
        model = settings.model()
    handles: list[actoffload.OffloadHandle] = []
    found: dict[str, dict[str, Any]] = {}

    def begin(**how: Any) -> Callable[[], object]:
        return lambda: handles.append(actoffload.offload(model, **how))

    def end(method: str) -> Callable[[], object]:
        def ended() -> None:
            handle = handles.pop()
            moved = handle.statistics().bytes_offloaded / settings.steps
            found[method] = {"bytes_offloaded": moved, **planned(handle.plan), "report": str(handle.report())}
            handle.remove()

        return ended

    before, steps = settings.warm_up, settings.steps
    measured_steps: dict[str, Any] = {
        "before": before,
        "steps": steps,
        "handle": lambda: handles[0],
        "measure": lambda: handles[0].reset_statistics(),
    }
    parts = {CHECKPOINT if checkpoint else NOTHING: Part(before, steps)}
    if not checkpoint:
        for method, how in {OURS: begin(), BUDGET: begin(memory_budget=budget)}.items():
            if method is OURS or budget is not None:
                parts[method] = Part(begin=how, end=end(method), **measured_steps)
        parts[AGAIN] = Part(before, steps)
    run = Parts(*parts.values())
    with tempfile.TemporaryDirectory() as folder, messages() as logged:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=run.most,
            per_device_train_batch_size=settings.batch,
            bf16=True,
            optim="adamw_torch_fused",
            use_cpu=device.type == "cpu",
            **({CHECKPOINTING: True} if checkpoint else {}),
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Tokens(run.most * settings.batch, tokens, settings.vocabulary)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[run])
        trainer.remove_callback(PrinterCallback)
        run.time_passes(trainer)
        trainer.train()
    trainer.accelerator.free_memory()
    names = "seconds", "forward_seconds", "pass_seconds", "queue_seconds", "peak_bytes"
    measured: dict[str, Any] = {method: {name: getattr(of, name) for name in names} for method, of in parts.items()}
    for method, more in found.items():
        measured[method] |= {**more, "log": logged}
    if budget is not None:
        measured[BUDGET]["budget"] = budget
    return measured


def planned(plan: Any) -> dict[str, Any]:
    """Return a plan as text, and its predictions of a forward and backward as far as it has any."""
    names = {"seconds": "seconds", "peak_bytes": "peak_bytes", "baseline_seconds": "without_seconds"}
    values = {key: getattr(plan, name, None) for name, key in names.items()}
    return {"plan": str(plan), "predicted": {key: value for key, value in values.items() if value is not None}}


def distances(run: dict[str, Any]) -> dict[str, float]:
    """Return (predicted / measured) - 1 of a run, for each figure that its plan predicts."""
    measured = {"seconds": median(run["pass_seconds"]), "peak_bytes": run["peak_bytes"]}
    return {key: run["predicted"][key] / value - 1 for key, value in measured.items() if key in run["predicted"]}


def rows(runs: dict[int, list[dict[str, dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the data of each length from its rounds, whose runs are given by method.

    The ratio of an arm is the median over the rounds, each to the mean of the two parts without offload of its round.
    Each round has a plan of its own; the distance of what plans predict is the largest one.
    """
    found = []
    for tokens, rounds in runs.items():
        times = [{method: median(run["seconds"]) for method, run in each.items()} for each in rounds]
        baselines = [mean((each[NOTHING], each[AGAIN])) for each in times]
        arms = []
        for method in [method for method in METHODS if method in rounds[0]]:
            ratios = [each[method] / baseline for each, baseline in zip(times, baselines, strict=True)]
            last = rounds[-1][method]
            predicted = [distances(each[method]) for each in rounds if each[method].get("predicted")]
            arms.append(
                {
                    **{key: value for key, value in last.items() if key not in ("seconds", "report", "log")},
                    "method": method,
                    "seconds": median(each[method] for each in times),
                    **{
                        name: median(median(each[method][name]) for each in rounds)
                        for name in ("forward_seconds", "pass_seconds", "queue_seconds")
                    },
                    "ratio": median(ratios),
                    "ratios": ratios,
                    "peak_bytes": max(each[method]["peak_bytes"] for each in rounds),
                    "distance": {key: max((of[key] for of in predicted), key=abs) for key in (predicted or [{}])[0]},
                }
            )
        noise = max(abs(each[AGAIN] - each[NOTHING]) / base for each, base in zip(times, baselines, strict=True))
        found.append({"tokens": tokens, "noise": noise, "arms": arms, "runs": rounds})
    return found


def _free(device: torch.device) -> None:
    """Free the memory of a run."""
    gc.collect()  # Trainer and its parts refer to each other
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def measure_trainer(
    settings: Training, device: torch.device, save: Callable[[dict[str, Any]], object] = lambda data: None
) -> dict[str, Any]:
    """Measure all lengths and methods; `save` gets the data after each round of a length."""
    runs: dict[int, list[dict[str, dict[str, Any]]]] = {}
    data: dict[str, Any] = {}
    for number in range(max(settings.rounds)):
        for tokens in [of for of, rounds in zip(settings.tokens, settings.rounds, strict=True) if number < rounds]:
            done = train(settings, tokens, device, checkpoint=True)
            _free(device)
            peak = done[CHECKPOINT]["peak_bytes"]
            done |= train(
                settings, tokens, device, budget=int(peak * settings.more) if tokens >= settings.budget_tokens else None
            )
            _free(device)
            for method, of in done.items():
                step, peak = median(of["seconds"]) * 1e3, of["peak_bytes"] / 2**30
                print(f"  round {number + 1}, {tokens} tokens, {method}: {step:.1f} ms, {peak:.2f} GiB", flush=True)
            runs.setdefault(tokens, []).append(done)
            data = {"settings": asdict(settings), "rows": rows(runs)}
            save(data)
    return data
