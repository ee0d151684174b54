"""Host memory that is not kept: what a mutant holds in place of the parts of a buffer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class WeakParts(Sequence[torch.Tensor]):
    """Like a tuple of tensors, but holds none of their memory; what was freed is read as garbage."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = [(StorageWeakRef(p.untyped_storage()), p.storage_offset(), p.numel()) for p in parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        weak, start, count = self._parts[index]
        if weak.expired():
            return torch.full((count,), 0xFF, dtype=torch.uint8)
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage, start, (count,))
