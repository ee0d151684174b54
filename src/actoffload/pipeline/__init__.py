"""Pipeline schedules of `torch.distributed.pipelining`: one plan for all stages and microbatches of a rank."""

from .offload import PipelineHandle, offload

__all__ = ["PipelineHandle", "offload"]
