"""Outputs and gradients are bit-identical to the run without offloading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_harness import (
    DEVICE,
    KINDS,
    collect,
    flash,
    forward,
    lenient,
    loss,
    make_input,
    make_layers,
    manual_forward,
    needs_cuda,
    no_offload,
    offload,
    step,
)
from torch import nn

import actoffload
from actoffload.report import Reason

pytestmark = [pytest.mark.gpu, *lenient]


@pytest.mark.parametrize(("num_layers", "model_layers"), [(1, 3), (3, 12), (6, 12), (10, 12)])
@pytest.mark.parametrize("kind", KINDS)
def test_default_schedule(kind: str, num_layers: int, model_layers: int) -> None:
    layers = make_layers(kind, model_layers)
    pair = offload(num_layers, model_layers)
    with flash():
        for seed in range(3):
            expected = step(layers, seed, no_offload())
            assert step(layers, seed, pair).differences(expected) == []
    statistics = pair[0].statistics()
    assert statistics.tensors_offloaded >= 3 * num_layers
    assert statistics.bytes_reloaded == statistics.bytes_offloaded
    assert statistics.reloaded_on_demand == 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0


STREAMS = {
    "own streams": lambda: None,
    "torch.Stream": lambda: torch.Stream(DEVICE) if DEVICE.type == "cuda" else None,
    "torch.cuda.Stream": lambda: torch.cuda.Stream() if DEVICE.type == "cuda" else None,
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_manual_synchronization(kind: str, stream: str) -> None:
    layers = make_layers(kind, 8)
    trio = actoffload.get_cpu_offload_context(
        enabled=True, model_layers=8, manual_synchronization=True, offload_stream=STREAMS[stream]()
    )
    with flash():
        for seed in range(3):
            expected = step(layers, seed, no_offload())
            output = manual_forward(layers, make_input(layers, seed), trio, offloaded=4)
            loss(output).backward()
            assert collect(layers, output).differences(expected) == []
    statistics = trio[0].statistics()
    assert statistics.bytes_reloaded == statistics.bytes_offloaded > 0
    assert statistics.reloaded_on_demand == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_several_passes_in_flight(kind: str, order: tuple[int, ...]) -> None:
    layers = make_layers(kind, 6)
    pair = offload(3, 6)

    def run(pair: Any) -> Any:
        outputs = [forward(layers, make_input(layers, seed), pair) for seed in range(3)]
        losses = [loss(output) for output in outputs]
        for k in order:
            losses[k].backward()
        return collect(layers, torch.stack(outputs))

    with flash():
        expected = run(no_offload())
        for _ in range(2):
            assert run(pair).differences(expected) == []
    assert pair[0].statistics().bytes_reloaded == pair[0].statistics().bytes_offloaded > 0


@pytest.mark.parametrize("kind", KINDS)
def test_retained_graph_and_second_backward(kind: str) -> None:
    layers = make_layers(kind, 6)
    pair = offload(3, 6)

    def run(pair: Any) -> Any:
        output = forward(layers, make_input(layers, 5), pair)
        value = loss(output)
        value.backward(retain_graph=True)
        value.backward(retain_graph=True)
        value.backward()
        return collect(layers, output)

    with flash():
        expected = run(no_offload())
        assert run(pair).differences(expected) == []
    statistics = pair[0].statistics()
    assert statistics.bytes_offloaded > 0
    assert statistics.resident_bytes == statistics.host_bytes_used == 0


def test_accumulation_validation_and_abandoned_forwards() -> None:
    layers = make_layers("mlp", 6)
    pair = offload(3, 6)

    def run(pair: Any) -> Any:
        for seed in range(3):
            output = forward(layers, make_input(layers, seed), pair)
            with torch.no_grad():
                forward(layers, make_input(layers, 7), pair)
            forward(layers, make_input(layers, 8), pair)
            loss(output).backward()
        return collect(layers, output)

    # Validation between a forward and its backward is a pass of its own, as is the abandoned forward.
    expected = run(no_offload())
    assert run(pair).differences(expected) == []
    assert pair[0].statistics().bytes_offloaded > 0
    assert pair[0].statistics().resident_bytes == 0


def test_input_gradient() -> None:
    layers = make_layers("linear", 6)

    def run(pair: Any) -> torch.Tensor:
        leaf = make_input(layers, 3).requires_grad_()
        loss(forward(layers, leaf * 1.0, pair)).backward()
        return leaf.grad

    pair = offload(3, 6)
    assert torch.equal(run(pair), run(no_offload()))
    assert pair[0].statistics().bytes_reloaded == pair[0].statistics().bytes_offloaded > 0


class Offloaded(nn.Module):
    """A decoder layer that runs in the context; the model around it is unmodified."""

    def __init__(self, layer: nn.Module, pair: tuple[Any, Any]) -> None:
        super().__init__()
        self.layer, self.pair = layer, pair

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context, sync = self.pair
        with context:
            output = self.layer(*args, **kwargs)
        return sync(output)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hugging_face_llama(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation=attention,
    )
    model = transformers.LlamaModel(config).to(DEVICE, torch.bfloat16)
    plain = list(model.layers)
    embeddings = torch.randn(1, 1024, 512, device=DEVICE, dtype=torch.bfloat16)
    pair = offload(3, 6)

    def run(pair: Any) -> Any:
        model.layers = nn.ModuleList([Offloaded(layer, pair) for layer in plain])
        output = model(inputs_embeds=embeddings * 1.0).last_hidden_state
        loss(output).backward()
        used = nn.ModuleList([*plain, model.norm])
        return collect(used, output)

    with torch.nn.attention.sdpa_kernel(deterministic_backends()):
        expected = run(no_offload())
        for _ in range(3):
            assert run(pair).differences(expected) == []
    statistics = pair[0].statistics()
    assert statistics.tensors_offloaded > 0
    assert statistics.bytes_reloaded == statistics.bytes_offloaded


def deterministic_backends() -> list[Any]:
    """Return the attention backends whose backward is deterministic."""
    backends = torch.nn.attention.SDPBackend
    return [backends.FLASH_ATTENTION, backends.MATH]


def test_host_memory_refused() -> None:
    layers = make_layers("linear", 6)
    expected = step(layers, 0, no_offload())
    nbytes = make_input(layers).nbytes
    pair = offload(3, 6, max_host_bytes=2 * nbytes)
    with pytest.warns(actoffload.HostMemoryWarning, match="limit of"):
        assert step(layers, 0, pair).differences(expected) == []
    assert step(layers, 0, pair).differences(expected) == []
    statistics = pair[0].statistics()
    assert statistics.tensors_offloaded == 4
    assert statistics.tensors_kept[Reason.HOST_FULL] == 2
    assert statistics.host_bytes <= 2 * nbytes


@needs_cuda
def test_pinned_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from actoffload.device import Accelerator

    def none_left(self: Accelerator, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    layers = make_layers("linear", 6)
    expected = step(layers, 0, no_offload())
    monkeypatch.setattr(Accelerator, "empty_host", none_left)
    pair = offload(3, 6)
    with pytest.warns(actoffload.HostMemoryWarning, match="no more page-locked memory"):
        assert step(layers, 0, pair).differences(expected) == []
    assert pair[0].statistics().tensors_offloaded == 0
