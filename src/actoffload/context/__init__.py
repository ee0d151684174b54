"""Per-layer API with Transformer Engine's signature: factory, context and manual controller."""

from ..engine.passes import Pass
from .context import ManualController, OffloadContext
from .factory import get_cpu_offload_context

__all__ = ["ManualController", "OffloadContext", "Pass", "get_cpu_offload_context"]
