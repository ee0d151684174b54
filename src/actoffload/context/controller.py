"""Manual offload schedule: the program calls offload, release and reload of each layer."""

from __future__ import annotations

from ..engine.layer import Phase
from ..engine.passes import Pass
from ..schedule.plan import Do
from .context import OffloadContext

__all__ = ["ManualController"]


class ManualController:
    """Offloads, releases and reloads the activations of one layer at a time.

    A layer without calls stays on the device.  For the others the order is `start_offload_layer`,
    `release_activation_forward_gpu_memory`, `start_reload_layer`.  A released layer without a reload is reloaded when
    backward needs it, with a stall.

    Layer ids count the entries of the context in one forward, from 0.  They refer to `OffloadContext.current_pass`: in
    a hook that runs in backward, the pass of that backward; else the calling thread's latest.  `in_pass` is another
    pass in flight.  Each method raises `ValueError` if there is no such layer, and `RuntimeError` if the layer has not
    run, is still in its forward, or the call is out of order.

    Notes
    -----
    Names and meaning are those of the manual controller in Transformer Engine's PyTorch API.
    """

    def __init__(self, context: OffloadContext) -> None:
        self._context = context

    def start_offload_layer(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Queue the copies of a layer's activations to the host; each starts as soon as its tensor is ready."""
        self._do(Do.OFFLOAD, Phase.SAVED, layer_id, in_pass)

    def release_activation_forward_gpu_memory(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Let the current stream wait for the copies of a layer, and free its device memory."""
        self._do(Do.RELEASE, Phase.OFFLOADING, layer_id, in_pass)

    def start_reload_layer(self, layer_id: int, *, in_pass: Pass | None = None) -> None:
        """Allocate device memory for a layer and queue the copies to it; backward waits for each tensor it uses."""
        self._do(Do.RELOAD, Phase.RELEASED, layer_id, in_pass)

    def _do(self, action: Do, expected: Phase, layer_id: int, in_pass: Pass | None) -> None:
        call = _CALLS[action]
        count = self._context.plan.model_layers
        if type(layer_id) is not int or not 0 <= layer_id < count:
            raise ValueError(
                f"{call}({layer_id!r}): there is no such layer; expected a layer id from 0 to {count - 1}."
            )
        target = in_pass or self._context.current_pass
        if target is None or layer_id >= len(target.layers):
            raise RuntimeError(
                f"{call}({layer_id}): layer {layer_id} has not run in this pass; call it after its forward."
            )
        with target.lock:
            layer = target.layers[layer_id]
            if layer.phase is not expected:
                raise RuntimeError(f"{call}({layer_id}): layer {layer_id} {layer.phase.value}; {_NEXT[action]}.")
            target.do(action, layer_id)


_CALLS = {
    Do.OFFLOAD: "start_offload_layer",
    Do.RELEASE: "release_activation_forward_gpu_memory",
    Do.RELOAD: "start_reload_layer",
}
_NEXT = {
    Do.OFFLOAD: "call it once, after the layer's context was left and before the layer is released",
    Do.RELEASE: "call it once, after start_offload_layer",
    Do.RELOAD: "call it once, after release_activation_forward_gpu_memory",
}
