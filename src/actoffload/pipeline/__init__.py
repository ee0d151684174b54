"""Pipeline schedules of `torch.distributed.pipelining`: one plan for all stages and microbatches of a rank."""

from .handle import PipelineHandle
from .offload import offload

__all__ = ["PipelineHandle", "offload"]
