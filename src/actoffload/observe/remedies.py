"""What to do about each reason for which a tensor stays, and about those who hold memory: the words of `advice`."""

from __future__ import annotations

from .counters import Reason

__all__ = ["DOING", "KEEP_ARGUMENTS", "RETURN_LESS"]

DOING = {
    Reason.MARKED: "take the calls of mark_not_offload away if they may leave",
    Reason.KEPT: "take their module out of keep if they may leave",
    Reason.LEAF: "whoever made them holds them as well, so a copy would free nothing; pass them without "
    "requires_grad if nobody needs their gradients",
    Reason.SUBCLASS: "a subclass travels in parts if its class has __tensor_flatten__ and __tensor_unflatten__, or "
    "prepare_for_saving",
    Reason.SHARED: "they leave only if all groups that save them do: raise num_layers, unless the last group of a "
    "kind, which always stays, is one of them",
    Reason.LAYOUT: "only strided tensors can leave; a dense form of them would",
}

RETURN_LESS = (
    (r"past_key_values", "pass use_cache=False to the model, or set model.config.use_cache = False, for training"),
    (r"\w*hidden_states", "pass output_hidden_states=False to the model if the loss does not need them"),
    (r"\w*attentions", "pass output_attentions=False to the model if the loss does not need them"),
    (r"", "return only what the loss needs from forward while training"),
)
"""By the name of what a model returns: how to have it return less.  The names are those of Hugging Face's models."""

KEEP_ARGUMENTS = "they go when that call ends, if its caller lets go of them; mark_not_offload spares their copies"
