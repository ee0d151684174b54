"""Text and tables of the page of benchmarks, from ``page.toml``; values are shown in units by their format."""

from __future__ import annotations

import string
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

Data: TypeAlias = dict[str, Any]
PAGE = tomllib.loads(Path(__file__).with_name("page.toml").read_text(encoding="utf-8"))
NUMBER = set("0123456789+-−≤≥") | {""}
"""How a cell with a number begins."""
SCALES = {"": 1, "ms": 1e3, "us": 1e6, "MiB": 2**-20, "GiB": 2**-30, "GB": 1e-9, "MHz": 1e-6, "pct": 100}


class _Units(string.Formatter):
    """Format numbers with a scale: ``{seconds:ms.1}`` shows milliseconds with one digit."""

    def format_field(self, value: Any, spec: str) -> str:
        unit, _, digits = spec.lstrip("+").partition(".")
        sign = "+" if spec.startswith("+") else ""
        return f"{value * SCALES[unit]:{sign}.{digits}f}" if digits.isdecimal() else str(value)


fill = _Units().format


def text(name: str, **values: Any) -> str:
    """Return a text of the page with its values."""
    return fill(PAGE["text"][name], **values)


def table(name: str, rows: Iterable[Data]) -> str:
    """Return a table of the page; a cell without a value is empty.  Columns of numbers are aligned to the right."""
    heads, texts = PAGE["tables"][name]

    def cell(template: str, row: Data) -> str:
        try:
            return fill(template, **row)
        except KeyError:
            return ""

    cells = [[cell(template, row) for template in texts.split(" | ")] for row in rows]
    numbers = [all(row[k][:1] in NUMBER for row in cells) for k in range(1 + heads.count("|"))]
    lines = [f"| {heads} |", "|" + "|".join(" ---: " if right else " --- " for right in numbers) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def before_default(data: Data) -> bool:
    """Return whether a result shows an earlier default of `offload`."""
    default = PAGE["default"]
    return data.get("benchmark") in default["benchmarks"] and data["date"] < default["since"]


def origin(data: Data) -> str:
    """Return a paragraph with what a result was measured on, and which of its parts on another device."""
    driver = f", driver {data['device']['driver']}" if data["device"]["driver"] else ""
    values = {"driver": driver, "speed": text("speed", **data["link"]) if "link" in data else ""}
    values |= {"day": data["date"][:10], "sources": data["source_digest"][:12]}
    apart = [
        text("apart", part=part, **found)
        for part, found in data.get("parts", {}).items()
        if found.get("device", data["device"]) != data["device"]
    ]
    beside: dict[str, list[str]] = {}
    for part, found in (data.get("parts") or {"": data}).items():
        if "beside" in found:
            beside.setdefault(found["beside"], []).extend([f"`{part}`"] if part else [])
    for other, names in beside.items():
        verb = "was" if len(names) == 1 else "were"
        when = f"while {', '.join(names)} {verb} measured" if names else "at the same time"
        apart.append(text("beside", beside=other, when=when))
    found = (text("rehearsal") if data["device"]["reference"] else "") + text("origin", **data, **values)
    before = [text("before_default")] if before_default(data) else []
    return " ".join([found, *before, *apart])


def target(name: str, measured: float, **values: Any) -> Data:
    """Return the line of a target of the page with its figure."""
    entry = {"show": "{:.3}", "at_least": False, **PAGE["targets"][name]}
    show, limit = entry["show"], entry["limit"]
    met = measured >= limit if entry["at_least"] else measured <= limit
    return {
        "what": fill(entry["what"], **values),
        "limit": ("≥ " if entry["at_least"] else "≤ ") + fill(show, limit),
        "measured": fill(show, measured),
        "verdict": "met" if met else "missed by " + fill(show, abs(measured - limit)),
    }
