"""The API reference has every public name, once, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import actoffload

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_documents_exactly_the_public_names():
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?!module)\w+:: (\w+)", text, re.MULTILINE)
    assert re.findall(r"^\.\. automodule:: ([\w.]+)", text, re.MULTILINE) == ["actoffload.moe"]
    assert sorted(named) == sorted({*actoffload.__all__, *actoffload.moe.__all__} - {"moe"})


def test_every_public_name_has_a_docstring():
    for name in actoffload.__all__:
        assert getattr(actoffload, name).__doc__, name
