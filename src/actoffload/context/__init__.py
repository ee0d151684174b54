"""Per-layer API with Transformer Engine's signature: factory, context and manual controller."""

from .context import ManualController, OffloadContext
from .factory import get_cpu_offload_context

__all__ = ["ManualController", "OffloadContext", "get_cpu_offload_context"]
