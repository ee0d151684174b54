from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutation"))

import mutants  # noqa: E402

SOURCE = ROOT / "src"


def test_every_wait_of_the_engine_has_a_tag() -> None:
    assert mutants.untagged(SOURCE) == []


def test_a_wait_without_a_tag_is_found(tmp_path: Path) -> None:
    engine = tmp_path / "actoffload" / "engine"
    engine.mkdir(parents=True)
    (engine / "some.py").write_text(
        "def wait(self):\n"
        "    backend.wait(a, b)\n"
        "    self.wait(a, b)  # [wait: tagged]\n"
        "    # [wait: tagged above]\n"
        "    transfers.join(a, b)\n"
        "    transfers.join(a, b)  # a comment\n"
        "    print(', '.join(names))\n"
    )
    assert mutants.untagged(tmp_path) == [
        "some.py:2: backend.wait(a, b)",
        "some.py:6: transfers.join(a, b)  # a comment",
    ]


def test_tags_name_one_place_each() -> None:
    names = Counter(mutant.name for mutant in mutants.tagged(SOURCE))
    assert [name for name, count in names.items() if count > 1] == []
    assert sum(name.startswith("wait: ") for name in names) > 10
    assert {f"keep: {name}" for name in mutants.KEPT_BY} == {name for name in names if name.startswith("keep: ")}


def test_every_mutant_is_a_program_that_differs_from_the_source() -> None:
    found = [*mutants.tagged(SOURCE), *mutants.conditions(SOURCE)]
    for mutant in found:
        compile(mutant.text, mutant.path, "exec")
        assert mutant.text != (SOURCE / mutant.path).read_text(encoding="utf-8")
    assert len({(mutant.path, mutant.text) for mutant in found}) == len(found)


def test_a_row_that_no_longer_fits_the_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ("gone", "actoffload/engine/pack.py", "no such line", "")
    monkeypatch.setattr(mutants, "CONDITIONS", [row])
    with pytest.raises(LookupError, match=r"'gone': .*pack\.py has 0 times 'no such line', expected once"):
        list(mutants.conditions(SOURCE))
