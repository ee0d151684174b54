"""Files of plans: JSON with the format and its version, and what a plan is expected to cost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["PlanFile", "number", "optional_number"]

_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class PlanFile:
    """A kind of plan file.

    Parameters
    ----------
    kind : str
        What the file has, as errors name it.
    version : int
        Of the content.
    written_by : str
        The call that writes such a file, as errors name it.
    """

    kind: str
    version: int
    written_by: str

    def write(self, path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
        """Write the content, with one entry a line."""
        entries = {"format": f"actoffload {self.kind}", "version": self.version, **content}
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
        Path(path).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")

    def read(self, path: str | os.PathLike[str], plan_of: Callable[[dict[str, Any]], _Plan]) -> _Plan:
        """Return the plan that a function makes of the content.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If the file is of another kind or version, or the function fails.
        """
        text = Path(path).read_bytes()
        try:
            content = json.loads(text)
            if (content["format"], content["version"]) != (f"actoffload {self.kind}", self.version):
                raise ValueError(f"expected actoffload {self.kind} of version {self.version}")
            return plan_of(content)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is no {self.kind} that this version of actoffload can read ({error!r}); "
                f"write it with `{self.written_by}`."
            ) from error


def number(value: Any, *types: type) -> Any:
    """Return a number of one of the types, int if none is given; raise a `ValueError` for others and negative ones."""
    if type(value) not in (types or (int,)) or not value >= 0:
        raise ValueError(f"{value!r} is no number that was expected")
    return value


def optional_number(value: Any, *types: type) -> Any:
    """Return None, or what `number` returns."""
    return None if value is None else number(value, *types)
