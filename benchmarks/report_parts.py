"""What every table of the results is made of: targets, Markdown, and the origin of a result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Target:
    """One thing to reach.

    Parameters
    ----------
    what : str
        In words.
    limit, measured : float
        In the same unit.
    unit : str
        Behind the numbers.
    at_least : bool
        The limit is a lower one.
    digits : int
        To show.
    """

    what: str
    limit: float
    measured: float
    unit: str
    at_least: bool = False
    digits: int = 3

    @property
    def met(self) -> bool:
        """Whether the limit is kept."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def row(self) -> tuple[str, ...]:
        """Return the cells of its line in the table."""
        sign = "≥" if self.at_least else "≤"
        verdict = "met" if self.met else f"missed by {abs(self.measured - self.limit):.{self.digits}f}{self.unit}"
        return (
            self.what,
            f"{sign} {self.limit:.{self.digits}f}{self.unit}",
            f"{self.measured:.{self.digits}f}{self.unit}",
            verdict,
        )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text unless all of it are numbers, the others are numbers.

    The page's style sheet lets text wrap, but no cell that is aligned to the right.
    """
    rows = list(rows)
    first = "---:" if rows and all(row[0].isdecimal() for row in rows) else "---"
    lines = ["| " + " | ".join(head) + " |", f"| {first} |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def origin(data: dict[str, Any]) -> str:
    """Say in one paragraph what a result was measured on."""
    device = data["device"]
    driver = f", driver {device['driver']}" if device["driver"] else ""
    link = data.get("link")
    speed = f", D2H {link['d2h'] / 1e9:.1f} GB/s, H2D {link['h2d'] / 1e9:.1f} GB/s" if link else ""
    text = (
        f"Measured on {device['name']}{driver}, torch {device['torch']}, Python {device['python']}{speed}, "
        f"{data['date'][:10]}, library sources `{data['source_digest'][:12]}`, with `{data['command']}`."
    )
    return "**Rehearsal on the reference device; no GPU figures.** " + text if device["reference"] else text
