"""Pipeline schedules of `torch.distributed.pipelining`: one plan for all stages and microbatches of a rank."""

from .handle import PipelineHandle
from .offload import offload
from .report import PipelineReport, PipelineTable

__all__ = ["PipelineHandle", "PipelineReport", "PipelineTable", "offload"]
