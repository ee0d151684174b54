"""A mark on a compound tensor or object applies to each of its parts."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from wrappers import Quantized, QuantizedTensor, Two, Uses, one_layer, values

import actoffload
from actoffload.report import Reason

pytestmark = pytest.mark.usefixtures("offload_small_tensors")


MARKED: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, ...]]]] = {
    "wrapper": (lambda: Two(values(), values()), lambda t: (t,)),
    "wrapper in a wrapper": (lambda: Two(Two(values(), values()), Two(values(), values())), lambda t: (t.a, t.b.b)),
    "prepared for saving": (lambda: QuantizedTensor(values()), lambda t: (t,)),
    "an object": (lambda: Quantized(values()), lambda t: (t.rows, t.columns)),
}


@pytest.mark.parametrize("kind", MARKED)
def test_a_mark_applies_to_every_part(kind):
    build, saved = MARKED[kind]
    thing, other = build(), build()
    actoffload.mark_not_offload(thing, None)
    _, statistics = one_layer(lambda x: Uses.apply(x, [], *saved(thing), *saved(other)))
    _, alone = one_layer(lambda x: Uses.apply(x, [], *saved(other)))
    assert alone.bytes_offloaded > 0
    assert statistics.bytes_offloaded == alone.bytes_offloaded
    assert statistics.tensors_kept[Reason.MARKED] == alone.tensors_offloaded


class HasDataTensors:
    """An object with `get_data_tensors` only."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self.tensors = tensors

    def get_data_tensors(self) -> Any:
        return self.tensors if len(self.tensors) > 1 else self.tensors[0]


@pytest.mark.parametrize("more", [(), (None,)])
def test_an_object_with_only_get_data_tensors_is_marked(more):
    tensor = values()
    actoffload.mark_not_offload(HasDataTensors(tensor, *more))
    _, statistics = one_layer(lambda x: Uses.apply(x, [], tensor))
    assert statistics.tensors_kept == {Reason.MARKED: 1}
