"""Parts of a mixture-of-experts layer: routing that never waits for the device, and experts that offload."""

from .experts import GroupedMLP, grouped_mlp
from .multihot import indices_to_multihot

__all__ = ["GroupedMLP", "grouped_mlp", "indices_to_multihot"]
