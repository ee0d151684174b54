"""The pipelines that are measured, as data: schedules, sizes of the stages, and numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mixtures import MixtureSettings
from workloads import Settings

__all__ = ["PARTS", "SMALL_PARTS", "Part", "available"]


@dataclass(frozen=True)
class Part:
    """A pipeline.

    Parameters
    ----------
    schedule : str
        A class of `torch.distributed.pipelining`.
    settings : Settings or MixtureSettings
        The layers of one stage.
    stages, microbatches : int
        Stages of each rank; microbatches of a step.
    world, data : int
        Number of ranks, and how many of them have different data for the same stages.
    steps : int
        Measured steps of each phase.
    """

    schedule: str
    settings: Settings | MixtureSettings
    stages: int
    microbatches: int
    world: int = 2
    data: int = 1
    steps: int = 3

    @property
    def mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return isinstance(self.settings, MixtureSettings)


def _dense(tokens: int, layers: int) -> Settings:
    """Return Llama layers as wide as those of Llama 3 8B."""
    return Settings(layers, (1, tokens, 4096), "bfloat16", 32, 8, 14336)


def _small(part: Part) -> Part:
    """Return a part that two cores run in seconds."""
    if isinstance(part.settings, MixtureSettings):
        settings: Any = replace(
            part.settings, layers=1, shape=(1, 32, 32), dtype="float32", heads=2, ffn=48, experts=4, min_bytes=1024
        )
    else:
        sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "intermediate": 112, "dtype": "float32"}
        settings = replace(part.settings, layers=2, shape=(1, 32, 32), min_bytes=1024, **sizes)
    return replace(part, settings=settings, microbatches=min(part.microbatches, 6), steps=1)


MIXTURE = Part("ScheduleInterleaved1F1B", MixtureSettings(2, (1, 8192, 4096), "bfloat16", 32, 2048, 8), 2, 8)
TWO = {
    "1f1b": Part("Schedule1F1B", _dense(8192, 4), 1, 8),
    "interleaved": Part("ScheduleInterleaved1F1B", _dense(8192, 8), 2, 16, steps=2),
    "zero-bubble": Part("ScheduleInterleavedZeroBubble", _dense(8192, 1), 2, 8),
    "mixture": MIXTURE,
}
FOUR = {f"{name}-4": replace(part, world=4) for name, part in TWO.items() if name != "mixture"}
FOUR["mixture-4"] = replace(MIXTURE, world=4, data=2)
PARTS = {**TWO, **FOUR}
SMALL_PARTS = {name: _small(part) for name, part in PARTS.items()}


def available(gpus: int) -> tuple[str, ...]:
    """Return the parts that run by default: those of two ranks, and with four GPUs all."""
    return tuple(PARTS if gpus >= 4 else TWO)
