"""The table of the page on implicit synchronization, as code that runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import actoffload.moe

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "implicit_synchronization.md"


@dataclass(frozen=True)
class Row:
    waits: str
    instead: str
    without_accelerator: bool


def rows() -> list[Row]:
    """Read the table: the first piece of code of the first cell, and of the third."""
    lines = PAGE.read_text(encoding="utf-8").split("## Common lines", 1)[1].splitlines()
    found = []
    for line in lines:
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            assert len(cells) == 4, line
            assert cells[3] in ("yes", "no"), line
            waits, instead = (re.match(r"`([^`]+)`", cells[at]) for at in (0, 2))
            assert waits, line
            assert instead, line
            found.append(Row(waits[1], instead[1], cells[3] == "yes"))
    return found


def names(device: str) -> dict[str, Any]:
    """Make everything that the lines of the table use, on `device`."""
    torch.manual_seed(0)
    torch.distributions.Distribution.set_default_validate_args(True)  # torch.compile, once used, switches it off
    pin = device != "cpu"
    model = nn.Linear(4, 4, device=device)
    space: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "actoffload": actoffload,
        "clip_grad_norm_": nn.utils.clip_grad_norm_,
        "device": device,
        "loss": torch.ones((), device=device, requires_grad=True).mul(2),
        "total": torch.zeros((), device=device),
        "bad": torch.zeros((), device=device),
        "step": 1,
        "log": [],
        "pinned": torch.empty((), pin_memory=pin),
        "host": torch.ones(8, 4),
        "host_pinned": torch.empty(8, 4, pin_memory=pin),
        "x": torch.randn(8, 4, device=device),
        "full": torch.zeros(8, 4, device=device),
        "rows": torch.zeros(4, 4, device=device),
        "scale": torch.ones(8, 4, device=device),
        "mask": (torch.arange(8) % 2 == 0).to(device),
        "labels": torch.arange(8).to(device),
        "positions": torch.arange(8).to(device),
        "repeats": torch.full((8,), 2).to(device),
        "index": torch.tensor(3).to(device),
        "indices": torch.tensor([[0, 1], [2, -1]]).to(device),
        "probs": torch.rand(2, 2, device=device),
        "matrix": torch.eye(4, device=device),
        "causal": nn.Transformer.generate_square_subsequent_mask(8, device=torch.device(device)),
        "encoder": nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, device=device), 1, enable_nested_tensor=False
        ),
        "parameters": list(model.parameters()),
    }
    space["optimizer"], space["scaler"] = _scaled(model, device, fused=False)
    space["fused"], space["fused_scaler"] = _scaled(nn.Linear(4, 4, device=device), device, fused=True)
    model(space["x"]).sum().backward()
    if device != "cpu":
        space["stream"] = torch.accelerator.current_stream()
        space["event"] = torch.accelerator.current_stream().record_event()
        torch.accelerator.synchronize()
    return space


def _scaled(model: nn.Module, device: str, fused: bool) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler(device)
    scaler.scale(model(torch.ones(2, 4, device=device)).sum()).backward()
    return optimizer, scaler
