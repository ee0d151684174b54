"""Pipeline schedules of `torch.distributed.pipelining`: one plan for all stages and microbatches of a rank."""

from ..report.ranks import PipelineReport
from .offload import PipelineHandle, offload

__all__ = ["PipelineHandle", "PipelineReport", "offload"]
